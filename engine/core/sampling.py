"""How tokens are chosen and when generation ends: parameters, their limits, and the one rule for finishing.

Prefill and decode nodes apply `finish_reason` to the same numbers and so agree without asking each other.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from engine.core.errors import InvalidField

__all__ = ["FinishReason", "SamplingParams", "StoppingParams", "finish_reason"]

MAX_STOP_TOKENS = 64
MAX_TOP_K = 1 << 20


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_new_tokens
    ABORT = "abort"  # cancelled, deadline, or failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Temperature 0 is greedy. Neutral values (1, 1, 0, 0, 1, 0, 0) switch a filter or penalty off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int = 0  # 64 bits, unsigned

    @property
    def needs_history(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self) -> None:
        """Raise InvalidField for the first value outside its range."""
        for name, value, low, high in self._ranges():
            if not low <= value <= high:  # also refuses NaN
                raise InvalidField(f"sampling.{name}", value, f"{low} to {high}")
        if self.top_p <= 0:
            raise InvalidField("sampling.top_p", self.top_p, "above 0, at most 1")
        if self.repetition_penalty <= 0:
            raise InvalidField("sampling.repetition_penalty", self.repetition_penalty, "above 0, at most 2")

    def _ranges(self) -> Iterator[tuple[str, float, float, float]]:
        yield "temperature", self.temperature, 0, 100
        yield "top_p", self.top_p, 0, 1
        yield "top_k", self.top_k, 0, MAX_TOP_K
        yield "min_p", self.min_p, 0, 1
        yield "repetition_penalty", self.repetition_penalty, 0, 2
        yield "presence_penalty", self.presence_penalty, -2, 2
        yield "frequency_penalty", self.frequency_penalty, -2, 2
        yield "seed", self.seed, 0, 2**64 - 1


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a node ends a request. Stop strings are the front door's business: nodes see ids only."""

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise InvalidField for the first value outside its range."""
        if self.max_new_tokens < 1:
            raise InvalidField("stopping.max_new_tokens", self.max_new_tokens, "at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InvalidField(
                "stopping.min_new_tokens", self.min_new_tokens, f"0 to max_new_tokens ({self.max_new_tokens})"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidField("stopping.stop_token_ids", len(self.stop_token_ids), f"at most {MAX_STOP_TOKENS} ids")

    def forbidden(self, index: int) -> tuple[int, ...]:
        """Token ids that must not be sampled at `index`: the ending ones, until min_new_tokens are out."""
        if index >= self.min_new_tokens:
            return ()
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids + self.eos_token_ids


def finish_reason(stopping: StoppingParams, index: int, token_id: int) -> FinishReason | None:
    """Why generation ends with the token at `index`, None when it goes on."""
    if token_id in stopping.stop_token_ids or (not stopping.ignore_eos and token_id in stopping.eos_token_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if index + 1 >= stopping.max_new_tokens else None
