from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core.messages import LinkUp, PeerJoined
from engine.core.types import NodeIdentity, PeerInfo, Role
from tests.helpers.engines import prefill_engine
from tests.helpers.prefill_rooms import CHUNK, PAGES, Pages, Prefill
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FilePool, LocalNode


@pytest.fixture
def p(request: pytest.FixtureRequest) -> Iterator[Prefill]:
    """The parameter, if there is one: pages of a host tier."""
    host_pages = getattr(request, "param", None)
    with prefill_engine(PAGES, host_pages=host_pages, chunk_size=CHUNK, max_prefill_tokens=4 * CHUNK) as engine:
        yield engine


@pytest.fixture
def d(p: Prefill, tmp_path: Path) -> Iterator[LocalNode]:
    """A node that takes pages in."""
    node = LocalNode(NodeIdentity.new("d"), FilePool(tmp_path / "pool", PAGES, p.device.pool.page_bytes))
    node.start_receiver()
    yield node
    node.close()


@pytest.fixture
def link(p: Prefill, d: LocalNode) -> RecordingLink:
    """A bootstrap that knows the node `d`."""
    one = RecordingLink()
    peer = PeerInfo(d.identity, Role.DECODE, d.agent.memory, d.agent.metadata)
    p.tell(one, LinkUp(), PeerJoined(peer))
    one.reports.clear()
    return one


@pytest.fixture
def grants(d: LocalNode) -> Pages:
    return Pages(d)
