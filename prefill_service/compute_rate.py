"""How fast a node computes prompts, as it says in its heartbeats."""

from __future__ import annotations

__all__ = ["ComputeRate"]

HALF_LIFE = 8192  # tokens computed, after which what was measured before weighs half


class ComputeRate:
    """The mean rate of the last forwards, each weighed by its tokens.

    Not by its seconds: routing gives a node that seems slow little to compute, so a forward that was held up for long
    would have to be outweighed by few. And not all alike: short ones, most of whose time is the fixed cost of a
    forward, say little of the long ones.
    """

    def __init__(self) -> None:
        self.value = 0.0  # tokens a second; 0: nothing measured yet
        self._weight = 0.0  # tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a forward. One that took no time the clock could tell teaches nothing."""
        if tokens <= 0 or seconds <= 0:
            return
        self._weight = self._weight * 0.5 ** (tokens / HALF_LIFE) + tokens
        self.value += (tokens / seconds - self.value) * tokens / self._weight
