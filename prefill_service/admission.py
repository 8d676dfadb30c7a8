"""One pass over the waiting queue, in the order it stands: who is tried, and when the pass ends.

    the continuation ─► the queue from its head ─► the first refusal ends the pass
                                                    ├─ refused for memory: a request of much higher priority may
                                                    │  have others preempted, and is tried once more
                                                    └─ still refused: look past it, where that is switched on

Looking past a blocked head must not starve it. What the head needs is set aside first, of the whole pool and not only
of what is free now: all that was ever admitted past a blocked head, and has not ended, fits into the rest of the pool.
So the head waits for those alone that were admitted before it, as it would if nobody looked past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from engine.core.types import RoomKey
from prefill_service.adder import Adder, Attempt, Verdict
from prefill_service.request import PrefillRequest

__all__ = ["Admission", "MakeWay"]

MakeWay = Callable[[PrefillRequest, float, int], bool]


class Admission:
    """lookahead: how many to try behind one that is refused for memory. passed: memory in tokens of those admitted so
    and not ended, by room, to which this pass adds. pool: tokens of all pages.

    slots: requests that may be admitted; None: no limit. make_way(request, short, slots): preempt for this
    request until `short` more tokens of memory and so many slots are there; False, and nobody is, when that cannot be.
    """

    def __init__(
        self,
        adder: Adder,
        pool: int,
        *,
        lookahead: int = 0,
        passed: dict[RoomKey, int],
        slots: int | None = None,
        make_way: MakeWay = lambda request, short, slots: False,
    ):
        self.attempts: list[Attempt] = []
        self._adder = adder
        self._pool = pool
        self._lookahead = lookahead
        self._passed = passed
        self._slots = slots
        self._make_way = make_way

    def run(self, continuation: PrefillRequest | None, limit: int | None, waiting: Sequence[PrefillRequest]) -> None:
        """limit: tokens that the continuation may advance, at most."""
        verdict = Verdict.CONTINUE
        if continuation is not None:
            verdict = self._note(self._adder.proceed(continuation, limit)).verdict
            if verdict is Verdict.NO_TOKEN and not self._adder.admitted:
                return  # what is released collects until it fits
        queue = iter(tuple(waiting))
        for request in queue:
            if verdict is Verdict.OTHER or (verdict is Verdict.NO_TOKEN and not self._lookahead):
                return
            if self._full():
                if not self._make_way(request, self._adder.short(request), 1):
                    return
                assert self._slots is not None
                self._slots += 1
            attempt = self._try(request)
            verdict = attempt.verdict
            if verdict is Verdict.NO_TOKEN and not attempt.extend:
                self._look_past(request, islice(queue, self._lookahead))
                return

    def _full(self) -> bool:
        return self._slots is not None and len(self._adder.admitted) >= self._slots

    def _try(self, request: PrefillRequest) -> Attempt:
        attempt = self._note(self._adder.admit(request))
        if attempt.verdict is Verdict.NO_TOKEN and not attempt.extend and self._make_way(request, attempt.short, 0):
            attempt = self._note(self._adder.admit(request))
        return attempt

    def _look_past(self, head: PrefillRequest, behind: Iterable[PrefillRequest]) -> None:
        spare = self._pool - self._adder.holds(head) - sum(self._passed.values())
        for request in behind:
            if self._full():
                return
            attempt = self._note(self._adder.admit(request, spare))
            if attempt.extend:
                self._passed[request.key] = self._adder.holds(request)
                spare -= self._passed[request.key]
            if attempt.verdict is Verdict.OTHER:
                return

    def _note(self, attempt: Attempt) -> Attempt:
        self.attempts.append(attempt)
        return attempt
