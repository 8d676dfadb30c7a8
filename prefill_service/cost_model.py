"""What a forward costs, learnt from the forwards that ran.

    seconds = fixed + per_token * tokens + per_pair * pairs,    pairs = sum over rows of tokens * (history + tokens / 2)

A row computes `tokens` tokens after `history` known ones; pairs counts which token attends to which. The three costs
are those, none below 0, with the least squares of relative errors over the last hundred forwards or so: older ones are
forgotten bit by bit. An error counts in proportion to what was measured, so a forward that took a hundred times as long
as it should (the first ones do) weighs next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["CostModel", "pairs"]

FORGET = 0.98  # weight of the past after one more forward
ENOUGH = 16  # forwards before an estimate is worth a decision
# Forwards that are all alike do not tell the three costs apart. A slight pull down, least on the cost of a token, makes
# that one explain what any of them could. Relative to the weight of the data.
_PULL = (1e-4, 1e-8, 1e-4)


def pairs(tokens: int, history: int) -> float:
    """Of one row."""
    return tokens * (history + tokens / 2)


class CostModel:
    """Before anything was measured every cost is 0. All times in seconds."""

    def __init__(self) -> None:
        self.count = 0  # forwards observed
        self._normal = [[0.0] * 3 for _ in range(3)]  # of the least squares: sums of products of inputs,
        self._right = [0.0] * 3  # and of inputs and outputs
        self._costs = (0.0, 0.0, 0.0)

    @property
    def measured(self) -> bool:
        """Whether enough has been seen to decide by."""
        return self.count >= ENOUGH

    @property
    def fixed(self) -> float:
        """Of a forward, whatever it computes."""
        return self._costs[0]

    @property
    def per_token(self) -> float:
        return self._costs[1]

    @property
    def per_pair(self) -> float:
        return self._costs[2]

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """Learn from a forward. One that took no time the clock could tell teaches nothing."""
        if tokens <= 0 or seconds <= 0:
            return
        row = (1 / seconds, tokens / seconds, pairs / seconds)
        for i in range(3):
            for j in range(3):
                self._normal[i][j] = FORGET * self._normal[i][j] + row[i] * row[j]
            self._right[i] = FORGET * self._right[i] + row[i]
        self.count += 1
        self._costs = _fit(self._normal, self._right)

    def seconds(self, tokens: int, pairs: float) -> float:
        """Estimate for one forward."""
        fixed, per_token, per_pair = self._costs
        return fixed + per_token * tokens + per_pair * pairs

    def chunk_for(self, target_seconds: float, history: int, page_size: int, most: int) -> int:
        """Tokens, in whole pages, of the longest chunk after `history` tokens that a forward computes in the target.

        At least a page, whatever it costs, and otherwise at most `most`.
        """
        fixed, per_token, per_pair = self._costs
        spare = target_seconds - fixed
        slope = per_token + per_pair * history
        # The root of per_pair / 2 * tokens^2 + slope * tokens = spare, in the form that also holds without pairs.
        divisor = slope + math.sqrt(slope * slope + 2 * per_pair * max(0.0, spare))
        tokens = 2 * spare / divisor if divisor > 0 else math.inf if spare >= 0 else 0.0
        return max(page_size, int(min(tokens, most)) // page_size * page_size)


def _fit(normal: Sequence[Sequence[float]], right: Sequence[float]) -> tuple[float, float, float]:
    """Solve for the three costs. The most negative one is set to 0 and the others solved for again, until none is."""
    scale = [math.sqrt(normal[i][i]) for i in range(3)]
    kept = [i for i in range(3) if scale[i] > 0]
    costs = [0.0, 0.0, 0.0]
    while kept:
        matrix = [[normal[i][j] / (scale[i] * scale[j]) + (_PULL[i] if i == j else 0.0) for j in kept] for i in kept]
        found = _solve(matrix, [right[i] / scale[i] for i in kept])
        least = min(range(len(kept)), key=lambda i: found[i])
        if found[least] >= 0:
            for i, value in zip(kept, found, strict=True):
                costs[i] = value / scale[i]
            break
        del kept[least]
    return costs[0], costs[1], costs[2]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The x of matrix * x = right, by elimination. A positive definite matrix needs no exchange of rows."""
    size = len(right)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            right[k] -= factor * right[i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][j] * right[j] for j in range(i + 1, size))) / matrix[i][i]
    return right
