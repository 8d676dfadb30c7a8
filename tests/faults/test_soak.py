"""A short soak: what `make soak` does for minutes, from a seed whose faults are of many kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import soak

FAULTS, SEED = 25, 6


@pytest.mark.timeout(300)
def test_random_faults_harm_nobody(model: Path, tmp_path: Path) -> None:
    tally = soak(tmp_path, model, FAULTS, SEED)
    print("\n".join(tally.lines()))
    assert not tally.bad
    assert tally.requests > 5 * FAULTS, "there was hardly any load"
