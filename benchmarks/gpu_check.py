"""Check every Triton kernel on this machine's CUDA device against the torch implementation, then time it.

    python benchmarks/gpu_check.py [--check-only]

The right answer comes from `kvrelay_kernels.reference` on copies in host memory: what a CPU node would compute. Times are
medians on the device, next to what plain torch takes there for the same amount of work: attention over keys and values
that lie contiguous, copies by index for the rest.

Exit code: 0 all right; 1 a kernel differs; 2 no CUDA device to check. Takes about two minutes, most of it compiling.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

import kvrelay_kernels
from kvrelay_kernels import reference

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LAYERS = 2
# Largest difference, as a share of the largest value: rounding of the answer and of the weights to the type.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's attention, and of the types it runs in."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    query_dtype: torch.dtype
    pool_dtype: torch.dtype

    def __str__(self) -> str:
        query, pool = (str(dtype).removeprefix("torch.") for dtype in (self.query_dtype, self.pool_dtype))
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, pages of {self.page_size}, {query} over {pool}"


@dataclass(frozen=True, slots=True)
class Problem:
    """Arguments of an extend; where each request has one query, also of a decode."""

    query: Tensor
    pages: Tensor
    page_table: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    scale: float

    def to(self, device: torch.device) -> "Problem":
        tensors = (self.query, self.pages, self.page_table, self.query_starts, self.seq_lens)
        return Problem(*(tensor.to(device) for tensor in tensors), self.scale)


def make_problem(chunks: list[tuple[int, int]], shape: Shape) -> Problem:
    """Requests of (past, new) tokens on scattered pages, in host memory. Nobody's page, the padding, is NaN."""
    lengths = torch.tensor([past + new for past, new in chunks])
    counts = -(-lengths // shape.page_size)
    total, width = int(counts.sum()), int(counts.max()) + 1
    pool = torch.randn(total + 1, LAYERS, 2, shape.kv_heads, shape.page_size, shape.head_dim).to(shape.pool_dtype)
    pool[0] = torch.nan
    page_table = torch.zeros(len(chunks), width, dtype=torch.int32)
    page_table[torch.arange(width) < counts[:, None]] = (torch.randperm(total) + 1).int()
    for row, length, count in zip(page_table.tolist(), lengths.tolist(), counts.tolist(), strict=True):
        pool[row[count - 1], ..., length - (count - 1) * shape.page_size :, :] = torch.nan
    starts = [0, *itertools.accumulate(new for _, new in chunks)]
    return Problem(
        query=torch.randn(starts[-1], shape.heads, shape.head_dim).to(shape.query_dtype),
        pages=pool[:, -1],
        page_table=page_table,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=lengths.int(),
        scale=shape.head_dim**-0.5,
    )


def extend(module: Operations, problem: Problem) -> Tensor:
    p = problem
    return module.extend_attention(p.query, p.pages, p.page_table, p.query_starts, p.seq_lens, p.scale)
