"""The sending side of a node: a thread that posts writes and watches them until they are terminal.

    engine thread ──open, send, cancel──► PageStreams ◄──next_batch, finished, failed── transfer thread ──► NIXL
    engine thread ◄────────────────────── on_event ◄─────────────────────────────────── transfer thread

Deadlines are ours: a stopped peer leaves a write in progress with no error for minutes. A room whose write is late is
failed and reported at once, but counts as quiet only when its writes are terminal, however long that takes: until
then they read our pages and change the peer's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.core.clock import Clock, monotonic
from engine.core.errors import KVRelayError
from engine.core.types import NodeIdentity, RoomKey
from transfer.agent import TransferAgent, Write, WriteState
from transfer.layout import PageChecksums
from transfer.notice import MAX_CHECKSUMS
from transfer.page_stream import Batch, PageStreams, Quiesced, SenderEvent, Sent, WriteFailed, WritesDone

__all__ = ["PageSender", "Quiesced", "SenderEvent", "SenderStats", "Sent", "WriteFailed", "WritesDone"]

log = logging.getLogger("kvrelay.transfer")

BATCH_BYTES = 8 << 20  # of one write: copied in about two milliseconds, so that others do not wait for long
WINDOW_BYTES = 64 << 20
IDLE_TICK_S = 0.02  # NIXL moves greetings and notices only when asked to
POLL_S = (50e-6, 250e-6)  # between polls of writes in progress, from first to longest
STALLED_POLL_S = 0.01  # when every write that is waited for has taken STALLED_S
STALLED_S = 1.0


@dataclass(frozen=True, slots=True)
class SenderStats:
    alive: bool
    rooms: int
    bytes_in_progress: int
    writes_posted: int
    bytes_sent: int
    rooms_failed: int
    late_sends: int  # for rooms that had ended


class PageSender:
    def __init__(
        self,
        agent: TransferAgent,
        on_event: Callable[[SenderEvent], None],
        *,
        window_bytes: int = WINDOW_BYTES,
        batch_bytes: int = BATCH_BYTES,
        write_timeout_s: float = 30.0,
        checksums: PageChecksums | None = None,
        clock: Clock = monotonic,
    ):
        """`on_event` is called from the transfer thread and must return at once. `window_bytes` is of one peer.

        checksums: also called there, for the pages of each write, whose notice carries them; None: it carries none.
        """
        self._agent = agent
        self._on_event = on_event
        self._write_timeout = write_timeout_s
        self._clock = clock
        self._checksums = checksums
        page_bytes = agent.memory.page_bytes
        if checksums is not None:
            batch_bytes = min(batch_bytes, MAX_CHECKSUMS * page_bytes)
        self._streams = PageStreams(page_bytes, batch_bytes=batch_bytes, window_bytes=window_bytes)
        self._wake = threading.Condition()  # its lock guards _streams and the three below
        self._poked = False
        self._closing = False
        self._give_up = 0.0  # when closing: do not wait for writes beyond this time
        self._thread = threading.Thread(target=self._run, name="page-sender", daemon=True)
        self.failure: BaseException | None = None
        # The transfer thread's own:
        self._writes: dict[NodeIdentity, deque[tuple[Write, Batch]]] = {}
        self._posted = self._bytes_sent = self._failed = 0

    # ---- any thread ----

    def start(self) -> None:
        self._thread.start()

    def open(self, room: RoomKey, peer: NodeIdentity, remote_pages: Sequence[int], lease: Callable[[], bool]) -> None:
        """Name a room, its peer and the peer's pages. `lease` is asked before each post whether we may still write."""
        with self._wake:
            self._streams.open(room, peer, remote_pages, lease)

    def send(self, room: RoomKey, first_page_index: int, local_pages: Sequence[int], last: bytes | None = None) -> None:
        """Send pages [first_page_index, …) of the room, after all sent before; with `last`, they are the last ones.

        `last` goes to the receiver as it is, at most MAX_LAST_BYTES. Does nothing for a room that has failed or was
        cancelled. What is in the pages must not change any more.
        """
        self._do(lambda: self._streams.send(room, first_page_index, local_pages, last))

    def cancel(self, room: RoomKey) -> None:
        """Post nothing more. Quiesced follows, unless the room has ended already."""
        self._do(lambda: self._streams.cancel(room))

    def stats(self) -> SenderStats:
        with self._wake:
            return SenderStats(
                self._thread.is_alive(),
                self._streams.rooms,
                self._streams.bytes_in_progress(),
                self._posted,
                self._bytes_sent,
                self._failed,
                self._streams.late_sends,
            )

    def check_integrity(self) -> None:
        with self._wake:
            self._streams.check_integrity()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel every room and end the thread, once all is quiet or after `timeout_s`. False: writes are in progress.

        May be called twice.
        """
        with self._wake:
            self._give_up = self._clock() + timeout_s
            self._closing = True
        self._do(self._streams.cancel_all)
        if self._thread.ident is not None:
            self._thread.join()
        return self._streams.rooms == 0

    def _do(self, command: Callable[[], None]) -> None:
        with self._wake:
            command()
            self._poked = True
            self._wake.notify()

    # ---- transfer thread ----

    def _run(self) -> None:
        try:
            idle_turns = 0
            while not self._over():
                moved = self._post_one()
                moved = self._poll() or moved
                with self._wake:
                    self._streams.expire(self._clock(), self._write_timeout)
                self._emit()
                idle_turns = 0 if moved else idle_turns + 1
                if idle_turns:
                    self._pause(idle_turns)
            self._emit()
        except BaseException as error:  # the node's process watches `failure` and ends
            self.failure = error
            log.critical("transfer thread ended", exc_info=error)

    def _over(self) -> bool:
        with self._wake:
            return self._closing and (not self._streams.rooms or self._clock() > self._give_up)

    def _post_one(self) -> bool:
        """Post the next batch. False when there is none that may go out."""
        with self._wake:
            batch = self._streams.next_batch(self._clock())
        if batch is None:
            return False
        try:
            notice = batch.notice
            if self._checksums is not None and batch.local_pages:
                notice = replace(notice, checksums=self._checksums(batch.local_pages))
            if not batch.lease():  # asked last, as checksums take their time
                self._fail(batch, "this node's lease ran out")
            elif batch.local_pages:
                write = self._agent.write(batch.peer, batch.local_pages, batch.remote_pages, notice.encode())
                self._writes.setdefault(batch.peer, deque()).append((write, batch))
                self._posted += 1
            else:
                self._agent.notify(batch.peer, notice.encode())
                self._finish(batch)
        except KVRelayError as error:
            self._fail(batch, str(error))
        except Exception as error:  # nothing was posted: the room fails, the others go on
            log.exception("post failed", extra={"room": str(batch.room), "peer": str(batch.peer)})
            self._fail(batch, f"post failed: {type(error).__name__}")
        return True

    def _poll(self) -> bool:
        """Take in writes that are terminal; those to one peer end in the order they were posted."""
        moved = False
        for peer, writes in list(self._writes.items()):
            while writes and (state := self._agent.poll(writes[0][0])) is not WriteState.ACTIVE:
                write, batch = writes.popleft()
                moved = True
                if state is WriteState.DONE:
                    self._finish(batch)
                else:
                    self._fail(batch, write.error)
            if not writes:
                del self._writes[peer]
        return moved

    def _finish(self, batch: Batch) -> None:
        self._bytes_sent += batch.bytes
        with self._wake:
            self._streams.finished(batch, self._clock())

    def _fail(self, batch: Batch, reason: str) -> None:
        with self._wake:
            self._streams.failed(batch, reason)

    def _emit(self) -> None:
        with self._wake:
            events = self._streams.take_events()
        for event in events:
            if isinstance(event, WriteFailed):
                self._failed += 1
                log.warning("writes failed", extra={"room": str(event.room), "reason": event.reason})
            self._on_event(event)

    def _pause(self, idle_turns: int) -> None:
        """Sleep until there is something to do: long when nothing is posted, briefly and ever longer while it is."""
        if self._writes:
            # A peer that does not answer must not slow down those that do: the youngest of the waiting writes counts.
            slow = self._clock() - max(writes[0][1].posted for writes in self._writes.values()) > STALLED_S
            delay = STALLED_POLL_S if slow else min(POLL_S[0] * 2 ** min(idle_turns, 10), POLL_S[1])
        else:
            self._agent.progress()
            delay = IDLE_TICK_S
        if delay <= POLL_S[1]:  # a plain sleep costs half of what waiting on a condition does
            time.sleep(delay)
            return
        with self._wake:
            if not self._poked:
                self._wake.wait(delay)
            self._poked = False
