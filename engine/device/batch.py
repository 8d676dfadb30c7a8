"""One forward pass as flat tensors, and how to build it from rows. A row is one sequence's next chunk of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.core.types import ceil_div

__all__ = ["ForwardBatch", "Row", "build_batch"]


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one sequence to compute now, and the pages that hold it all up to and including them."""

    token_ids: Sequence[int]  # at least one
    start: int  # position of the first of them: tokens already in the pages
    pages: Sequence[int]  # page ids in order; may be longer than needed. An array("i") is read at memory speed
    wants_logits: bool  # for the last token


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of B sequences with up to P pages each; logits are wanted for L of the tokens."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, of each token in its sequence
    slots: Tensor  # [T] int64, where its K and V go: page id * page_size + offset
    page_table: Tensor  # [B, P] int32, short rows filled up with page 0
    query_starts: Tensor  # [B + 1] int32, first token of each sequence; the last entry is T
    seq_lens: Tensor  # [B] int32, tokens of each sequence once this batch is computed
    logit_rows: Tensor  # [L] int64, indices into the T tokens, ascending
    is_decode: bool  # every sequence has exactly one token here


def build_batch(rows: Sequence[Row], page_size: int, device: torch.device | str = "cpu") -> ForwardBatch:
    """Flatten `rows`, in their order. Logits come back in the same order, for the rows that want them."""
    lengths = np.fromiter((len(row.token_ids) for row in rows), np.int64, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    assert len(rows) > 0
    assert lengths.min() > 0
    seq_lens = starts + lengths
    query_ends = np.cumsum(lengths)
    total = int(query_ends[-1])

    table = np.zeros((len(rows), ceil_div(int(seq_lens.max()), page_size)), np.int32)
    for line, row, seq_len in zip(table, rows, seq_lens.tolist(), strict=True):
        used = ceil_div(seq_len, page_size)
        assert len(row.pages) >= used
        line[:used] = row.pages[:used]

    # The i-th of all tokens is token i - (first token of its row) of its row.
    shift = np.repeat(starts - (query_ends - lengths), lengths)
    positions = np.arange(total) + shift
    page_ids = table[np.repeat(np.arange(len(rows)), lengths), positions // page_size].astype(np.int64)
    wanted = np.fromiter((row.wants_logits for row in rows), np.bool_, len(rows))
    query_starts = np.zeros(len(rows) + 1, np.int32)
    query_starts[1:] = query_ends

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return ForwardBatch(
        input_ids=tensor(np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, total)),
        positions=tensor(positions),
        slots=tensor(page_ids * page_size + positions % page_size),
        page_table=tensor(table),
        query_starts=tensor(query_starts),
        seq_lens=tensor(seq_lens.astype(np.int32)),
        logit_rows=tensor(query_ends[wanted] - 1),
        is_decode=total == len(rows),
    )
