"""The operations as Triton kernels (`triton_kernels`): what a CUDA node runs.

Nothing here waits for the device: grids come from shapes (a program that finds nothing to do returns), lengths and
ids are read by the kernels. Query heads that share a kv head are rows of one block (row r: token r // group, head
r % group), so that keys and values are loaded once for all of them. What a program computes depends on its own request
alone, and decode splits have a fixed length: a request gets the same answer, to the bit, whatever it is batched with.

Arguments are those of the public functions, already checked.
"""

import math

import torch
import triton
from torch import Tensor

from kvrelay_kernels import triton_kernels as kernels

_EXTEND_ROWS = 64  # rows of a query block
_DOT_ROWS = 16  # the fewest rows, columns and depth that a matrix product takes on the device
_SPLIT = 256  # tokens of one decode program
_COPY = 4096  # elements of one page-copying program
_TILE_BYTES = 16384  # of keys, and as much of values, in one step of attention


def store_kv(key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
    """See `kvrelay_kernels.store_kv`. A program for each token."""
    tokens, kv_heads, head_dim = key.shape
    with torch.cuda.device(pages.get_device()):
        kernels.store_kernel[(tokens,)](
            key, value, pages, slots.contiguous(),
            *key.stride(), *value.stride(), *pages.stride(),
            kv_heads, head_dim,
            PAGE_SIZE=pages.shape[3],
            HEADS=triton.next_power_of_2(kv_heads),
            DIM=triton.next_power_of_2(head_dim),
        )  # fmt: skip


def extend_attention(
    query: Tensor, pages: Tensor, page_table: Tensor, query_starts: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """See `kvrelay_kernels.extend_attention`. A program for each block of query tokens and kv head."""
    tokens, heads, head_dim = query.shape
    batch, table_width = page_table.shape
    kv_heads = pages.shape[2]
    group = heads // kv_heads
    rows = max(_EXTEND_ROWS, triton.next_power_of_2(group))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    with torch.cuda.device(pages.get_device()):
        kernels.extend_kernel[(tokens // (rows // group) + batch, kv_heads)](
            query, pages, page_table.contiguous(), query_starts.contiguous(), seq_lens.contiguous(), out,
            *query.stride(), *pages.stride(),
            batch, table_width, heads, group, head_dim, scale * math.log2(math.e),
            PAGE_SIZE=pages.shape[3],
            ROWS=rows,
            **_tile(query, pages),
        )  # fmt: skip
    return out


def decode_attention(query: Tensor, pages: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    """See `kvrelay_kernels.decode_attention`. A program for each request, kv head and split, then one to merge them."""
    batch, heads, head_dim = query.shape
    _, _, kv_heads, page_size, _ = pages.shape
    group, table_width = heads // kv_heads, page_table.shape[1]
    splits = triton.cdiv(table_width * page_size, _SPLIT)
    partial = torch.empty((batch, heads, splits, head_dim), dtype=torch.float32, device=query.device)
    weights = torch.empty((batch, heads, splits), dtype=torch.float32, device=query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    seq_lens = seq_lens.contiguous()
    tile = _tile(query, pages)
    with torch.cuda.device(pages.get_device()):
        kernels.decode_kernel[(batch, kv_heads, splits)](
            query, pages, page_table.contiguous(), seq_lens, partial, weights,
            *query.stride(), *pages.stride(),
            table_width, heads, group, head_dim, scale * math.log2(math.e), splits,
            SPLIT=_SPLIT,
            PAGE_SIZE=page_size,
            ROWS=max(_DOT_ROWS, triton.next_power_of_2(group)),
            **tile,
        )  # fmt: skip
        kernels.merge_kernel[(batch, heads)](
            partial, weights, seq_lens, out, heads, head_dim, splits, SPLIT=_SPLIT, DIM=tile["DIM"]
        )
    return out


def gather_pages(pool: Tensor, ids: Tensor) -> Tensor:
    """See `kvrelay_kernels.gather_pages`."""
    pages = torch.empty((ids.shape[0], *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    _move_pages(pool, ids, pages, to_pool=False)
    return pages


def scatter_pages(pool: Tensor, ids: Tensor, source: Tensor) -> None:
    """See `kvrelay_kernels.scatter_pages`."""
    _move_pages(pool, ids, source, to_pool=True)


def _move_pages(pool: Tensor, ids: Tensor, pages: Tensor, *, to_pool: bool) -> None:
    """Copy between pages `ids` of the pool and `pages`, a program for each page and _COPY elements of it."""
    elements = math.prod(pool.shape[1:])
    with torch.cuda.device(pool.get_device()):
        kernels.move_kernel[(ids.shape[0], triton.cdiv(elements, _COPY))](
            pool, ids.contiguous(), pages, pool.stride(0), elements, TO_POOL=to_pool, BLOCK=_COPY
        )


def _tile(query: Tensor, pages: Tensor) -> dict[str, int]:
    """Keys and dimensions of one step of attention: as many keys as fill _TILE_BYTES in the type to multiply in."""
    dim = max(_DOT_ROWS, triton.next_power_of_2(pages.shape[4]))
    size = pages.element_size() if query.dtype == pages.dtype else 4
    return {"KEYS": min(64, max(_DOT_ROWS, _TILE_BYTES // (dim * size))), "DIM": dim}
