"""Paged attention problems and their answer, computed the plainest way there is."""

import itertools
import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

Dtypes = tuple[torch.dtype, torch.dtype]  # of query and pool

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES: tuple[Dtypes, ...] = tuple(itertools.product(FLOATS, FLOATS))


@dataclass(frozen=True, slots=True)
class Problem:
    """Arguments of `kvrelay_kernels.extend_attention`, or of `decode_attention` where each request has one query."""

    query: Tensor
    pages: Tensor
    page_table: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    scale: float


def make_problem(
    chunks: list[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    query_dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """Requests with (past, new) tokens each, on scattered pages of the middle layer of a pool.

    All that no request may look at is NaN: pages of nobody (with which the table is padded), what follows a request's
    last token in its last page, the other layers. The query is not contiguous.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [past + new for past, new in chunks]
    counts = [math.ceil(length / page_size) for length in lengths]
    num_pages = sum(counts) + 2
    ids = iter((torch.randperm(num_pages - 1, generator=generator) + 1).tolist())  # page 0 is nobody's
    pool = torch.full((num_pages, 3, 2, kv_heads, page_size, head_dim), torch.nan, dtype=pool_dtype)
    pages = pool[:, 1]
    page_table = torch.zeros(len(chunks), max(counts) + 1, dtype=torch.int32)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = [next(ids) for _ in range(count)]
        page_table[request, :count] = torch.tensor(mine)
        for position in range(length):
            token = torch.randn(2, kv_heads, head_dim, generator=generator)
            pages[mine[position // page_size], :, :, position % page_size] = token.to(pool_dtype)
    starts = [0]
    for _, new in chunks:
        starts.append(starts[-1] + new)
    wide = torch.randn(heads, starts[-1], head_dim + 3, generator=generator).to(query_dtype)
    return Problem(
        query=wide[..., :head_dim].transpose(0, 1),
        pages=pages,
        page_table=page_table,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        scale=head_dim**-0.5,
    )


def dense_attention(problem: Problem) -> Tensor:
    """[T, heads, head_dim] in float64: for each query and head a softmax over the keys at its position and before."""
    heads = problem.query.shape[1]
    _, _, kv_heads, page_size, _ = problem.pages.shape
    answer = torch.zeros(problem.query.shape, dtype=torch.float64)
    for request, seq_len in enumerate(problem.seq_lens.tolist()):
        start, stop = problem.query_starts[request : request + 2].tolist()
        table = problem.page_table[request].tolist()
        tokens = [problem.pages[table[p // page_size], :, :, p % page_size] for p in range(seq_len)]
        keys, values = torch.stack(tokens, dim=2).double()  # each [kv_heads, seq_len, head_dim]
        for row in range(start, stop):
            seen = seq_len - (stop - start) + (row - start) + 1
            for head in range(heads):
                of = head // (heads // kv_heads)
                scores = keys[of, :seen] @ problem.query[row, head].double() * problem.scale
                answer[row, head] = torch.softmax(scores, dim=0) @ values[of, :seen]
    return answer


def random_problem(seed: int, *, decode: bool = False, pairs: tuple[Dtypes, ...] = DTYPES) -> Problem:
    """A problem of random shape and types; with `decode`, one query a request."""
    choose = random.Random(seed)
    requests = range(choose.randint(1, 5))
    pasts = [choose.choice((0, 1, 3, choose.randrange(40), choose.randrange(300))) for _ in requests]
    kv_heads = choose.choice((1, 2, 3))
    query_dtype, pool_dtype = choose.choice(pairs)
    return make_problem(
        [(past, 1 if decode else choose.choice((1, 2, choose.randint(1, 90)))) for past in pasts],
        heads=kv_heads * choose.choice((1, 2, 3, 7)),
        kv_heads=kv_heads,
        head_dim=choose.choice((8, 16, 64, 80, 96)),
        page_size=choose.choice((1, 2, 5, 16, 64, 256)),
        query_dtype=query_dtype,
        pool_dtype=pool_dtype,
        seed=seed,
    )


def tolerance(problem: Problem) -> float:
    """The largest difference from `dense_attention` that rounding explains, for answers of about 1."""
    return {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[problem.query.dtype]
