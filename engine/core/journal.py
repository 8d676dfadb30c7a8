"""What a node remembers of its requests, so that people can ask afterwards what became of one, and why.

A room is noted when it arrives, and stays for a while after it has ended. Only plain values are kept, never the live
request. The one writer, and the one who is asked, is the engine thread.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Set
from dataclasses import dataclass, field, replace

from engine.core.clock import Clock, monotonic
from engine.core.lifetime import Chunk, LifetimeEvent, Timeline
from engine.core.types import RoomKey

__all__ = [
    "ENDED_KEPT",
    "OUTCOME_KEPT",
    "Accounts",
    "Considered",
    "EventTime",
    "Refusal",
    "RoomJournal",
    "RoomRecord",
]

ENDED_KEPT = 1000  # rooms
PASSES_KEPT = 64  # records a room; of more, the oldest and the newest stay
ROOMS_TOLD = 32  # of one request id, the newest: it may have been used again and again
OUTCOME_KEPT = 300  # characters


@dataclass(frozen=True, slots=True)
class Accounts:
    """What a pass has left to give, in tokens."""

    rem_input: int
    rem_chunk: int | None
    total: float
    current: int


class Refusal(enum.StrEnum):
    """Why a pass did not admit a request."""

    MEMORY = "memory"
    SPARE = "spare"  # memory, of which a request ahead of it that is blocked has a part set aside
    REQUESTS = "requests"  # the forward has as many requests as it may
    INPUT = "input"  # of rem_input
    CHUNK = "chunk"  # of rem_chunk not even a page is left
    CUT = "cut"  # it would have to be cut, and one prompt is already


@dataclass(frozen=True, slots=True)
class Considered:
    """What a pass decided about a request; or several passes in a row, which refused it for the same reason with the
    same numbers. Then position and waiting are those of the last one. Tokens, and seconds since the room arrived.
    """

    count: int  # of passes
    first_number: int
    first_time: float
    number: int  # of the last one
    time: float
    policy: str  # asked for
    in_effect: str
    position: int | None  # in the queue, from 1; None: it was partly computed, and went first
    waiting: int  # length of the queue
    prefix: int  # already in pages, so not to be computed
    loaded: int  # of them, on the host
    wanted: int  # left to compute
    extend: int  # given: to be computed in this pass's forward; 0: refused
    chunked: bool  # extend < wanted, and not refused
    verdict: str  # what the next in the queue could expect: CONTINUE, NO_TOKEN (memory) or OTHER (a budget)
    refusal: str  # a `Refusal`; empty: it was admitted
    need: int  # memory that had to be there, less 1
    left: float  # and what there was
    before: Accounts
    after: Accounts

    def is_repeated_by(self, later: Considered) -> bool:
        """Whether both are the same refusal, but for the time and for who else waits."""
        return (
            bool(later.refusal)
            and self.refusal == later.refusal
            and self.prefix == later.prefix
            and self.wanted == later.wanted
            and self.need == later.need
            and self.left == later.left
            and self.before == later.before
            and self.in_effect == later.in_effect
        )


@dataclass(frozen=True, slots=True)
class EventTime:
    event: str  # a `LifetimeEvent`
    time: float  # of the first one
    count: int = 1


@dataclass(frozen=True, slots=True)
class RoomRecord:
    """All that a node knows of one attempt at a request. Times are seconds since it arrived at that node."""

    key: RoomKey
    prompt_tokens: int
    arrived: float  # seconds since 1970, by the node's wall clock
    age: float  # now
    outcome: str  # empty: it has not ended
    events: tuple[EventTime, ...]  # in order of time
    chunks: tuple[Chunk, ...]
    passes: tuple[Considered, ...]
    not_reached: int  # passes that ended before they came to it, while it waited
    left_out: int  # passes that considered it, and of which the record had to go
    deferred: int = 0  # passes in which it waited for another one that computes what both share


@dataclass(slots=True)
class _Span:
    """Passes in a row that decided the same. Times are the clock's."""

    first: Considered
    last: Considered
    count: int = 1

    def told(self, origin: float) -> Considered:
        """All in one, in seconds since `origin`."""
        return replace(
            self.last,
            count=self.count,
            first_number=self.first.number,
            first_time=self.first.time - origin,
            time=self.last.time - origin,
        )


@dataclass(slots=True)
class _Room:
    request_id: str
    key: RoomKey
    prompt_tokens: int
    times: Timeline
    wall: float
    outcome: str = ""
    passes: list[_Span] = field(default_factory=list)
    left_out: int = 0
    not_reached: int = 0
    deferred: int = 0
    waits_since: int | None = None  # the last pass that is accounted for; None: not waiting

    @property
    def arrived(self) -> float:
        return self.times.first(LifetimeEvent.ARRIVED) or 0.0


class RoomJournal:
    """Every live room, and the last ENDED_KEPT that ended. A room takes 1 kB, a record of a pass half of that, one of
    several passes 1 kB, a chunk 130 bytes. Few rooms see more than a handful of either; if all of those that ended were
    full to PASSES_KEPT and CHUNKS_KEPT, they would take 80 MB. To note a decision takes about 3 us.
    """

    def __init__(self, clock: Clock = monotonic):
        self._clock = clock
        self._live: dict[RoomKey, _Room] = {}
        self._ended: dict[RoomKey, _Room] = {}  # oldest first
        self._refused: dict[RoomKey, None] = {}  # aborted before they came; oldest first
        self._number = 0  # of the newest pass, where passes are held

    def __contains__(self, key: object) -> bool:
        """Whether a room is here or was: it must not begin, once more."""
        return key in self._live or key in self._ended or key in self._refused

    def refuse(self, key: RoomKey) -> None:
        """A room that is not here has ended: should it come yet, it comes late."""
        self._refused[key] = None
        if len(self._refused) > ENDED_KEPT:
            del self._refused[next(iter(self._refused))]

    @property
    def live(self) -> Set[RoomKey]:
        return self._live.keys()

    def arrived(self, request_id: str, key: RoomKey, prompt_tokens: int, times: Timeline) -> None:
        """`times` goes on being stamped by its owner; ARRIVED already is."""
        self._live[key] = _Room(request_id, key, prompt_tokens, times, time.time())

    def waits(self, key: RoomKey) -> None:
        """It has entered the waiting queue: from the next pass on it may be admitted."""
        self._live[key].waits_since = self._number

    def considered(self, key: RoomKey, now: Considered) -> None:
        """The newest pass has decided about a live room. `now` is of that pass alone, and its times are the clock's."""
        room = self._live[key]
        self._reached(room, now.number)
        if now.extend:
            room.waits_since = None
        if room.passes and (span := room.passes[-1]).last.is_repeated_by(now):
            span.count += now.number != span.last.number  # a pass that tries it twice counts once
            span.last = now
            return
        room.passes.append(_Span(now, now))
        if len(room.passes) > PASSES_KEPT:
            room.left_out += room.passes.pop(PASSES_KEPT // 2).count

    def deferred(self, key: RoomKey) -> None:
        """In the newest pass a live room that waits gave way to one that computes what both share."""
        room = self._live[key]
        self._reached(room, self._number)
        room.deferred += 1

    def failed(self, key: RoomKey, why: str) -> None:
        """It will end for this reason. The first one given counts."""
        room = self._live[key]
        room.outcome = room.outcome or why[:OUTCOME_KEPT]

    def ended(self, key: RoomKey) -> None:
        """Nothing is left of the room on this node. Unless it was said to have failed, it did all it was here for."""
        room = self._ended[key] = self._live.pop(key)
        room.outcome = room.outcome or "finished"
        room.times.stamp(LifetimeEvent.ENDED)
        room.not_reached, room.waits_since = self._not_reached(room), None
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def explain(self, request_id: str) -> tuple[RoomRecord, ...]:
        """What is known of each attempt at a request, oldest first; nothing when it never came here, or long ago."""
        rooms = [room for of in (self._ended, self._live) for room in of.values() if room.request_id == request_id]
        rooms.sort(key=lambda room: room.arrived)
        return tuple(self._record(room) for room in rooms[-ROOMS_TOLD:])

    def _record(self, room: _Room) -> RoomRecord:
        origin = room.arrived
        events = [
            EventTime(event, at - origin, room.times.count(event))
            for event in LifetimeEvent
            if event is not LifetimeEvent.CHUNK_DONE and (at := room.times.first(event)) is not None
        ]
        return RoomRecord(
            key=room.key,
            prompt_tokens=room.prompt_tokens,
            arrived=room.wall,
            age=self._clock() - origin,
            outcome=room.outcome if room.key in self._ended else "",
            events=tuple(sorted(events, key=lambda one: one.time)),
            chunks=tuple(replace(chunk, time=chunk.time - origin) for chunk in room.times.chunks),
            passes=tuple(span.told(origin) for span in room.passes),
            not_reached=self._not_reached(room),
            left_out=room.left_out,
            deferred=room.deferred,
        )

    @staticmethod
    def _reached(room: _Room, number: int) -> None:
        """Pass `number` came to a room: those since the last that did, while it waited, had not."""
        if room.waits_since is not None:
            room.not_reached += max(0, number - room.waits_since - 1)  # -1 where one pass tries it twice
            room.waits_since = number

    def _not_reached(self, room: _Room) -> int:
        return room.not_reached + (0 if room.waits_since is None else self._number - room.waits_since)
