"""What a call is refused for, from shapes and types alone (no look at values, so no wait for a device).

Every message names the argument, what it was and what it must be.
"""

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_PAGES = "[num_pages, 2, kv_heads, page_size, head_dim]"
_POOL = "[num_pages, layers, 2, kv_heads, page_size, head_dim]"


def _check_shape(name: str, tensor: Tensor, want: tuple[int, ...], meaning: str) -> None:
    if tensor.shape != want:
        raise ValueError(f"{name}: shape {list(tensor.shape)}, must be {meaning} = {list(want)}")


def _check_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: type {tensor.dtype}, must be {' or '.join(map(str, allowed))}")


def _check_device(name: str, tensor: Tensor, home: Tensor) -> None:
    if tensor.device != home.device:
        raise ValueError(f"{name}: on {tensor.device}, must be where the pages are, on {home.device}")


def _check_pages(pages: Tensor) -> None:
    if pages.dim() != 5 or pages.shape[1] != 2:
        raise ValueError(f"pages: shape {list(pages.shape)}, must be {_PAGES}")
    _check_dtype("pages", pages, _FLOATS)


def check_store(key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Refuse what `store_kv` cannot take."""
    _check_pages(pages)
    if key.dim() != 3:
        raise ValueError(f"key: shape {list(key.shape)}, must be [T, kv_heads, head_dim]")
    want = (key.shape[0], pages.shape[2], pages.shape[4])
    for name, tensor in (("key", key), ("value", value)):
        _check_shape(name, tensor, want, "[T, kv_heads, head_dim]")
        _check_dtype(name, tensor, _FLOATS)
        _check_device(name, tensor, pages)
    _check_shape("slots", slots, want[:1], "[T]")
    _check_dtype("slots", slots, (torch.int64,))
    _check_device("slots", slots, pages)


def check_attention(query: Tensor, pages: Tensor, page_table: Tensor, seq_lens: Tensor) -> None:
    """Refuse what neither attention can take."""
    _check_pages(pages)
    kv_heads, head_dim = pages.shape[2], pages.shape[4]
    if query.dim() != 3 or query.shape[2] != head_dim:
        raise ValueError(f"query: shape {list(query.shape)}, must be [T, heads, head_dim] with head_dim {head_dim}")
    if query.shape[1] % kv_heads:
        raise ValueError(f"query: {query.shape[1]} heads, must be a multiple of the pages' {kv_heads} kv_heads")
    _check_dtype("query", query, _FLOATS)
    if page_table.dim() != 2:
        raise ValueError(f"page_table: shape {list(page_table.shape)}, must be [B, P]")
    _check_shape("seq_lens", seq_lens, (page_table.shape[0],), "[B]")
    _check_dtype("page_table", page_table, (torch.int32,))
    _check_dtype("seq_lens", seq_lens, (torch.int32,))
    for name, tensor in (("query", query), ("page_table", page_table), ("seq_lens", seq_lens)):
        _check_device(name, tensor, pages)


def check_query_starts(query_starts: Tensor, page_table: Tensor) -> None:
    """Refuse what `extend_attention` alone asks for."""
    _check_shape("query_starts", query_starts, (page_table.shape[0] + 1,), "[B + 1]")
    _check_dtype("query_starts", query_starts, (torch.int32,))
    _check_device("query_starts", query_starts, page_table)


def check_one_query_each(query: Tensor, page_table: Tensor) -> None:
    """Refuse what `decode_attention` alone asks for."""
    if query.shape[0] != page_table.shape[0]:
        raise ValueError(f"query: {query.shape[0]} rows, must be one a row of page_table, {page_table.shape[0]}")


def check_pool(pool: Tensor, ids: Tensor) -> None:
    """Refuse a pool or page ids that whole pages cannot be moved by."""
    if pool.dim() != 6 or pool.shape[2] != 2:
        raise ValueError(f"pool: shape {list(pool.shape)}, must be {_POOL}")
    _check_dtype("pool", pool, _FLOATS)
    if not pool[:1].is_contiguous():
        raise ValueError(f"pool: strides {list(pool.stride())}, must make each page contiguous")
    if ids.dim() != 1:
        raise ValueError(f"ids: shape {list(ids.shape)}, must be [n]")
    _check_dtype("ids", ids, (torch.int32, torch.int64))
    _check_device("ids", ids, pool)


def check_source(source: Tensor, pool: Tensor, ids: Tensor) -> None:
    """Refuse pages that cannot go into the pool as they are."""
    _check_shape("source", source, (ids.shape[0], *pool.shape[1:]), "[n, layers, 2, kv_heads, page_size, head_dim]")
    _check_dtype("source", source, (pool.dtype,))
    _check_device("source", source, pool)
    if not source.is_contiguous():
        raise ValueError(f"source: strides {list(source.stride())}, must be contiguous")
