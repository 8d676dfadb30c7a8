"""Turns and bounds: who may send next, and how much."""

from __future__ import annotations

from engine.core.types import NodeIdentity, RoomKey
from transfer.page_stream import PageStreams, Quiesced, WriteFailed

NEAR, FAR = NodeIdentity("near", "1"), NodeIdentity("far", "1")
LONG, SHORT, OTHER = RoomKey(1, 0), RoomKey(2, 0), RoomKey(3, 0)


def make(window_pages: int = 100) -> PageStreams:
    return PageStreams(10, batch_bytes=20, window_bytes=window_pages * 10)


def yes() -> bool:
    return True


def posted(streams: PageStreams, count: int, now: float = 0.0) -> list[RoomKey | None]:
    batches = [streams.next_batch(now) for _ in range(count)]
    return [batch.room if batch else None for batch in batches]


def test_a_short_room_does_not_wait_for_a_long_one() -> None:
    streams = make()
    streams.open(LONG, NEAR, range(50), yes)
    streams.send(LONG, 0, range(50), None)
    streams.open(SHORT, NEAR, range(50, 53), yes)
    streams.send(SHORT, 0, [7, 8, 9], b"")
    assert posted(streams, 5) == [LONG, SHORT, LONG, SHORT, LONG]


def test_a_full_window_holds_up_its_own_peer_only() -> None:
    streams = make(window_pages=5)
    for room, peer in ((LONG, NEAR), (OTHER, FAR)):
        streams.open(room, peer, range(10), yes)
        streams.send(room, 0, range(10), b"")
    assert posted(streams, 5) == [LONG, OTHER, LONG, OTHER, None]
    assert streams.bytes_in_progress(NEAR) == streams.bytes_in_progress(FAR) == 40


def test_a_page_larger_than_the_window_goes_out_alone() -> None:
    streams = PageStreams(100, batch_bytes=20, window_bytes=50)
    streams.open(SHORT, NEAR, [0, 1], yes)
    streams.send(SHORT, 0, [0, 1], b"")
    first = streams.next_batch(0.0)
    assert first is not None
    assert streams.next_batch(0.0) is None
    streams.finished(first, 0.0)
    assert streams.next_batch(0.0) is not None


def test_a_stalled_peer_fails_what_waits_for_it_and_nothing_else() -> None:
    streams = make(window_pages=2)
    for room, peer in ((LONG, NEAR), (SHORT, NEAR), (OTHER, FAR)):
        streams.open(room, peer, range(10), yes)
        streams.send(room, 0, range(4), b"")
    idle = RoomKey(4, 0)
    streams.open(idle, NEAR, range(3), yes)
    stuck = streams.next_batch(0.0)
    assert stuck is not None
    assert stuck.room == LONG
    assert posted(streams, 2, now=20.0) == [OTHER, None]
    streams.expire(30.0, timeout=30.0)
    assert streams.take_events() == []
    streams.expire(30.1, timeout=30.0)
    reason = "no answer from near to a write for 30 s"
    assert streams.take_events() == [WriteFailed(LONG, reason), WriteFailed(SHORT, reason), Quiesced(SHORT)]
    streams.send(idle, 0, range(3), b"")  # as long as the peer does not answer, this is no better off
    streams.expire(30.2, timeout=30.0)
    assert streams.take_events() == [WriteFailed(idle, reason), Quiesced(idle)]
    streams.finished(stuck, 40.0)  # it lives after all
    assert streams.take_events() == [Quiesced(LONG)]
    streams.check_integrity()


def test_sends_to_a_room_that_ended_are_dropped_and_counted() -> None:
    streams = make()
    streams.open(LONG, NEAR, range(4), yes)
    streams.cancel(LONG)
    streams.cancel(LONG)
    streams.send(LONG, 0, [1], b"")
    assert streams.late_sends == 1
    assert streams.take_events() == [Quiesced(LONG)]
    assert streams.next_batch(0.0) is None
