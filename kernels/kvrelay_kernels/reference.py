"""The operations in torch: what a CPU node runs, and what the Triton kernels are checked against.

The key (or value) of one token and kv head is one row of head_dim elements. In a page-first pool every stride is a
whole number of rows, so one layer's keys can be seen in place as a matrix ``[rows, head_dim]`` over the pool's memory,
in which row numbers address tokens (the rows between belong to other layers and to the values, and are never asked
for). Decoding reads the pool through two operations that take row numbers, and copies no key and no value: on a CPU
it is bound by memory, and copying the pages together first would double the traffic.

All arithmetic is float32. Arguments are those of the public functions, already checked.
"""

import itertools
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_QUERY_BLOCK = 64  # queries that share one mask window; larger blocks compute more scores only to hide them

with warnings.catch_warnings():
    # torch says once per process that its CSR tensors are in beta. Of them decoding uses one documented product.
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1))


def store_kv(key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
    """See `kvrelay_kernels.store_kv`."""
    num_pages, page_size = pages.shape[0], pages.shape[3]
    _check_range("slots", slots, 0, num_pages * page_size - 1)
    page = slots.div(page_size, rounding_mode="floor")
    by_slot = pages.permute(0, 3, 1, 2, 4)  # [num_pages, page_size, 2, kv_heads, head_dim]
    by_slot[page, slots - page * page_size] = torch.stack((key, value), dim=1).to(pages.dtype)


def extend_attention(
    query: Tensor, pages: Tensor, page_table: Tensor, query_starts: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """See `kvrelay_kernels.extend_attention`."""
    _check_lengths(pages, page_table, seq_lens)
    pages, page_table = _in_rows(pages, page_table)
    keys, values = _row_views(pages)
    rows = _row_numbers(pages, page_table)
    out = query.new_empty(query.shape)
    for row, seq_len, (start, stop) in zip(rows, seq_lens.tolist(), _spans(query_starts, query), strict=True):
        if stop - start > seq_len:
            raise ValueError(f"seq_lens: {seq_len} for a chunk of {stop - start}, must be at least as long")
        # embedding is torch's quickest way to copy rows: [1, kv_heads, seq_len] -> [1, kv_heads, seq_len, head_dim].
        tokens = row[None, :, :seq_len]
        key, value = functional.embedding(tokens, keys), functional.embedding(tokens, values)
        _causal_attention(query[start:stop], key, value, scale, out[start:stop])
    return out


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
    """Attention of one request's chunk [Q, heads, head_dim] over [1, kv_heads, S, head_dim], its own tokens last.

    Goes by blocks of queries, each over the keys that its last query sees: torch's own causal flag is for Q = S only,
    and one mask over the whole chunk would compute the hidden half of the scores.
    """
    length, past = query.shape[0], key.shape[2] - query.shape[0]
    starts = range(0, length, _QUERY_BLOCK)
    queries = query.float().transpose(0, 1).unsqueeze(0)
    # Row i of `hidden` sees columns up to i + reach. A block with less before it sees a window further right.
    reach = past + max(starts, default=0)
    hidden = torch.full((_QUERY_BLOCK, reach + _QUERY_BLOCK), -torch.inf, device=query.device).triu_(reach + 1)
    for start in starts:
        stop = min(start + _QUERY_BLOCK, length)
        mask = hidden[: stop - start, reach - past - start : reach + stop - start]
        seen = slice(0, past + stop)
        block = functional.scaled_dot_product_attention(
            queries[:, :, start:stop], key[:, :, seen], value[:, :, seen], mask, scale=scale, enable_gqa=True
        )
        out[start:stop] = block[0].transpose(0, 1)


def decode_attention(query: Tensor, pages: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    """See `kvrelay_kernels.decode_attention`."""
    batch, heads, head_dim = query.shape
    pages, page_table = _in_rows(pages, page_table)
    plan = _decode_plan(pages, page_table, seq_lens, heads)
    keys, values = _row_views(pages)
    # One CSR row for each request and head, an entry for each of its tokens: the product is computed there alone. The
    # entries start from zero since beta multiplies what is there, and 0 * NaN is NaN. They are in the order of tokens,
    # not of columns, which the product does not mind but torch's own check would.
    scores = torch.zeros(plan.rows.shape, device=query.device)
    size = (batch * heads, keys.shape[0])
    entries = torch.sparse_csr_tensor(plan.starts, plan.rows, scores, size, check_invariants=False)
    flat_query = query.float().reshape(batch * heads, head_dim)
    torch.sparse.sampled_addmm(entries, flat_query, keys.t(), beta=0.0, alpha=scale, out=entries)
    for mine in scores.split_with_sizes(plan.sizes):
        by_head = mine.view(heads, -1)
        torch.softmax(by_head, dim=-1, out=by_head)
    out = functional.embedding_bag(
        plan.rows, values, plan.starts, mode="sum", per_sample_weights=scores, include_last_offset=True
    )
    return out.view(query.shape).to(query.dtype)


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """Which rows a decode step reads. The same for all layers of a step, so each step makes it once.

    Made from `geometry` (shape and strides of the pages), `heads`, `page_table` and `seq_lens`. rows: [sum of heads *
    seq_len] int64, by request, then head, then token. starts: [B * heads + 1], where each head's rows begin. sizes:
    rows of each request.
    """

    geometry: tuple[tuple[int, ...], tuple[int, ...]]
    heads: int
    page_table: Tensor
    seq_lens: Tensor
    rows: Tensor
    starts: Tensor
    sizes: list[int]


_last_plan: _DecodePlan | None = None


def _decode_plan(pages: Tensor, page_table: Tensor, seq_lens: Tensor, heads: int) -> _DecodePlan:
    """The last plan when it was made from equal arguments (compared by value, so no caller need promise anything)."""
    global _last_plan
    plan = _last_plan
    if (
        plan is None
        or plan.geometry != (pages.shape, pages.stride())
        or plan.heads != heads
        or not torch.equal(plan.seq_lens, seq_lens)
        or not torch.equal(plan.page_table, page_table)
    ):
        _check_lengths(pages, page_table, seq_lens)
        kv_heads = pages.shape[2]
        lengths = seq_lens.tolist()
        by_request = zip(_row_numbers(pages, page_table), lengths, strict=True)
        grouped = [row[:, None, :n].expand(kv_heads, heads // kv_heads, n).reshape(-1) for row, n in by_request]
        starts = torch.zeros(len(lengths) * heads + 1, dtype=torch.int64, device=pages.device)
        torch.cumsum(seq_lens.repeat_interleave(heads), 0, out=starts[1:])
        plan = _DecodePlan(
            geometry=(pages.shape, pages.stride()),
            heads=heads,
            page_table=page_table.clone(),
            seq_lens=seq_lens.clone(),
            rows=torch.cat(grouped),
            starts=starts,
            sizes=[heads * n for n in lengths],
        )
        _last_plan = plan
    return plan


def gather_pages(pool: Tensor, ids: Tensor) -> Tensor:
    """See `kvrelay_kernels.gather_pages`."""
    return pool.index_select(0, ids)


def scatter_pages(pool: Tensor, ids: Tensor, source: Tensor) -> None:
    """See `kvrelay_kernels.scatter_pages`."""
    pool.index_copy_(0, ids.long(), source)


def _spans(query_starts: Tensor, query: Tensor) -> list[tuple[int, int]]:
    """First and last (exclusive) query row of each request."""
    starts = query_starts.tolist()
    if starts != sorted(starts) or starts[0] != 0 or starts[-1] != query.shape[0]:
        raise ValueError(f"query_starts: {starts}, must rise from 0 to the {query.shape[0]} rows of query")
    return list(itertools.pairwise(starts))


def _in_rows(pages: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
    """Pages that can be read in place as float32 rows, and the table for them: a copy of those in use where need be."""
    *strides, step = pages.stride()
    head_dim = pages.shape[4]
    if pages.dtype == torch.float32 and step == 1 and all(stride % head_dim == 0 for stride in strides):
        return pages, page_table
    ids, table = torch.unique(page_table, return_inverse=True)
    return pages.index_select(0, ids).float(), table


def _row_views(pages: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of the pages as [rows, head_dim], from the first key on and from the first value on."""
    num_pages, _, kv_heads, page_size, head_dim = pages.shape
    by_page, by_kind, by_head, by_token, _ = pages.stride()
    last = (num_pages - 1) * by_page + (kv_heads - 1) * by_head + (page_size - 1) * by_token
    shape, offset = (last // head_dim + 1, head_dim), pages.storage_offset()
    rows = (head_dim, 1)
    return pages.as_strided(shape, rows, offset), pages.as_strided(shape, rows, offset + by_kind)


def _row_numbers(pages: Tensor, page_table: Tensor) -> Tensor:
    """[B, kv_heads, P * page_size] int64: the row of each position of each request, in either of `_row_views`."""
    _, _, kv_heads, page_size, head_dim = pages.shape
    by_page, _, by_head, by_token, _ = (stride // head_dim for stride in pages.stride())
    heads = torch.arange(kv_heads, device=pages.device) * by_head
    tokens = torch.arange(page_size, device=pages.device) * by_token
    first = page_table.long() * by_page
    return (first[:, None, :, None] + heads[:, None, None] + tokens).flatten(2)


def _check_lengths(pages: Tensor, page_table: Tensor, seq_lens: Tensor) -> None:
    """Refuse ids and lengths that would read outside the pages: neither the product nor a strided view would notice."""
    _check_range("page_table", page_table, 0, pages.shape[0] - 1)
    _check_range("seq_lens", seq_lens, 1, page_table.shape[1] * pages.shape[3])


def _check_range(name: str, tensor: Tensor, low: int, high: int) -> None:
    least, most = (bound.item() for bound in tensor.aminmax())
    if least < low or most > high:
        raise ValueError(f"{name}: values from {least} to {most}, must be from {low} to {high}")
