"""Attention over a paged KV pool: tensors in, tensors out.

Owns the five operations that read and write KV pages, and the strides of those pages. Knows nothing of requests,
layers, models or who allocates pages: ids arrive as tensors, and a "request" here is a row of a page table.

The pool is page-first, ``[num_pages, layers, 2, kv_heads, page_size, head_dim]`` (2: key, value). Attention works on
one layer of it, the strided view ``pages = pool[:, layer]``: ``[num_pages, 2, kv_heads, page_size, head_dim]``.

The way of a forward through here, for each layer: ``store_kv`` puts the new tokens' keys and values into their slots,
then ``extend_attention`` (chunks of prompts) or ``decode_attention`` (one token a request) attends over the pages,
new tokens included. ``gather_pages`` and ``scatter_pages`` copy whole pages out of the pool and back.

Each operation is there twice: ``reference`` (torch; what a CPU node runs and what tests trust) and ``triton_ops``
(what a CUDA node runs). ``_backend`` chooses, by the device of the tensors. ``checks`` refuses wrong shapes and types
for both, by what the host knows: it never waits for the device.

Types: pool and query are float32, float16 or bfloat16, and may differ. Keys and values are cast to the pool's type
when stored; attention accumulates in float32 and answers in the query's type. ``page_table``, ``query_starts`` and
``seq_lens`` are int32, ``slots`` int64. All tensors of a call are on one device. Heads are grouped: ``heads`` is a
multiple of ``kv_heads``, and query head h reads kv head ``h // (heads // kv_heads)``.
"""

from typing import Protocol

from torch import Tensor

from kvrelay_kernels import checks, reference

__all__ = ["decode_attention", "extend_attention", "gather_pages", "scatter_pages", "store_kv"]


class _Backend(Protocol):
    """What both implementations offer; arguments as in the public functions below, already checked."""

    def store_kv(self, key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None: ...

    def extend_attention(
        self, query: Tensor, pages: Tensor, page_table: Tensor, query_starts: Tensor, seq_lens: Tensor, scale: float
    ) -> Tensor: ...

    def decode_attention(
        self, query: Tensor, pages: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Tensor: ...

    def gather_pages(self, pool: Tensor, ids: Tensor) -> Tensor: ...

    def scatter_pages(self, pool: Tensor, ids: Tensor, source: Tensor) -> None: ...


def _backend(tensor: Tensor) -> _Backend:
    """The implementation for the device that `tensor` is on."""
    if tensor.is_cuda:
        # Imported at first use: a CPU node starts without Triton, and TRITON_INTERPRET can be set until then.
        import kvrelay_kernels.triton_ops as triton_ops

        return triton_ops
    return reference


def store_kv(key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write the keys and values of T tokens into their slots of one layer's pages, cast to the pool's type.

    key, value: [T, kv_heads, head_dim]. pages: [num_pages, 2, kv_heads, page_size, head_dim], any strides, written in
    place. slots: [T] int64, page_id * page_size + offset, each at most once.
    Raises ValueError for wrong shapes and types; on CPU also for a slot outside the pages.
    """
    checks.check_store(key, value, pages, slots)
    _backend(pages).store_kv(key, value, pages, slots)


def extend_attention(
    query: Tensor, pages: Tensor, page_table: Tensor, query_starts: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """Causal attention of a ragged batch of query chunks over their pages, which already hold the chunks' own tokens.

    query: [T, heads, head_dim], the chunks of B requests one after another. pages: [num_pages, 2, kv_heads, page_size,
    head_dim], any strides. page_table: [B, P] int32, the pages of each request in order, padded with any valid ids:
    nothing past seq_lens is read. query_starts: [B + 1] int32, the first query row of each request and T. seq_lens: [B]
    int32, tokens of each request with those of its chunk, which come last: query j of request b sits at position
    seq_lens[b] - (its chunk's length) + j. scale: multiplies the scores.
    Returns [T, heads, head_dim] in the query's type.
    Raises ValueError for wrong shapes and types; on CPU also for page ids and lengths outside the pages.
    """
    checks.check_attention(query, pages, page_table, seq_lens)
    checks.check_query_starts(query_starts, page_table)
    return _backend(pages).extend_attention(query, pages, page_table, query_starts, seq_lens, scale)


def decode_attention(query: Tensor, pages: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    """Attention of one query a request, at its last position, over the request's pages.

    query: [B, heads, head_dim]. The other arguments, result and errors are those of `extend_attention`.
    """
    checks.check_attention(query, pages, page_table, seq_lens)
    checks.check_one_query_each(query, page_table)
    return _backend(pages).decode_attention(query, pages, page_table, seq_lens, scale)


def gather_pages(pool: Tensor, ids: Tensor) -> Tensor:
    """A copy of n whole pages: [n, layers, 2, kv_heads, page_size, head_dim], contiguous, on the pool's device.

    pool: [num_pages, layers, 2, kv_heads, page_size, head_dim], each page contiguous. ids: [n] int32 or int64.
    Raises ValueError for wrong shapes and types; on CPU IndexError for an id outside the pool.
    """
    checks.check_pool(pool, ids)
    return _backend(pool).gather_pages(pool, ids)


def scatter_pages(pool: Tensor, ids: Tensor, source: Tensor) -> None:
    """Write n whole pages, as `gather_pages` returned them, to the pages `ids` of the pool, each id at most once.

    source: [n, layers, 2, kv_heads, page_size, head_dim], contiguous, in the pool's type and on its device. Pool, ids
    and errors as in `gather_pages`.
    """
    checks.check_pool(pool, ids)
    checks.check_source(source, pool, ids)
    _backend(pool).scatter_pages(pool, ids, source)
