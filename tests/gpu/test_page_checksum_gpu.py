"""Checksums of pages in device memory are those of the same bytes in the host's."""

from __future__ import annotations

import pytest
import torch

from engine.core.types import PageLayout
from engine.device.kv_pool import KVPool
from engine.device.page_checksum import page_checksums

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("layers", "pages"), [(1, 300), (200, 24)], ids=["small pages", "large pages"])
def test_equal_on_device_and_host(layers: int, pages: int) -> None:
    layout = PageLayout(16, layers, 8, 128, "float16", "f" * 32)
    device = KVPool(layout, pages, "cuda")
    device.data.copy_(torch.randn(device.data.shape))
    device.data[0] = -0.0
    torch.cuda.synchronize()
    order = list(range(pages - 1, -1, -1))
    assert page_checksums(device.data, order) == page_checksums(device.data.cpu(), order)
