"""The engine thread: the one writer of a node's pool, cache and queues.

    session (asyncio) ──post()──► inbox ──► handle() ─┐
    transfer threads  ──post()──►                     ├─► step() ─► link.report() / link.publish()
                                                      │
    heartbeats, metrics ◄── stats snapshot ◄──────────┘

Everybody else only posts and reads the frozen snapshot. A handler that raises costs the room it was about, never
the loop; a step that raises `FATAL_FAILURES` times in a row ends the process, since nothing it does works any more.

Several bootstraps may speak of one peer: it has joined with the first that says so and left with the last. The loss
of a link is not the loss of the peers behind it.
"""

from __future__ import annotations

import abc
import logging
import queue
import secrets
import threading
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from engine.core.clock import Clock, monotonic
from engine.core.errors import KVRelayError
from engine.core.handoff import FailureCause, HandoffState
from engine.core.journal import RoomJournal
from engine.core.messages import (
    Abort,
    Command,
    Explain,
    Explanation,
    Inspect,
    Inspection,
    LinkEvent,
    LinkLost,
    LinkUp,
    NodeStats,
    PeerJoined,
    PeerLeft,
    Report,
    Reserve,
    RoomFailed,
    StepOutput,
    Submit,
)
from engine.core.metrics import Metrics, NodeMetric
from engine.core.types import NodeIdentity, RoomKey

__all__ = ["EngineLoop", "Link", "room_of"]

log = logging.getLogger("kvrelay.engine")

IDLE_WAIT_S = 0.2
CHECK_AFTER_S = 5.0  # of rest, then the books are checked once
STOP_TIMEOUT_S = 10.0  # the process must be able to leave also when a pass never ends
FATAL_FAILURES = 3
Event = TypeVar("Event")


class Link(Protocol):
    """The way back to one bootstrap, for as long as one connection lives. Sending on a dead link does nothing."""

    def report(self, report: Report) -> None: ...

    def publish(self, output: StepOutput) -> None: ...

    def lease_valid(self) -> bool:
        """Whether the bootstrap has answered a heartbeat lately enough for this node to go on writing."""
        ...


def room_of(item: object) -> RoomKey | None:
    """The room that a command or an event is about, None for those that are about no room."""
    match item:
        case Submit(task):
            return task.key
        case Reserve(reservation):
            return reservation.key
        case _:
            key = getattr(item, "key", getattr(item, "room", None))
            return key if isinstance(key, RoomKey) else None


class EngineLoop(abc.ABC, Generic[Event]):
    """Base of the prefill and the decode engine. `Event` is what its own helper threads post."""

    def __init__(
        self,
        name: str,
        metrics: Metrics,
        stall_timeout_s: float,
        clock: Clock = monotonic,
        journal: RoomJournal | None = None,
    ):
        self.clock = clock
        self.metrics = metrics
        self.journal = RoomJournal(clock) if journal is None else journal
        self._stall_timeout_s = stall_timeout_s
        self._peers: dict[NodeIdentity, set[Link]] = {}  # who says that they are there
        self.links: set[Link] = set()
        self._inbox: queue.SimpleQueue[tuple[Link | None, Command | LinkEvent | Event | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = False
        self._pause_s: float | None = None  # set by a step that has work it may not yet do: how long to wait for more
        self._stats = NodeStats()
        self.draining = False
        self.ready = False  # the canary has passed
        self.turns = 0
        self.last_turn = clock()
        self.failure: BaseException | None = None

    # ---- any thread ----

    def start(self) -> None:
        self._thread.start()

    def post(self, link: Link | None, item: Command | LinkEvent | Event) -> None:
        self._inbox.put((link, item))

    def stop(self) -> None:
        """End the thread after the turn in progress, but wait no longer than STOP_TIMEOUT_S. May be called twice."""
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
        if self.alive:
            log.critical("engine thread is stuck")

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def turning(self) -> bool:
        """Whether the canary has passed and the last pass ended less than the stall timeout ago."""
        return self.ready and self.alive and self.clock() - self.last_turn < self._stall_timeout_s

    def stats(self) -> NodeStats:
        """The counts as of the last turn."""
        return replace(self._stats, serving=self.turning, draining=self.draining)

    def begin_drain(self) -> None:
        """Say so in the stats from now on; the front door sends nothing new once it has seen it."""
        self.draining = True
        self.wake()

    def wake(self) -> None:
        """Begin another pass, also when nothing has come in."""
        self._inbox.put((None, None))

    # ---- engine thread ----

    @abc.abstractmethod
    def warm_up(self) -> None:
        """One canary computation before the node calls itself serving. Raises when it cannot serve."""

    @abc.abstractmethod
    def handle(self, link: Link | None, item: Command | Event) -> None:
        """Take in one command or one event of a helper thread."""

    @abc.abstractmethod
    def handling_failed(self, link: Link | None, item: Command | Event, incident: str) -> None:
        """`handle` raised: end the room that the item is about, if it is about one."""

    @abc.abstractmethod
    def link_of(self, key: RoomKey) -> Link | None:
        """The way back of a room; None when it has ended, or its front door waits for no word of it."""

    @abc.abstractmethod
    def abort(self, key: RoomKey, why: str) -> None:
        """End a room that is here before it comes to its own end. why: for the journal."""

    @abc.abstractmethod
    def link_lost(self, link: Link) -> None:
        """End every room that came over this link."""

    @abc.abstractmethod
    def link_up(self, link: Link) -> None: ...

    @abc.abstractmethod
    def step(self) -> bool:
        """One pass. True when another pass may have work to do at once."""

    @abc.abstractmethod
    def step_failed(self, incident: str) -> None:
        """End the rooms of the pass that raised, so that the next pass does not meet them again."""

    @abc.abstractmethod
    def collect_stats(self) -> NodeStats: ...

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Assert that every page and every queue is accounted for."""

    def fail(
        self,
        key: RoomKey,
        phase: HandoffState,
        reason: str,
        retriable: bool,
        code: str = KVRelayError.code,
        cause: FailureCause = FailureCause.FAULT,
    ) -> None:
        """Tell its front door, the log and the metrics that a room has failed, and end it; not one that is over."""
        link = self.link_of(key)
        if link is None:
            return
        self.metrics.count(NodeMetric.FAILED, 1, phase.phase)
        log.warning("room failed", extra={"room": str(key), "phase": phase.phase, "reason": reason})
        link.report(RoomFailed(key, phase.phase, reason, retriable, code, cause))
        self.abort(key, f"failed while {phase.phase}: {reason}")

    def integrity_problems(self) -> tuple[str, ...]:
        try:
            self.check_integrity()
        except Exception as error:  # books so wrong that the check itself fails are wrong all the same
            log.exception("integrity check failed")
            self.metrics.count(NodeMetric.INTEGRITY)
            return (f"{type(error).__name__}: {error}",)
        return ()

    def _run(self) -> None:
        try:
            self.warm_up()
            self.ready = True
            self._stats = self.collect_stats()
            busy, failures = False, 0
            check_at: float | None = None
            while not self._stopping:
                if self._take_in(wait=not busy) or busy:
                    check_at = self.clock() + CHECK_AFTER_S
                elif check_at is not None and self.clock() >= check_at:
                    self.integrity_problems()  # logs and counts
                    check_at = None
                self._pause_s = None
                try:
                    busy = self.step()
                    failures = 0
                except Exception:
                    failures += 1
                    incident = secrets.token_hex(6)
                    log.exception("engine pass failed", extra={"incident": incident, "in_a_row": failures})
                    if failures >= FATAL_FAILURES:
                        raise
                    self.step_failed(incident)
                    busy = True
                self._stats = self.collect_stats()
                self.turns += 1
                self.last_turn = self.clock()
            self._take_in(wait=False)  # what had arrived before the stop: a lost link ends its rooms
        except BaseException as error:  # the node's process watches `failure` and ends
            self.failure = error
            log.critical("engine thread ended", exc_info=error)

    def _take_in(self, wait: bool) -> bool:
        """Handle all that is in the inbox; with `wait`, sleep a while until something is. Returns whether it was."""
        found = False
        pause = IDLE_WAIT_S if self._pause_s is None else self._pause_s
        while True:
            try:
                link, item = self._inbox.get(timeout=pause) if wait else self._inbox.get_nowait()
            except queue.Empty:
                return found
            wait, found = False, True
            if item is None:
                continue
            try:
                self._dispatch(link, item)
            except Exception as error:
                incident = secrets.token_hex(6)
                extra = {"incident": incident, "item": type(item).__name__, "error": str(error)}
                if isinstance(error, KVRelayError):  # what input can cause, such as a peer that does not fit
                    log.warning("handling failed", extra=extra)
                else:
                    log.exception("handling failed", extra=extra)
                if not isinstance(item, LinkUp | LinkLost):
                    self.handling_failed(link, item, incident)

    def _dispatch(self, link: Link | None, item: Command | LinkEvent | Event) -> None:
        match item:
            case LinkUp():
                assert link is not None
                self.links.add(link)
                self.link_up(link)
            case LinkLost():
                assert link is not None
                self.links.discard(link)
                for sources in self._peers.values():
                    sources.discard(link)
                self.link_lost(link)
            case PeerJoined(peer):
                assert link is not None
                self._peers.setdefault(peer.identity, set()).add(link)
                self.handle(link, item)
            case PeerLeft(identity):
                sources = self._peers.get(identity, set())
                sources.discard(link)
                if not sources and self._peers.pop(identity, None) is not None:
                    self.handle(link, item)
            case Inspect(inspection_id):
                assert link is not None
                problems = self.integrity_problems()
                self._stats = self.collect_stats()
                link.report(Inspection(inspection_id, self.stats(), problems))
            case Explain(inspection_id, request_id):
                assert link is not None
                link.report(Explanation(inspection_id, self.journal.explain(request_id)))
            case Submit() | Reserve() if room_of(item) in self.journal:
                self.metrics.count(NodeMetric.LATE, 1, type(item).__name__.lower())
            case Abort(key) if key not in self.journal:
                self.journal.refuse(key)
                self.handle(link, item)
            case _:
                self.handle(link, item)
