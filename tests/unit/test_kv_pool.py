import ctypes

import pytest
import torch

from engine.core.errors import ConfigError
from engine.core.types import PageLayout
from engine.device.kv_pool import KVPool, pages_for_budget
from tests.helpers.models import prepared_tiny


def layout(dtype: str = "float32", page_size: int = 4) -> PageLayout:
    return PageLayout(page_size=page_size, layers=3, kv_heads=2, head_dim=8, dtype=dtype, fingerprint="f")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pool_is_page_first_zeroed_and_aligned(dtype: str) -> None:
    pool = KVPool(layout(dtype), num_pages=5)
    assert pool.data.shape == (5, 3, 2, 2, 4, 8)
    assert pool.data.dtype == getattr(torch, dtype)
    assert pool.base_address % 4096 == 0
    assert pool.nbytes == 5 * pool.page_bytes == 5 * layout(dtype).page_bytes
    assert not pool.data.any()
    pool.check_integrity()


def test_a_page_is_one_contiguous_range_with_all_its_layers() -> None:
    pool = KVPool(layout(), num_pages=4)
    for index in range(3):
        pool.layer(index)[2] = index + 1
    raw = ctypes.string_at(pool.base_address + 2 * pool.page_bytes, pool.page_bytes)
    values = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(3, -1)
    assert [row.unique().tolist() for row in values] == [[1.0], [2.0], [3.0]]
    assert not pool.data[[0, 1, 3]].any()


def test_layout_takes_shape_and_fingerprint_from_the_model() -> None:
    model = prepared_tiny("qwen3")
    assert model.layout(16, "float16") == PageLayout(16, 3, 2, 32, "float16", model.fingerprint)


def test_budget_is_counted_in_whole_pages() -> None:
    page = layout().page_bytes
    assert pages_for_budget(layout(), 7 * page + page - 1) == 7
    with pytest.raises(ConfigError, match=f"allowed: at least {page}, the bytes of one page"):
        pages_for_budget(layout(), page - 1)
