"""Which pages go out next, and when a room is over. Plain state, no NIXL, no thread, no clock of its own.

    open ─► send… ─► next_batch ─► (posted by the sender) ─► finished | failed ─► events
              cancel, a failure ─► nothing more of the room is handed out ─► Quiesced once all that was has ended

Rooms of one peer take turns, a batch each, so a long prompt does not hold up the last page of a short one. Peers take
turns too. A peer's batches in progress are bounded in bytes: at least one, then as many as fit its window.

Every opened room ends with exactly one of WritesDone and Quiesced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.types import NodeIdentity, RoomKey
from transfer.notice import MAX_LAST_BYTES, Notice

__all__ = ["Batch", "PageStreams", "Quiesced", "SenderEvent", "Sent", "WriteFailed", "WritesDone"]


@dataclass(frozen=True, slots=True)
class Sent:
    """One write has landed and its notice is under way."""

    room: RoomKey
    pages: int
    bytes: int
    last: bool


@dataclass(frozen=True, slots=True)
class WritesDone:
    """The last send of the room and all before it have landed. Its pages here are no longer read."""

    room: RoomKey
    bytes: int
    seconds: float  # in which a write of the room was in progress


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Nothing more of the room will be posted. Quiesced follows, now or once what was posted has ended."""

    room: RoomKey
    reason: str


@dataclass(frozen=True, slots=True)
class Quiesced:
    """The room was cancelled or failed, and no write of it is in progress. Its pages here are no longer read."""

    room: RoomKey


SenderEvent = Sent | WritesDone | WriteFailed | Quiesced


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One write to post. No pages: a notice by itself."""

    room: RoomKey
    peer: NodeIdentity
    lease: Callable[[], bool]
    local_pages: Sequence[int]
    remote_pages: Sequence[int]
    bytes: int
    notice: Notice
    posted: float  # when it was handed out to be posted


@dataclass(frozen=True, slots=True)
class _Span:
    """Pages of a room that may be sent: its pages [first, first + len(local_pages))."""

    first: int
    local_pages: Sequence[int]
    last: bytes | None


@dataclass(slots=True, eq=False)
class _Room:
    key: RoomKey
    remote_pages: Sequence[int]
    lease: Callable[[], bool]
    link: _Link
    pending: deque[_Span] = field(default_factory=deque)
    in_progress: int = 0  # batches handed out and not ended
    sequence: int = 0  # of the next batch
    pages: int = 0  # in batches handed out
    bytes: int = 0  # landed
    since: float = 0.0  # when in_progress last left 0
    busy: float = 0.0  # seconds in which it was not 0, up to then
    complete: bool = False  # its last send was called
    ended: bool = False  # cancelled or failed


@dataclass(slots=True, eq=False)
class _Link:
    """One peer: rooms with something to send, in turn, and batches in progress, oldest first."""

    peer: NodeIdentity
    ready: deque[_Room] = field(default_factory=deque)
    in_progress: dict[Batch, None] = field(default_factory=dict)
    bytes: int = 0  # in progress
    rooms: int = 0


class PageStreams:
    def __init__(self, page_bytes: int, *, batch_bytes: int, window_bytes: int):
        """`batch_bytes`: of one write, at least a page; `window_bytes`: in progress to one peer, at least a batch."""
        self._page_bytes = page_bytes
        self._batch_pages = max(1, min(batch_bytes, window_bytes) // page_bytes)
        self._window = window_bytes
        self._rooms: dict[RoomKey, _Room] = {}
        self._links: dict[NodeIdentity, _Link] = {}  # the first is next
        self._events: list[SenderEvent] = []
        self.late_sends = 0  # for rooms that had ended

    # ---- what is wanted ----

    def open(self, room: RoomKey, peer: NodeIdentity, remote_pages: Sequence[int], lease: Callable[[], bool]) -> None:
        assert room not in self._rooms, f"room {room} is open already"
        link = self._links.setdefault(peer, _Link(peer))
        link.rooms += 1
        self._rooms[room] = _Room(room, tuple(remote_pages), lease, link)

    def send(self, room: RoomKey, first: int, local_pages: Sequence[int], last: bytes | None) -> None:
        stream = self._rooms.get(room)
        if stream is None or stream.ended:
            self.late_sends += 1
            return
        assert not stream.complete, f"room {room} had its last send"
        assert local_pages or last is not None, "nothing to send"
        assert first in range(len(stream.remote_pages) - len(local_pages) + 1), "pages outside the room"
        assert last is None or len(last) <= MAX_LAST_BYTES
        stream.complete = last is not None
        if not stream.pending:
            stream.link.ready.append(stream)
        stream.pending.append(_Span(first, tuple(local_pages), last))

    def cancel(self, room: RoomKey) -> None:
        """Hand out nothing more of a room. Unknown rooms are fine: they have ended, and said so."""
        stream = self._rooms.get(room)
        if stream is not None and not stream.ended:
            self._end(stream)

    def cancel_all(self) -> None:
        for room in list(self._rooms):
            self.cancel(room)

    # ---- what is done ----

    def next_batch(self, now: float) -> Batch | None:
        """The next write to post, counted as in progress from now on. None while there is none that fits."""
        for peer in list(self._links):
            link = self._links[peer]
            if not link.ready:
                continue
            self._links[peer] = self._links.pop(peer)  # to the end of the line
            stream = link.ready[0]
            count = min(len(stream.pending[0].local_pages), self._batch_pages)
            size = count * self._page_bytes
            if link.bytes and link.bytes + size > self._window:
                continue
            return self._take(stream, count, size, now)
        return None

    def _take(self, stream: _Room, count: int, size: int, now: float) -> Batch:
        link, span = stream.link, stream.pending.popleft()
        last = span.last
        if count < len(span.local_pages):
            last = None
            stream.pending.appendleft(_Span(span.first + count, span.local_pages[count:], span.last))
        stream.pages += count
        notice = Notice(stream.key, stream.sequence, stream.pages, last)
        remote = stream.remote_pages[span.first : span.first + count]
        batch = Batch(stream.key, link.peer, stream.lease, span.local_pages[:count], remote, size, notice, now)
        stream.sequence += 1
        if not stream.in_progress:
            stream.since = now
        stream.in_progress += 1
        link.in_progress[batch] = None
        link.bytes += size
        link.ready.popleft()
        if stream.pending:
            link.ready.append(stream)
        return batch

    def finished(self, batch: Batch, now: float) -> None:
        """A batch has landed."""
        stream = self._ended_batch(batch)
        if stream.ended:
            return self._close_if_quiet(stream)
        stream.bytes += batch.bytes
        if not stream.in_progress:
            stream.busy += now - stream.since
        self._events.append(Sent(batch.room, len(batch.local_pages), batch.bytes, batch.notice.last is not None))
        if stream.complete and not stream.pending and not stream.in_progress:
            self._events.append(WritesDone(batch.room, stream.bytes, stream.busy))
            self._close(stream)

    def failed(self, batch: Batch, reason: str) -> None:
        """A batch has ended without landing, or was not posted at all."""
        stream = self._ended_batch(batch)
        if stream.ended:
            return self._close_if_quiet(stream)
        self._events.append(WriteFailed(batch.room, reason))
        self._end(stream)

    def expire(self, now: float, timeout: float) -> None:
        """Fail what waits for a peer whose oldest batch has been in progress for longer than `timeout` seconds."""
        for link in list(self._links.values()):
            oldest = next(iter(link.in_progress), None)
            if oldest is None or now - oldest.posted <= timeout:
                continue
            for stream in [stream for stream in self._rooms.values() if stream.link is link and not stream.ended]:
                if stream.pending or stream.in_progress:
                    reason = f"no answer from {link.peer.node_id} to a write for {timeout:g} s"
                    self._events.append(WriteFailed(stream.key, reason))
                    self._end(stream)

    def take_events(self) -> list[SenderEvent]:
        events, self._events = self._events, []
        return events

    # ---- what others may see ----

    @property
    def rooms(self) -> int:
        return len(self._rooms)

    def bytes_in_progress(self, peer: NodeIdentity | None = None) -> int:
        """To one peer, or to all."""
        return sum(link.bytes for link in self._links.values() if peer is None or link.peer == peer)

    def check_integrity(self) -> None:
        for link in self._links.values():
            rooms = [stream for stream in self._rooms.values() if stream.link is link]
            assert link.rooms == len(rooms) > 0
            assert link.bytes == sum(batch.bytes for batch in link.in_progress)
            assert link.bytes <= max(self._window, self._page_bytes)
            assert len(link.ready) == len(set(link.ready)), "a room stands in line twice"
            assert set(link.ready) == {stream for stream in rooms if stream.pending}
            for stream in rooms:
                batches = [batch for batch in link.in_progress if batch.room == stream.key]
                assert stream.in_progress == len(batches)
                assert not (stream.ended and stream.pending), "an ended room has pages to send"
                assert not stream.ended or stream.in_progress, "a quiet room was kept"
        assert all(self._links.get(stream.link.peer) is stream.link for stream in self._rooms.values())

    # ---- inside ----

    def _ended_batch(self, batch: Batch) -> _Room:
        stream = self._rooms[batch.room]
        del stream.link.in_progress[batch]
        stream.link.bytes -= batch.bytes
        stream.in_progress -= 1
        return stream

    def _end(self, stream: _Room) -> None:
        stream.ended = True
        if stream.pending:
            stream.pending.clear()
            stream.link.ready.remove(stream)
        self._close_if_quiet(stream)

    def _close_if_quiet(self, stream: _Room) -> None:
        if not stream.in_progress:
            self._events.append(Quiesced(stream.key))
            self._close(stream)

    def _close(self, stream: _Room) -> None:
        del self._rooms[stream.key]
        stream.link.rooms -= 1
        if not stream.link.rooms:
            del self._links[stream.link.peer]
