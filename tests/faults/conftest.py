from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cells import long_and_short, ready
from tests.faults.harness import FaultyCluster
from tests.faults.load import Ask, Load
from tests.helpers.models import tiny_model


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def asks(load: Load, served: FaultyCluster) -> list[Ask]:
    """For the modules of cells, which say themselves what is `served` and what the `load` is."""
    return long_and_short(load, served)


@pytest.fixture
def cluster(served: FaultyCluster) -> FaultyCluster:
    return ready(served)
