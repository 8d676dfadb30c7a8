"""Who gives way to a request of higher priority. Pure functions of priorities and of what each would give back.

A request outranks another when its priority is ahead by more than a threshold, so that near-equals never chase each
other out of memory. One without a priority outranks nobody, and gives way to any that has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.priority import importance
from engine.core.types import PrefillTask, ceil_div
from prefill_service.request import PrefillRequest

__all__ = ["Decoding", "Ranking", "choose_victims"]


class Decoding(Protocol):
    """What a scheduler must know of the decoding of its requests, on a node that does both."""

    def growth(self, request: PrefillRequest) -> float:
        """Tokens by which its memory is expected to grow."""
        ...

    def may_wait(self, request: PrefillRequest) -> bool:
        """Whether it could be admitted again, once it has waited: not when it has grown to fill the pool."""
        ...

    def preempt(self, request: PrefillRequest) -> PrefillTask:
        """It decodes no further for now. Returns the task that takes it up again, as `Scheduler.requeue` wants it."""
        ...


@dataclass(frozen=True, slots=True)
class Ranking:
    """threshold: by how much a priority must be ahead, and not only equal."""

    threshold: int
    low_first: bool = False  # smaller priorities are ahead

    def of(self, request: PrefillRequest) -> float:
        """Greater: more important."""
        return importance(request.priority, low_first=self.low_first)

    def outranks(self, request: PrefillRequest, other: PrefillRequest) -> bool:
        mine = self.of(request)
        return mine > -math.inf and mine - self.of(other) > self.threshold

    def reserved(
        self, queue: Iterable[PrefillRequest], continuation: PrefillRequest, budget: int, page_size: int, memory: int
    ) -> int | None:
        """Most of `budget` tokens that a continuation may take, for those at the head of the queue that outrank it
        to fit whole beside a page of it. None: no limit. memory: tokens that can be had now; for what it refuses,
        nothing is left over.
        """
        taken = 0
        for request in queue:
            charge = ceil_div(request.uncached, page_size) * page_size
            if not self.outranks(request, continuation) or taken + charge > budget - page_size:
                break
            if taken + charge + 2 * page_size >= memory:  # a page of the continuation, and the one kept for each
                break
            taken += charge
        return (budget - taken) // page_size * page_size if taken else None


def choose_victims(
    newcomer: PrefillRequest,
    running: Iterable[PrefillRequest],
    ranking: Ranking,
    short: float,
    gain: Callable[[PrefillRequest], float],
    slots: int = 0,
) -> Sequence[PrefillRequest]:
    """Who of `running` gives way, least important and then newest first, until they give back `short` tokens of memory
    and so many slots.

    None at all unless together they suffice: nobody is preempted in vain. gain: tokens that one gives back.
    """
    victims: list[PrefillRequest] = []
    for request in sorted(running, key=lambda r: (ranking.of(r), -r.queue_time)):
        if short <= 0 and len(victims) >= slots:
            break
        if not ranking.outranks(newcomer, request):
            return ()
        victims.append(request)
        short -= gain(request)
    return victims if short <= 0 and len(victims) >= slots else ()
