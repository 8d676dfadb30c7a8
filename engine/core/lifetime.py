"""When things happened to a request. Latencies are differences of these stamps, nothing is timed twice."""

from __future__ import annotations

import enum

from engine.core.clock import Clock, monotonic

__all__ = ["LifetimeEvent", "Timeline"]


class LifetimeEvent(enum.Enum):
    """In their usual order. Each process stamps the events it sees, on its own clock."""

    ARRIVED = "arrived"  # at this process
    GRANTED = "granted"  # the decode node set them aside
    ADMITTED = "admitted"  # in a forward for the first time
    CHUNK_DONE = "chunk_done"  # a chunk's forward returned; once a chunk
    TOKEN_0 = "token_0"
    LAST_WRITE = "last_write"  # every write of the request is terminal
    COMPLETE = "complete"  # every page arrived
    FIRST_STEP = "first_step"  # the first decode step began


class Timeline:
    """First and last time of each event of one request, in seconds of `clock`."""

    __slots__ = ("_clock", "_first", "_last")

    def __init__(self, clock: Clock = monotonic):
        self._clock = clock
        self._first: dict[LifetimeEvent, float] = {}
        self._last: dict[LifetimeEvent, float] = {}

    def stamp(self, event: LifetimeEvent) -> float:
        """Note that `event` happens now; returns now."""
        now = self._clock()
        self._first.setdefault(event, now)
        self._last[event] = now
        return now

    def first(self, event: LifetimeEvent) -> float | None:
        return self._first.get(event)

    def last(self, event: LifetimeEvent) -> float | None:
        return self._last.get(event)

    def between(self, start: LifetimeEvent, end: LifetimeEvent) -> float | None:
        """Seconds from the first `start` to the last `end`; None unless both happened."""
        if start not in self._first or end not in self._last:
            return None
        return self._last[end] - self._first[start]
