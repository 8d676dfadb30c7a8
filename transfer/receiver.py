"""The receiving side of a node: a thread that takes in notices, counts them room by room, and checks pages.

    engine thread ──expect, forget, settle──► rooms ◄── receiver thread ◄── notices (NIXL)
    engine thread ◄───────────────────────── on_event ◄─┘

The thread is also what makes NIXL move on this node, so writes need it to land, and their senders need it to see them
end, even when no room is expected any more. It never stops polling; it only slows down, or checks pages in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.clock import Clock, monotonic
from engine.core.types import NodeIdentity, RoomKey
from transfer.agent import TransferAgent
from transfer.errors import UnknownPeer
from transfer.layout import PageChecksums
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
SETTLE_S, SETTLE_POLLS = 0.25, 10
PROBE_S = 0.1  # between probes of a peer that left
LOSSES = 3  # of connections, after which it is gone: what it had, and two made anew


@dataclass(frozen=True, slots=True)
class RoomProgress:
    """Pages of the room that are here, counting from its first send without a gap."""

    room: RoomKey
    pages: int


@dataclass(frozen=True, slots=True)
class RoomComplete:
    """Every page of the room is here, and as it was sent if the sender said how to tell."""

    room: RoomKey
    last: bytes  # what the sender said with its last send
    pages: int
    first_at: float  # this node's clock: first and last notice
    last_at: float


@dataclass(frozen=True, slots=True)
class RoomBroken:
    """What the sender says of a room contradicts itself, what was expected or what came; it will never be complete."""

    room: RoomKey
    reason: str
    corrupt_pages: int = 0  # with another checksum than the sender's, of those checked so far


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
    corrupt_pages: int  # with another checksum than the sender's


@dataclass(slots=True)
class RoomTally:
    """Counts the notices of one room, which may come in any order. Pure."""

    expected_pages: int
    first_at: float | None = None
    last: Notice | None = None
    _ahead: dict[int, Notice] = field(default_factory=dict)  # beyond the first gap
    _next: int = 0  # sequence number of the first gap
    _counted: list[Notice] = field(default_factory=list)  # before the first gap, and not taken yet
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
            if following.checksums and len(following.checksums) != following.pages - self.pages:
                came = following.pages - self.pages
                return f"notice {following.sequence} has {len(following.checksums)} checksums of {came} pages"
            self._next += 1
            self.pages = following.pages
            self._counted.append(following)
        if self.pages > self.expected_pages or (self.complete and self.pages != self.expected_pages):
            return f"{self.pages} pages came, {self.expected_pages} were expected"
        return None

    def take_counted(self) -> list[Notice]:
        """Notices that closed the first gap since the last call, in order."""
        counted, self._counted = self._counted, []
        return counted

    @property
    def complete(self) -> bool:
        return self.last is not None and self._next == self.last.sequence + 1


@dataclass(frozen=True, slots=True)
class _Room:
    pages: tuple[int, ...]
    tally: RoomTally  # the receiver thread's own


class PageReceiver:
    def __init__(
        self,
        agent: TransferAgent,
        on_event: Callable[[ReceiverEvent], None],
        checksums: PageChecksums,
        *,
        settle_s: float = SETTLE_S,
        clock: Clock = monotonic,
    ):
        """`on_event` is called from the receiver thread and must return at once; `checksums` too, which takes its
        time, for the pages of each write whose notice carries checksums.
        """
        self._agent = agent
        self._on_event = on_event
        self._checksums = checksums
        self._settle = settle_s
        self._clock = clock
        self._wake = threading.Condition()  # its lock guards the six below
        self._rooms: dict[RoomKey, _Room] = {}
        self._settling: list[tuple[float, int, ReceiverEvent]] = []  # event, and when it is due: time and polls
        self._leaving: dict[NodeIdentity, int] = {}  # and connections lost
        self._gone: set[NodeIdentity] = set()  # proven; as long as the agent does not know them again
        self._poked = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="page-receiver", daemon=True)
        self.failure: BaseException | None = None
        # The receiver thread's own to change:
        self._polls = 0
        self._next_probe = self._lively_until = 0.0
        self._notices = self._completed = self._late = self._malformed = self._corrupt = 0

    # ---- any thread ----

    def start(self) -> None:
        self._thread.start()

    def expect(self, room: RoomKey, pages: Sequence[int]) -> None:
        """Count the notices of a room from now on. Call it before anybody is told where the pages, these, are."""
        with self._wake:
            assert room not in self._rooms, f"room {room} is expected already"
            self._rooms[room] = _Room(tuple(pages), RoomTally(len(pages)))
            self._poke()

    def forget(self, room: RoomKey) -> None:
        """Drop whatever still comes for a room. Its pages can still be written to: see `transfer.fencing`."""
        with self._wake:
            self._rooms.pop(room, None)

    def settle(self, ticket: object) -> None:
        """Emit Settled(ticket) when all bytes have landed that were on their way to this node before this call.

        Needed before pages are reused whose writer is gone or has had a write fail: what it sent lies in the
        socket buffers of both ends and lands when this thread polls, even after the writer's death. There is no
        sign of the last byte, so this is the proof that the writer is quiet plus a time of polling: `settle_s`, and
        SETTLE_POLLS polls, since this thread may check pages, or the process be stopped, for longer than that.
        """
        with self._wake:
            self._settle_then(Settled(ticket))

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
        return ReceiverStats(alive, rooms, self._notices, self._completed, self._late, self._malformed, self._corrupt)

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
                self._polls += 1
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
            room = self._rooms.get(notice.room)
        if room is None:
            self._late += 1
            return
        tally = room.tally
        wrong, corrupt = tally.take(notice, now), 0
        if wrong is None:
            wrong, corrupt = self._verify(room)
        if wrong or tally.complete:
            with self._wake:
                self._rooms.pop(notice.room, None)  # it may have been forgotten meanwhile
        if wrong:
            log.warning("room broken", extra={"room": str(notice.room), "reason": wrong})
            self._on_event(RoomBroken(notice.room, wrong, corrupt))
        elif tally.complete:
            assert tally.last is not None
            assert tally.last.last is not None
            assert tally.first_at is not None
            self._completed += 1
            self._on_event(RoomComplete(notice.room, tally.last.last, tally.pages, tally.first_at, now))
        else:
            self._on_event(RoomProgress(notice.room, tally.pages))

    def _verify(self, room: _Room) -> tuple[str | None, int]:
        """Compare the pages that have just been counted with their checksums. What is wrong, and with how many."""
        for notice in room.tally.take_counted():
            if not notice.checksums:
                continue
            first = notice.pages - len(notice.checksums)
            here = self._checksums(room.pages[first : notice.pages])
            pairs = zip(here, notice.checksums, strict=True)
            if bad := [page for page, (ours, theirs) in enumerate(pairs, first) if ours != theirs]:
                self._corrupt += len(bad)
                which = f"page {bad[0]} of the room is not what was sent"
                return f"{which}: {len(bad)} of {len(here)} checksums of this write differ", len(bad)
        return None, 0

    def _end_settled(self) -> None:
        with self._wake:
            now = self._clock()
            due = [one for one in self._settling if one[0] <= now and one[1] <= self._polls]
            self._settling = [one for one in self._settling if one not in due]
        for _, _, event in due:
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
        self._settle_then(WriterGone(peer))

    def _settle_then(self, event: ReceiverEvent) -> None:
        self._settling.append((self._clock() + self._settle, self._polls + SETTLE_POLLS, event))
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
