from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults.forge import Forge
from tests.helpers.models import tiny_model


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with closing(Forge(tmp_path_factory.mktemp("forge"))) as made:
        yield made


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_model("qwen3")
