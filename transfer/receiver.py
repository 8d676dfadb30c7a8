"""The receiving side of a node: a thread that takes in notices and counts them, room by room.

    engine thread ──expect, forget, settle──► rooms ◄── receiver thread ◄── notices (NIXL)
    engine thread ◄───────────────────────── on_event ◄─┘

The thread is also what makes NIXL move on this node, so writes need it to land, and their senders need it to see them
end, even when no room is expected any more. It never stops polling; it only slows down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.clock import Clock, monotonic
from engine.core.types import NodeIdentity, RoomKey
from transfer.agent import TransferAgent
from transfer.errors import UnknownPeer
from transfer.notice import MalformedNotice, Notice

__all__ = [
    "PageReceiver",
    "ReceiverEvent",
    "ReceiverStats",
    "RoomBroken",
    "RoomComplete",
    "RoomProgress",
    "RoomTally",
    "Settled",
    "WriterGone",
]

log = logging.getLogger("kvrelay.transfer")

# Between polls. The time a write needs to end, and the notice after it, is this time and the sender's, once each.
LIVELY_POLL_S = 2e-4  # for LIVELY_S after each notice
EXPECTING_POLL_S = 1e-3
IDLE_POLL_S = 0.02  # no room is expected
LIVELY_S = 0.05
SETTLE_S = 0.25
PROBE_S = 0.1  # between probes of a peer that left
LOSSES = 3  # of connections, after which it is gone: what it had, and two made anew


@dataclass(frozen=True, slots=True)
class RoomProgress:
    """Pages of the room that are here, counting from its first send without a gap."""

    room: RoomKey
    pages: int


@dataclass(frozen=True, slots=True)
class RoomComplete:
    """Every page of the room is here."""

    room: RoomKey
    last: bytes  # what the sender said with its last send
    pages: int
    first_at: float  # this node's clock: first and last notice
    last_at: float


@dataclass(frozen=True, slots=True)
class RoomBroken:
    """What the sender says of a room contradicts itself or what was expected; it will never be complete."""

    room: RoomKey
    reason: str


@dataclass(frozen=True, slots=True)
class Settled:
    """What was on its way when `settle` was called with this ticket has landed."""

    ticket: object


@dataclass(frozen=True, slots=True)
class WriterGone:
    """A peer is proven to write nothing more, and what it had written has landed. The agent has forgotten it."""

    peer: NodeIdentity


ReceiverEvent = RoomProgress | RoomComplete | RoomBroken | Settled | WriterGone


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    alive: bool
    rooms: int  # expected and not complete
    notices: int
    completed: int
    late: int  # for rooms not expected, or not any more
    malformed: int


@dataclass(slots=True)
class RoomTally:
    """Counts the notices of one room, which may come in any order. Pure."""

    expected_pages: int
    first_at: float | None = None
    last: Notice | None = None
    _ahead: dict[int, Notice] = field(default_factory=dict)  # beyond the first gap
    _next: int = 0  # sequence number of the first gap
    pages: int = 0  # before the first gap

    def take(self, notice: Notice, now: float) -> str | None:
        """Count a notice. Returns what is wrong with the room, None when nothing is."""
        self.first_at = now if self.first_at is None else self.first_at
        if notice.sequence < self._next or notice.sequence in self._ahead:
            return f"notice {notice.sequence} came twice"
        if notice.last is not None:
            if self.last is not None or any(ahead > notice.sequence for ahead in self._ahead):
                return f"notice {notice.sequence} calls itself the last"
            self.last = notice
        elif self.last is not None and notice.sequence > self.last.sequence:
            return f"notice {notice.sequence} came after the last one, {self.last.sequence}"
        self._ahead[notice.sequence] = notice
        while (following := self._ahead.pop(self._next, None)) is not None:
            if following.pages < self.pages:
                return f"notice {following.sequence} counts {following.pages} pages after {self.pages}"
            self._next += 1
            self.pages = following.pages
        if self.complete and self.pages != self.expected_pages:
            return f"{self.pages} pages came, {self.expected_pages} were expected"
        return None

    @property
    def complete(self) -> bool:
        return self.last is not None and self._next == self.last.sequence + 1


class PageReceiver:
    def __init__(
        self,
        agent: TransferAgent,
        on_event: Callable[[ReceiverEvent], None],
        *,
        settle_s: float = SETTLE_S,
        clock: Clock = monotonic,
    ):
        """`on_event` is called from the receiver thread and must return at once."""
        self._agent = agent
        self._on_event = on_event
        self._settle = settle_s
        self._clock = clock
        self._wake = threading.Condition()  # its lock guards the six below
        self._rooms: dict[RoomKey, RoomTally] = {}
        self._settling: list[tuple[float, ReceiverEvent]] = []  # event, and when it is due
        self._leaving: dict[NodeIdentity, int] = {}  # and connections lost
        self._gone: set[NodeIdentity] = set()  # proven; as long as the agent does not know them again
        self._poked = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="page-receiver", daemon=True)
        self.failure: BaseException | None = None
        # The receiver thread's own:
        self._next_probe = self._lively_until = 0.0
        self._notices = self._completed = self._late = self._malformed = 0

    # ---- any thread ----

    def start(self) -> None:
        self._thread.start()

    def expect(self, room: RoomKey, pages: int) -> None:
        """Count the notices of a room from now on. Call it before anybody is told where the pages are."""
        with self._wake:
            assert room not in self._rooms, f"room {room} is expected already"
            self._rooms[room] = RoomTally(pages)
            self._poke()

    def forget(self, room: RoomKey) -> None:
        """Drop whatever still comes for a room. Its pages can still be written to: see `transfer.fencing`."""
        with self._wake:
            self._rooms.pop(room, None)

    def settle(self, ticket: object) -> None:
        """Emit Settled(ticket) when all bytes have landed that were on their way to this node before this call.

        Needed before pages are reused whose writer is gone or has had a write fail: what it sent lies in the
        socket buffers of both ends and lands when this thread polls, even after the writer's death. There is no
        sign of the last byte, so this is the proof that the writer is quiet plus a time of polling (`settle_s`).
        """
        with self._wake:
            self._settling.append((self._clock() + self._settle, Settled(ticket)))
            self._poke()

    def await_gone(self, peer: NodeIdentity) -> None:
        """Emit WriterGone(peer) once this peer is proven to write nothing more, however long that takes.

        The end of its session is no proof: a stopped or cut-off writer goes on with what it has posted. That it
        takes no new connection is. Adding the peer to the agent again ends the waiting. Nothing comes for a peer
        that the agent never knew.
        """
        with self._wake:
            if self._agent.watch(peer):
                self._leaving[peer] = 0
                self._gone.discard(peer)
                self._poke()
            elif peer in self._gone:
                self._gone_after_settling(peer)
            else:
                log.warning("cannot tell when an unknown peer is gone", extra={"peer": str(peer)})

    def stats(self) -> ReceiverStats:
        with self._wake:
            alive, rooms = self._thread.is_alive(), len(self._rooms)
        return ReceiverStats(alive, rooms, self._notices, self._completed, self._late, self._malformed)

    def close(self) -> None:
        """End the thread. May be called twice."""
        with self._wake:
            self._closing = True
            self._poke()
        if self._thread.ident is not None:
            self._thread.join()

    def _poke(self) -> None:
        self._poked = True
        self._wake.notify()

    # ---- receiver thread ----

    def _run(self) -> None:
        try:
            while not self._closing:
                for data in self._agent.take_notices():
                    self._take(data)
                self._end_settled()
                if self._clock() >= self._next_probe:
                    self._next_probe = self._clock() + PROBE_S
                    self._check_leaving()
                self._pause()
        except BaseException as error:  # the node's process watches `failure` and ends
            self.failure = error
            log.critical("receiver thread ended", exc_info=error)

    def _take(self, data: bytes) -> None:
        self._notices += 1
        try:
            notice = Notice.decode(data)
        except MalformedNotice as error:
            self._malformed += 1
            log.debug("malformed notice", extra={"error": str(error)})
            return
        now = self._clock()
        self._lively_until = now + LIVELY_S
        with self._wake:
            tally = self._rooms.get(notice.room)
            if tally is None:
                self._late += 1
                return
            wrong = tally.take(notice, now)
            if wrong or tally.complete:
                del self._rooms[notice.room]
        if wrong:
            log.warning("room broken", extra={"room": str(notice.room), "reason": wrong})
            self._on_event(RoomBroken(notice.room, wrong))
        elif tally.complete:
            assert tally.last is not None
            assert tally.last.last is not None
            assert tally.first_at is not None
            self._completed += 1
            self._on_event(RoomComplete(notice.room, tally.last.last, tally.pages, tally.first_at, now))
        else:
            self._on_event(RoomProgress(notice.room, tally.pages))

    def _end_settled(self) -> None:
        with self._wake:
            now = self._clock()
            due = [event for due_at, event in self._settling if due_at <= now]
            self._settling = [(due_at, event) for due_at, event in self._settling if due_at > now]
        for event in due:
            self._on_event(event)

    def _check_leaving(self) -> None:
        with self._wake:
            for peer, losses in list(self._leaving.items()):
                try:
                    losses += self._agent.probe(peer)
                except UnknownPeer:  # it is back
                    del self._leaving[peer]
                    continue
                self._leaving[peer] = losses
                if losses >= LOSSES:
                    del self._leaving[peer]
                    if self._agent.unwatch(peer):
                        self._gone_after_settling(peer)

    def _gone_after_settling(self, peer: NodeIdentity) -> None:
        self._gone.add(peer)
        self._settling.append((self._clock() + self._settle, WriterGone(peer)))
        self._poke()

    def _pause(self) -> None:
        with self._wake:
            busy = bool(self._rooms or self._settling)
            if not busy:
                if not self._poked:
                    self._wake.wait(IDLE_POLL_S)
                self._poked = False
        if busy:  # a plain sleep costs half of what waiting on a condition does
            time.sleep(LIVELY_POLL_S if self._clock() < self._lively_until else EXPECTING_POLL_S)
