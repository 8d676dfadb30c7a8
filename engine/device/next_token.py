"""The next token of each answer in a batch: drawn, and checked whether it ends the answer. The same on every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.core.sampling import FinishReason, SamplingParams, StoppingParams, finish_reason
from engine.core.types import RoomKey, TokenOutput
from engine.device.sampler import TokenHistory, sample

__all__ = ["Wanted", "next_tokens"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One row of the logits: whose token it is for, and how that is chosen."""

    key: RoomKey
    index: int  # of the token, in the answer
    sampling: SamplingParams
    stopping: StoppingParams
    history: TokenHistory | None  # where sampling.needs_history


def next_tokens(logits: Tensor, rows: Sequence[Wanted]) -> list[TokenOutput]:
    """Tokens in the order of the rows of `logits` ([L, V] float32). Histories do not yet count them."""
    drawn = sample(
        logits,
        [row.sampling for row in rows],
        [row.index for row in rows],
        [row.stopping.forbidden(row.index) for row in rows],
        [row.history for row in rows],
    )
    tokens = []
    for row, one in zip(rows, drawn, strict=True):
        finish = finish_reason(row.stopping, row.index, one.token_id)
        matched = one.token_id if finish is FinishReason.STOP else None
        tokens.append(TokenOutput(row.key, row.index, one.token_id, one.logprob, finish, matched))
    return tokens
