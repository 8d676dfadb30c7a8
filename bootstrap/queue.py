"""The bootstrap queue: every request from arrival to its decode grant, by priority and then arrival.

With unified nodes it only counts: what waits there waits in the queues of nodes, and is here until it is admitted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from bootstrap.requests import Attempt

__all__ = ["BootstrapQueue"]


class BootstrapQueue:
    """Producer: an attempt that starts. Consumer: the decode node's grant, the unified node's admission, or its end.

    An attempt waits, in order, until a decode node has been asked for room; then it only counts, until granted. When
    that takes too long it waits again, for another node, without having lost the first one.
    """

    def __init__(self) -> None:
        self._waiting: list[Attempt] = []  # ordered by `order`, which is unique
        self._asked: set[Attempt] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._asked)

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._asked or self._find(attempt) is not None

    def waiting(self) -> Iterator[Attempt]:
        """Those that look for a decode node, first one first. The queue may change meanwhile."""
        return iter(tuple(self._waiting))

    def push(self, attempt: Attempt) -> None:
        bisect.insort(self._waiting, attempt, key=_order)

    def asked(self, attempt: Attempt) -> None:
        """A decode node was asked for room for it, or it was given to a unified node."""
        index = self._find(attempt)
        assert index is not None, "asked for twice"
        del self._waiting[index]
        self._asked.add(attempt)

    def overdue(self, attempt: Attempt) -> None:
        """The decode node that was asked takes too long."""
        self._asked.remove(attempt)
        self.push(attempt)

    def discard(self, attempt: Attempt) -> None:
        """Granted, admitted, or ended. Fine for one that is not here."""
        index = self._find(attempt)
        if index is not None:
            del self._waiting[index]
        self._asked.discard(attempt)

    def check_integrity(self) -> None:
        orders = [_order(attempt) for attempt in self._waiting]
        assert orders == sorted(set(orders))
        assert all(attempt.decode is not None for attempt in self._asked)

    def _find(self, attempt: Attempt) -> int | None:
        index = bisect.bisect_left(self._waiting, _order(attempt), key=_order)
        found = index < len(self._waiting) and self._waiting[index] is attempt
        return index if found else None


def _order(attempt: Attempt) -> tuple[bool, int, int]:
    return attempt.request.order
