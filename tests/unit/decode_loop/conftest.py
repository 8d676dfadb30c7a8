from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core.messages import LinkUp
from engine.core.types import NodeIdentity
from tests.helpers.decode_rooms import PAGES, Decode
from tests.helpers.engines import decode_engine
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FilePool, LocalNode


@pytest.fixture
def d() -> Iterator[Decode]:
    with decode_engine(PAGES) as engine:
        yield engine


@pytest.fixture
def writer(d: Decode, tmp_path: Path) -> Iterator[LocalNode]:
    """A node that writes into the decode node's pool, which it alone has to know for that."""
    node = LocalNode(NodeIdentity.new("p"), FilePool(tmp_path / "pool", PAGES, d.device.pool.page_bytes))
    node.agent.add_peer(d.agent.identity, d.agent.metadata, d.agent.memory)
    node.start_sender()
    yield node
    node.close()


@pytest.fixture
def link(d: Decode) -> RecordingLink:
    one = RecordingLink()
    d.tell(one, LinkUp())
    return one
