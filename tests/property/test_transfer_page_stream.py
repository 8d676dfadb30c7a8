"""Whatever is asked and goes wrong: the pages of a room go out once and in order, and it ends once, and quiet."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.types import NodeIdentity, RoomKey
from transfer.page_stream import Batch, PageStreams, Quiesced, SenderEvent, Sent, WriteFailed, WritesDone

PAGE = 10
PEERS = [NodeIdentity("d1", "a"), NodeIdentity("d2", "a")]
ROOM_PAGES = 12


class Streams(RuleBasedStateMachine):
    """A sender that posts and completes at random, beside a record of what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.batch_pages, self.window_pages = 3, 7
        self.streams = PageStreams(PAGE, batch_bytes=self.batch_pages * PAGE, window_bytes=self.window_pages * PAGE)
        self.peer: dict[RoomKey, NodeIdentity] = {}
        self.asked: defaultdict[RoomKey, list[tuple[int, int]]] = defaultdict(list)  # (local, remote) pages
        self.posted: defaultdict[RoomKey, list[Batch]] = defaultdict(list)
        self.last_asked: set[RoomKey] = set()
        self.in_progress: list[Batch] = []
        self.events: defaultdict[RoomKey, list[SenderEvent]] = defaultdict(list)
        self.next_page = 1000

    def open_rooms(self) -> list[RoomKey]:
        return [room for room in self.peer if not any(isinstance(e, WritesDone | Quiesced) for e in self.events[room])]

    def stopped(self, room: RoomKey) -> bool:
        """Nothing more of it may be handed out."""
        return self.streams._rooms[room].ended if room in self.streams._rooms else True

    @precondition(lambda self: len(self.open_rooms()) < 6)
    @rule(peer=st.sampled_from(PEERS))
    def open(self, peer: NodeIdentity) -> None:
        room = RoomKey(len(self.peer), 0)
        self.peer[room] = peer
        self.streams.open(room, peer, [100 + page for page in range(ROOM_PAGES)], lambda: True)

    @precondition(lambda self: self.peer)
    @rule(data=st.data(), count=st.integers(0, 8), last=st.booleans())
    def send(self, data: st.DataObject, count: int, last: bool) -> None:
        room = data.draw(st.sampled_from(sorted(self.peer, key=str)))
        first = len(self.asked[room])
        count = min(count, ROOM_PAGES - first)
        if room in self.last_asked or (count == 0 and not last):
            return
        local = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        if not self.stopped(room):
            self.asked[room] += [(page, 100 + first + i) for i, page in enumerate(local)]
            if last:
                self.last_asked.add(room)
        self.streams.send(room, first, local, b"end" if last else None)

    @rule(count=st.integers(1, 4))
    def post(self, count: int) -> None:
        for _ in range(count):
            batch = self.streams.next_batch(self.now)
            if batch is None:
                return
            self.in_progress.append(batch)
            self.posted[batch.room].append(batch)

    @precondition(lambda self: self.in_progress)
    @rule(data=st.data(), good=st.integers(0, 9))
    def end_one(self, data: st.DataObject, good: int) -> None:
        batch = self.in_progress.pop(data.draw(st.integers(0, len(self.in_progress) - 1)))
        if good:
            self.streams.finished(batch, self.now)
        else:
            self.streams.failed(batch, "broken")

    @precondition(lambda self: self.peer)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.streams.cancel(data.draw(st.sampled_from(sorted(self.peer, key=str))))

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {batch.peer for batch in self.in_progress if self.now - batch.posted > 30}
        before = {room for room in self.open_rooms() if not self.stopped(room)}
        waiting = {
            room for room in before if self.streams._rooms[room].pending or self.streams._rooms[room].in_progress
        }
        self.streams.expire(self.now, 30)
        after = {room for room in self.open_rooms() if not self.stopped(room)}
        assert before - after == {room for room in waiting if self.peer[room] in late}

    @invariant()
    def promises(self) -> None:
        self.streams.check_integrity()
        for event in self.streams.take_events():
            self.events[event.room].append(event)
        for room, events in self.events.items():
            self.check_events(room, events)
        for peer in PEERS:
            assert self.streams.bytes_in_progress(peer) <= self.window_pages * PAGE
        for room, batches in self.posted.items():
            self.check_order(room, batches)

    def check_order(self, room: RoomKey, batches: list[Batch]) -> None:
        pages = [pair for batch in batches for pair in zip(batch.local_pages, batch.remote_pages, strict=True)]
        assert pages == self.asked[room][: len(pages)]
        total = 0
        for sequence, batch in enumerate(batches):
            total += len(batch.local_pages)
            assert len(batch.local_pages) <= self.batch_pages
            assert (batch.notice.sequence, batch.notice.pages) == (sequence, total)
            is_last = room in self.last_asked and total == len(self.asked[room]) and batch is batches[-1]
            assert batch.notice.last == (b"end" if is_last and batch.notice.last is not None else None)

    def check_events(self, room: RoomKey, events: list[SenderEvent]) -> None:
        ends = [event for event in events if isinstance(event, WritesDone | Quiesced)]
        assert len(ends) <= 1
        assert not ends or events[-1] is ends[0]
        in_progress = any(batch.room == room for batch in self.in_progress)
        failures = [event for event in events if isinstance(event, WriteFailed)]
        assert len(failures) <= 1
        if ends:
            assert not in_progress
            assert room not in self.streams._rooms
        if ends and isinstance(ends[0], WritesDone):
            assert not failures
            assert self.posted[room][-1].notice.last == b"end"
            sent = [event for event in events if isinstance(event, Sent)]
            assert sum(event.pages for event in sent) == len(self.asked[room])
            assert sum(event.bytes for event in sent) == ends[0].bytes == len(self.asked[room]) * PAGE
            assert sum(event.last for event in sent) == 1

    def teardown(self) -> None:
        """Once cancelled and with nothing in progress, every room has ended and said so."""
        self.streams.cancel_all()
        for batch in self.in_progress:
            self.streams.finished(batch, self.now)
        self.in_progress.clear()
        self.promises()
        assert self.streams.rooms == 0
        assert self.open_rooms() == []
        assert self.streams.next_batch(self.now) is None


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
