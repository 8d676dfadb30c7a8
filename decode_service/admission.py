"""Which reservations a decode node grants now: the formula of decode admission, as a pure function of what holds room.

All amounts are tokens; R = decode tokens reserved for each request.

    held(r)     whole pages of prompt + max(generated - 1, 0)
    retractable sum over running of prompt + generated: what retracting them all would give back
    free        whole pages of capacity - sum of held over running, transfer, waiting
    need        max over running of prompt + min(max_new, 4096), less retractable; 0 with none running
    budget      free - max(R * requests that hold room, need) - R * last_prebuilt - sum over retracted of (held + R)
    required    max(held + R, prompt + min(max_new, 4096) - retractable)

Retracted requests come back first, in order, while held + R fits the budget without its last term and without `need`;
where nothing else holds room, R is not asked of the first: what is near the end of the pool must come back, too.
While any stays out nobody new is admitted, but the queue is still looked through, so what failed leaves it. Then the
queue: a ready request is admitted while a row, a metadata slot and `required` are there; the first ready one that does
not fit ends the pass. What would not fit an idle node is refused at arrival (`engine.core.room_budget.never_fits`), so
nothing can stay at the head for ever.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.core.priority import importance
from engine.core.room_budget import CLIP_NEW_TOKENS, decode_room, required_room

__all__ = ["Admission", "Candidate", "DecodeState", "Holder", "Readiness", "admit"]

Id = TypeVar("Id")


@dataclass(frozen=True, slots=True)
class Holder(Generic[Id]):
    """A request that holds room, or was retracted. max_new counts the tokens of this attempt, generated or not."""

    id: Id
    prompt_tokens: int
    max_new: int
    generated: int = 0


class Readiness(enum.Enum):
    READY = "ready"
    NOT_READY = "not ready"  # its writer is not connected yet
    FAILED = "failed"  # or aborted


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Id]):
    """A queued reservation."""

    id: Id
    prompt_tokens: int
    max_new: int
    readiness: Readiness = Readiness.READY
    priority: int | None = None
    resumed: bool = False  # part of its prompt is answer: see room_budget.required_room


@dataclass(frozen=True, slots=True)
class DecodeState(Generic[Id]):
    """Who holds what when a pass begins. `capacity` in tokens; `queue` and `retracted` in order of arrival."""

    page_size: int
    capacity: int
    reserved: int  # R
    rows: int  # most requests that hold room at once
    metadata_slots: int  # free slots for what comes with the last page; one for each admitted
    queue: Sequence[Candidate[Id]]
    running: Sequence[Holder[Id]] = ()
    transfer: Sequence[Holder[Id]] = ()  # pages are arriving
    waiting: Sequence[Holder[Id]] = ()  # complete, not yet running
    retracted: Sequence[Holder[Id]] = ()
    last_prebuilt: int = 0  # requests that the step in progress is adding to the running ones
    priorities: bool = False
    low_priority_first: bool = False


@dataclass(frozen=True, slots=True)
class Admission(Generic[Id]):
    """The decision. `left` stays queued, in the order it was looked at."""

    budget: int  # tokens, once the retracted are back and before anybody is admitted
    resumed: tuple[Id, ...]
    still_retracted: tuple[Id, ...]
    admitted: tuple[Id, ...]
    failed: tuple[Id, ...]
    left: tuple[Id, ...]


def admit(state: DecodeState[Id]) -> Admission[Id]:
    """Decide one pass; changes nothing."""
    room = _Room(state)
    resumed = _resume(state.retracted, room)
    still = state.retracted[len(resumed) :]
    room.free -= sum(room.held(r.prompt_tokens, r.generated) + state.reserved for r in still)
    room.need = max((_end(r) for r in state.running), default=room.retractable) - room.retractable
    budget = room.budget()

    queue = list(state.queue)
    if state.priorities:
        queue.sort(key=lambda c: -importance(c.priority, low_first=state.low_priority_first))
    admitted: list[Id] = []
    failed: list[Id] = []
    left: list[Id] = []
    slots = state.metadata_slots
    closed = bool(still)
    for candidate in queue:
        if candidate.readiness is Readiness.FAILED:
            failed.append(candidate.id)
        elif closed or candidate.readiness is Readiness.NOT_READY:
            left.append(candidate.id)
        elif slots > 0 and room.rows > 0 and room.required(candidate) <= room.budget():
            room.take(room.held(candidate.prompt_tokens))
            slots -= 1
            admitted.append(candidate.id)
        else:
            left.append(candidate.id)
            closed = True
    return Admission(budget, tuple(resumed), tuple(r.id for r in still), tuple(admitted), tuple(failed), tuple(left))


class _Room(Generic[Id]):
    """What is left while a pass decides."""

    def __init__(self, state: DecodeState[Id]):
        holders = (*state.running, *state.transfer, *state.waiting)
        self._page_size = state.page_size
        self.reserved = state.reserved
        self._prebuilt = state.reserved * state.last_prebuilt
        self.holders = len(holders)
        self.rows = state.rows - len(holders)
        self.retractable = sum(r.prompt_tokens + r.generated for r in state.running)
        self.need = 0
        self._capacity = state.capacity // state.page_size * state.page_size
        self.free = self._capacity - sum(self.held(r.prompt_tokens, r.generated) for r in holders)

    def held(self, prompt_tokens: int, generated: int = 0) -> int:
        return decode_room(prompt_tokens, generated, self._page_size)

    def budget(self) -> int:
        return self.free - max(self.reserved * self.holders, self.need) - self._prebuilt

    def required(self, candidate: Candidate[Id]) -> int:
        return required_room(
            candidate.prompt_tokens,
            candidate.max_new,
            self.reserved,
            self._page_size,
            retractable=self.retractable,
            resumed_below=self._capacity if candidate.resumed else None,
        )

    def take(self, held: int) -> None:
        self.free -= held
        self.rows -= 1
        self.holders += 1


def _resume(retracted: Sequence[Holder[Id]], room: _Room[Id]) -> list[Id]:
    resumed: list[Id] = []
    for holder in retracted:
        held = room.held(holder.prompt_tokens, holder.generated)
        reserved = room.reserved if room.holders else 0
        if room.rows <= 0 or held + reserved > room.budget():
            break
        room.take(held)
        resumed.append(holder.id)
    return resumed


def _end(request: Holder[Id]) -> int:
    """Tokens of a request when it ends, its future clipped."""
    return request.prompt_tokens + min(request.max_new, CLIP_NEW_TOKENS)
