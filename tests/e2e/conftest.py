from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.model_store import DEMO_MODEL, default_cache_dir, ensure_prepared


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of the real demo model; converted once a machine, half a minute."""
    return ensure_prepared(DEMO_MODEL, default_cache_dir(), print).path
