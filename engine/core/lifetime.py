"""When things happened to a request. Latencies are differences of these stamps, nothing is timed twice."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.core.clock import Clock, monotonic

__all__ = ["Chunk", "LifetimeEvent", "Timeline"]

CHUNKS_KEPT = 128  # a request; of longer prompts the first ones and the last


class LifetimeEvent(enum.StrEnum):
    """In their usual order. Each process stamps the events it sees, on its own clock."""

    ARRIVED = "arrived"  # at this process
    GRANTED = "granted"  # the decode node set them aside
    ADMITTED = "admitted"  # in a forward for the first time
    CHUNK_DONE = "chunk_done"  # a chunk's forward returned; once a chunk
    TOKEN_0 = "token_0"
    LAST_WRITE = "last_write"  # every write of the request is terminal
    COMPLETE = "complete"  # every page arrived
    FIRST_STEP = "first_step"  # the first decode step began
    RETRACTED = "retracted"  # out of pages: it gave its own up, on a decode node to host memory
    PREEMPTED = "preempted"  # it gave them up for one of higher priority
    RESUMED = "resumed"  # it has pages again
    ENDED = "ended"  # this process has forgotten it


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt that one forward computed."""

    end: int  # tokens of the prompt whose KV is known since
    tokens: int  # of these, computed in that forward
    time: float  # when it returned, in seconds


class Timeline:
    """First and last time of each event of one request, and of each chunk, in seconds of `clock`."""

    __slots__ = ("_clock", "_counts", "_first", "_last", "chunks")

    def __init__(self, clock: Clock = monotonic):
        self._clock = clock
        self._first: dict[LifetimeEvent, float] = {}
        self._last: dict[LifetimeEvent, float] = {}
        self._counts: dict[LifetimeEvent, int] = {}
        self.chunks: list[Chunk] = []

    def stamp(self, event: LifetimeEvent) -> float:
        """Note that `event` happens now; returns now."""
        now = self._clock()
        self._first.setdefault(event, now)
        self._last[event] = now
        self._counts[event] = self.count(event) + 1
        return now

    def chunk_done(self, end: int, tokens: int) -> None:
        """Note that the forward of a chunk of `tokens` tokens, up to token `end`, has returned now."""
        if len(self.chunks) == CHUNKS_KEPT:
            self.chunks.pop()
        self.chunks.append(Chunk(end, tokens, self.stamp(LifetimeEvent.CHUNK_DONE)))

    def first(self, event: LifetimeEvent) -> float | None:
        return self._first.get(event)

    def last(self, event: LifetimeEvent) -> float | None:
        return self._last.get(event)

    def count(self, event: LifetimeEvent) -> int:
        return self._counts.get(event, 0)

    def between(self, start: LifetimeEvent, end: LifetimeEvent) -> float | None:
        """Seconds from the first `start` to the last `end`; None unless both happened."""
        if start not in self._first or end not in self._last:
            return None
        return self._last[end] - self._first[start]
