"""How much of what they may still generate, decoding requests are expected to generate. A guess that learns.

It starts high, falls with every decode step that went well, and jumps up when memory ran out all the same. Tokens are
those of the whole answer, over all attempts.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefill_service.adder import DecodeRow

__all__ = ["NewTokenRatio"]

START = 0.7
LOWEST = 0.14  # of the start
FALL_STEPS = 600  # from the start down to the lowest
SPARE_STEPS = 20  # that the requests kept should be able to go on for after a retraction


class NewTokenRatio:
    """`conservativeness` multiplies the start, which is at most 1."""

    def __init__(self, conservativeness: float):
        start = min(START * conservativeness, 1.0)
        self._lowest = LOWEST * start
        self._fall = (start - self._lowest) / FALL_STEPS
        self.value = start

    def decoded(self) -> None:
        """A step in which memory sufficed."""
        self.value = max(self.value - self._fall, self._lowest)

    def retracted(self, kept: Sequence[DecodeRow]) -> None:
        """Memory ran out, and these go on."""
        generated = sum(row.generated for row in kept) + SPARE_STEPS * len(kept)
        self.value = min(1.0, generated / (sum(row.max_new for row in kept) + 1))
