"""Pages between device memory and pinned host memory, there and back."""

from __future__ import annotations

import pytest
import torch

from engine.core.types import PageLayout
from engine.device.kv_pool import KVPool
from engine.device.page_copy import copy_pages

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_survive_the_host(dtype: str) -> None:
    layout = PageLayout(16, 4, 2, 64, dtype, "f" * 32)
    device, host = KVPool(layout, 64, "cuda"), KVPool(layout, 128, pinned=True)
    assert host.data.is_pinned()
    device.data.copy_(torch.randn(device.data.shape))
    computed = device.data.clone()
    away = list(range(0, 64, 2))
    copy_pages(device, away, host, [127 - page for page in away])
    device.data[away] = 0
    copy_pages(host, [127 - page for page in away], device, away)
    assert torch.equal(device.data, computed)
