"""How fast a node computes prompts, as it says in its heartbeats."""

from __future__ import annotations

__all__ = ["ComputeRate"]

HALF_LIFE = 8192  # tokens computed, after which what was measured before weighs half
SHORT = 256  # tokens of a forward most of whose time is the fixed cost


class ComputeRate:
    """The mean rate of the last forwards, each weighed by its tokens.

    Not by its seconds: routing gives a node that seems slow little to compute, so a forward that was held up for long
    would have to be outweighed by few. Short ones count only until there was a longer one: a node that has a popular
    prefix cached computes little else, and is no slower for it.
    """

    def __init__(self) -> None:
        self.value = 0.0  # tokens a second; 0: nothing measured yet
        self._weight = 0.0  # tokens
        self._long = False  # a forward that was not short has been measured

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a forward. One that took no time the clock could tell teaches nothing."""
        if tokens <= 0 or seconds <= 0 or (tokens < SHORT and self._long):
            return
        if tokens >= SHORT and not self._long:
            self._long, self._weight = True, 0.0
        self._weight = self._weight * 0.5 ** (tokens / HALF_LIFE) + tokens
        self.value += (tokens / seconds - self.value) * tokens / self._weight
