"""Where the engine threads of data-parallel ranks meet: one negotiation a pass, in lockstep.

    rank 0   negotiate(row) ──► None, back to its inbox ············ wake ─► negotiate(row) ──► the decision
    rank 1   (computes) ······························ negotiate(row) ──► the decision, the same
    rank 2   rest(): has nothing to prefill, and nobody waits for it

A round is decided once every rank that has work has handed in its row. Nobody blocks here: a rank that is too early
goes back to its inbox, so that it still takes in commands, and is woken when the others have come. A rank that ends,
for whatever reason, leaves, and the round goes on without it; so it does when one has not come for PATIENCE_S.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.core.clock import Clock, monotonic
from prefill_service.delayer import Decision, Delayer, Row
from prefill_service.scheduler import Scheduler

__all__ = ["DELAY_PAUSE_S", "PATIENCE_S", "Ranks", "Seat", "describe"]

PATIENCE_S = 10.0  # of one rank with another: well above a forward, and below what makes a node unhealthy
DELAY_PAUSE_S = 0.001  # a pass that was held back waits so long for something new


@dataclass(slots=True, eq=False)
class Seat:
    """One rank's place in the negotiation."""

    ranks: Ranks
    wake: Callable[[], None]
    row: Row = field(default_factory=Row)
    working: bool = False  # the others wait for its row
    arrived: bool = False  # its row of this round is there
    decision: Decision | None = None  # of the last round, not yet fetched

    def negotiate(self, row: Row) -> Decision | None:
        """Take part in this round. None: others are not yet there; call again once woken, or earlier with a new row."""
        return self.ranks.negotiate(self, row)

    def rest(self) -> None:
        """There is nothing to prefill, or no room for it: the others need not wait."""
        self.ranks.rest(self)

    def leave(self) -> None:
        """This rank takes no part any more. May be called twice."""
        self.ranks.leave(self)


class Ranks:
    """Rounds of the ranks that have joined. max_running: as in `Delayer.decide`. Called from any thread."""

    def __init__(self, delayer: Delayer, max_running: int | None, clock: Clock = monotonic):
        self._delayer = delayer
        self._clock = clock
        self._since: float | None = None  # when the first row of this round came
        self._max_running = max_running
        self._lock = threading.Lock()
        self._seats: list[Seat] = []

    def join(self, wake: Callable[[], None]) -> Seat:
        """`wake` is called, on another rank's thread, when a round is decided that this one was too early for."""
        with self._lock:
            self._seats.append(seat := Seat(self, wake))
        return seat

    def negotiate(self, seat: Seat, row: Row) -> Decision | None:
        with self._lock:
            if seat not in self._seats:
                return None
            if seat.decision is None:
                seat.row, seat.working, seat.arrived = row, True, True
                self._decide_if_complete(seat)
            decision, seat.decision = seat.decision, None
            return decision

    def rest(self, seat: Seat) -> None:
        with self._lock:
            seat.row, seat.working, seat.arrived = replace(seat.row, prefillable=False), False, False
            seat.decision = None
            self._decide_if_complete(seat)

    def leave(self, seat: Seat) -> None:
        with self._lock:
            if seat in self._seats:
                self._seats.remove(seat)
                self._decide_if_complete(seat)

    def _decide_if_complete(self, here: Seat) -> None:
        arrived = [seat for seat in self._seats if seat.arrived]
        missing = [seat for seat in self._seats if seat.working and not seat.arrived]
        if not arrived:
            return
        if self._since is None:
            self._since = self._clock()
        if missing and self._clock() - self._since < PATIENCE_S:
            return
        self._since = None
        for seat in missing:
            seat.row, seat.working = replace(seat.row, prefillable=False), False
        decision = self._delayer.decide([seat.row for seat in self._seats], self._max_running)
        for seat in arrived:
            seat.arrived, seat.decision = False, decision
            if seat is not here:
                seat.wake()


def describe(scheduler: Scheduler, low_watermark: float | None, largest_batch: int, now: float) -> Row:
    """The row of a rank whose scheduler this is."""
    stats, waiting = scheduler.stats(), scheduler.waiting
    obtainable = stats.free + stats.evictable
    prefillable = obtainable > 0 and bool(waiting or scheduler.continuation)
    used = 1 - obtainable / stats.num_pages
    return Row(
        prefillable=prefillable,
        watermark_force=prefillable and low_watermark is not None and used < low_watermark,
        running=stats.running + stats.in_flight,
        max_prefill_batch=largest_batch,
        queue=len(waiting),
        waited=max((now - request.queue_time for request in waiting), default=0.0),
        arrived=stats.requests_total,
    )
