from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli.main import main
from tests.helpers.canned_front import Front, Run


@pytest.fixture
def front() -> Iterator[Front]:
    with Front() as front:
        yield front


@pytest.fixture
def run(front: Front) -> Run:
    def run(*argv: str) -> int:
        return main(argv, {"KVRELAY_BOOTSTRAP": front.address})

    return run
