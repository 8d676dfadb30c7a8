"""What a request's priority is worth, wherever requests are compared: queues, admission, retraction, eviction."""

from __future__ import annotations

import math

__all__ = ["importance"]


def importance(priority: float | None, *, low_first: bool) -> float:
    """Greater: more important. One without a priority is less so than any with one. low_first: so are larger ones."""
    if priority is None:
        return -math.inf
    return -priority if low_first else priority
