"""Rooms of a decode engine end early, or their writers leave: when their pages come free."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_service import loop
from engine.core.messages import (
    Abort,
    Grant,
    LinkLost,
    LinkUp,
    PeerJoined,
    PeerLeft,
    RoomFailed,
    RoomFenced,
    WriterQuiesced,
)
from engine.core.metrics import NodeMetric
from engine.core.types import NodeIdentity, PeerInfo, Role, RoomKey
from tests.helpers.decode_rooms import PAGES, Decode, arriving, failed, grant_of, key_of, note, pages, reserve, running
from tests.helpers.engines import PAGE
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FilePool, LocalNode, NodeProcess
from transfer.receiver import RoomComplete, WriterGone


def late(d: Decode) -> float:
    labels = {"kind": "room_complete"}
    return d.engine.metrics.registry.get_sample_value(NodeMetric.LATE.metric, labels) or 0.0


@pytest.mark.parametrize("ending", ["abort", "link lost"])
def test_a_queued_room_ends_without_a_trace(d: Decode, link: RecordingLink, writer: LocalNode, ending: str) -> None:
    arriving(d, link, writer, prompt=40, max_new=4)
    other = RecordingLink()
    d.tell(other, LinkUp())
    asked = reserve(writer, prompt=40, max_new=4)
    d.tell(other, asked)
    d.turn()
    assert d.stats.ungranted == 1
    d.tell(other, Abort(key_of(asked), "x") if ending == "abort" else LinkLost())
    d.turn()
    assert d.stats.ungranted == 0
    assert pages(d) == (PAGES - 10, 10, 0)
    assert (other.of(Grant), failed(other)) == ([], [])


def test_where_a_word_was_lost_it_is_asked_for_again(
    d: Decode, link: RecordingLink, writer: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a fenced room the writer's, of an orphan the end: its writer is done, and its pages do not come."""
    fenced, orphan = (arriving(d, link, writer, prompt=8, max_new=4) for _ in range(2))
    d.tell(link, Abort(fenced, "x"), WriterQuiesced(orphan))
    d.turn()
    assert not link.of(RoomFenced), "there is no hurry"
    monkeypatch.setattr(loop, "REMIND_S", 0.0)
    d.turn()
    assert link.of(RoomFenced) == [RoomFenced(fenced, writer.identity)]
    assert [(one.key, one.retriable) for one in link.of(RoomFailed)] == [(orphan, True)]
    d.tell(link, WriterQuiesced(fenced))
    d.until(lambda: d.stats.pages_fenced == 0, "both are quiet")


@pytest.mark.parametrize("ending", ["abort", "link lost"])
@pytest.mark.parametrize("sent", [0, 1, 2])
def test_pages_of_an_arriving_room_come_free_when_its_writer_is_quiet(
    d: Decode, link: RecordingLink, writer: LocalNode, ending: str, sent: int
) -> None:
    other_link = RecordingLink()
    other = arriving(d, other_link, writer, prompt=8, max_new=4)
    key = arriving(d, link, writer, prompt=8, max_new=4)
    grant = grant_of(d, link, key)
    writer.sender.open(key, d.agent.identity, grant.pages, lambda: True)
    if sent:
        writer.sender.send(key, 0, range(sent))
        d.until(lambda: bool(writer.sent.of(key)), "a part of it arrives")
    d.tell(link, *([Abort(key, "x"), Abort(key, "again")] if ending == "abort" else [LinkLost()]))
    assert pages(d) == (PAGES - 4, 2, 2)
    filler = arriving(d, other_link, writer, prompt=(PAGES - 4) * PAGE - 1, max_new=1)
    assert not set(grant.pages) & set(grant_of(d, other_link, filler).pages), "fenced pages are given to nobody"
    d.tell(link, WriterQuiesced(other), WriterQuiesced(RoomKey.new(9)))  # of rooms that are not fenced
    d.tell(link, WriterQuiesced(key))
    assert pages(d) == (0, PAGES - 2, 2), "the proof alone is not enough"
    d.until(lambda: d.stats.pages_fenced == 0, "what was on its way has landed")
    assert pages(d) == (2, PAGES - 2, 0)
    d.tell(other_link, Abort(other, "x"))
    assert pages(d) == (2, PAGES - 4, 2)
    d.until(lambda: d.stats.pages_fenced == 0, "its writer had said so before")
    assert failed(link) == []


@pytest.mark.parametrize("ending", ["abort", "link lost"])
def test_pages_of_a_running_room_are_free_at_once(
    d: Decode, link: RecordingLink, writer: LocalNode, ending: str
) -> None:
    (key,) = running(d, link, writer, reserve(writer))
    d.turn()
    said = len(link.outputs)
    d.tell(link, Abort(key, "x") if ending == "abort" else LinkLost())
    assert pages(d) == (PAGES, 0, 0)
    d.turn()
    assert len(link.outputs) == said
    d.tell(link, Abort(key, "x"), WriterQuiesced(key))
    assert pages(d) == (PAGES, 0, 0)


def test_pages_that_all_came_too_late_are_not_decoded(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    key = arriving(d, link, writer, prompt=8, max_new=4)
    d.tell(link, Abort(key, "x"))
    d.tell(None, RoomComplete(key, note().encode(), 2, 0.0, 0.0))  # the receiver had said so before it was told
    assert late(d) == 1
    assert d.stats.running == 0
    (other,) = running(d, link, writer, reserve(writer))
    d.turn()
    d.tell(None, RoomComplete(other, note().encode(), 2, 0.0, 0.0))
    d.tell(link, Abort(other, "x"))
    assert late(d) == 2
    assert [token.index for token in link.tokens(other)] == [1]
    assert pages(d) == (PAGES - 2, 0, 2)
    d.tell(link, WriterQuiesced(key))
    d.until(lambda: pages(d) == (PAGES, 0, 0), "the pages come back")
    assert link.tokens(key) == []


# ---- writers leave ----


def introduce(d: Decode, link: RecordingLink, writer: LocalNode) -> PeerInfo:
    peer = PeerInfo(writer.identity, Role.PREFILL, writer.agent.memory, writer.agent.metadata)
    d.tell(link, PeerJoined(peer))
    return peer


def test_a_writer_that_left_ends_what_it_had_not_written(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    stranger = NodeIdentity.new("p2")
    introduce(d, link, writer)
    (decoding,) = running(d, link, writer, reserve(writer, max_new=20))
    half = arriving(d, link, writer, prompt=8, max_new=4)
    of_another = reserve(stranger, prompt=8, max_new=4)
    waiting = reserve(writer, prompt=40, max_new=4)
    d.tell(link, of_another, waiting)
    grant_of(d, link, key_of(of_another))
    d.tell(link, PeerLeft(writer.identity))
    assert failed(link) == [(half, "transferring", True), (key_of(waiting), "transferring", True)]
    assert d.stats.pages_fenced == 2, "its end is no proof that it writes no more"
    assert d.stats.running == 1
    d.tell(None, WriterGone(stranger))
    assert d.stats.pages_fenced == 2
    d.tell(None, WriterGone(writer.identity))
    assert d.stats.pages_fenced == 0
    d.until(lambda: link.tokens(decoding)[-1:] != [] and link.tokens(decoding)[-1].finish is not None, "decoded")
    assert (d.stats.transferring, d.stats.ungranted) == (1, 0)


def test_a_dead_writers_pages_come_free_without_a_word_of_it(d: Decode, link: RecordingLink, tmp_path: Path) -> None:
    """Its bootstrap, and with that the link, may be gone as well."""
    writer = NodeProcess(tmp_path / "pool", PAGES, d.device.pool.page_bytes, node_id="p")
    identity, metadata, memory = writer.introduction
    d.tell(link, PeerJoined(PeerInfo(identity, Role.PREFILL, memory, metadata)))
    arriving(d, link, writer, prompt=8, max_new=4)
    d.tell(link, LinkLost())
    assert pages(d) == (PAGES - 2, 0, 2)
    with writer.stopped():  # which is not dead
        ticket = RoomKey.new(0)
        d.engine._receiver.settle(ticket)
        late = d.engine._fence.late
        d.until(lambda: d.engine._fence.late > late, "time passes")
        assert pages(d) == (PAGES - 2, 0, 2)
    writer.kill()
    d.until(lambda: pages(d) == (PAGES, 0, 0), "the writer is proven gone")


def test_a_writer_that_came_back_as_another_is_still_watched(
    d: Decode, link: RecordingLink, writer: LocalNode, tmp_path: Path
) -> None:
    """One bootstrap has met the successor, another has not yet missed the writer, nor ended what it was to write."""
    old = NodeProcess(tmp_path / "old", PAGES, d.device.pool.page_bytes, node_id="p")
    identity, metadata, memory = old.introduction
    joined, other = PeerJoined(PeerInfo(identity, Role.PREFILL, memory, metadata)), RecordingLink()
    d.tell(link, joined)
    d.tell(other, joined)
    key = arriving(d, other, old, prompt=8, max_new=4)
    d.tell(link, PeerLeft(identity))
    introduce(d, link, writer)  # of the same node id
    assert failed(other) == []
    old.kill()
    d.tell(other, PeerLeft(identity))
    assert failed(other) == [(key, "transferring", True)]
    d.until(lambda: pages(d) == (PAGES, 0, 0), "the old one is proven gone")


def test_a_writer_that_comes_back_is_asked_about_fenced_rooms(
    d: Decode, link: RecordingLink, writer: LocalNode, tmp_path: Path
) -> None:
    peer = introduce(d, link, writer)
    keys = [arriving(d, link, writer, prompt=8, max_new=4) for _ in range(3)]
    d.tell(link, *(Abort(key, "x") for key in keys[:2]))
    assert link.of(RoomFenced) == []
    new = RecordingLink()
    d.tell(new, LinkUp())
    fenced = [RoomFenced(key, writer.identity) for key in keys[:2]]
    assert new.of(RoomFenced) == fenced, "all, to a bootstrap that has just come"
    stranger = LocalNode(NodeIdentity.new("p2"), FilePool(tmp_path / "p2", PAGES, d.device.pool.page_bytes))
    introduce(d, new, stranger)
    stranger.close()
    assert new.of(RoomFenced) == fenced
    d.tell(new, PeerJoined(peer))
    assert new.of(RoomFenced) == fenced * 2, "and those of a writer that has"
    d.tell(link, WriterQuiesced(keys[0]))
    d.until(lambda: d.stats.pages_fenced == 2, "one is answered")
    last = RecordingLink()
    d.tell(last, LinkUp())
    assert last.of(RoomFenced) == fenced[1:]
    d.tell(link, LinkLost())
    still = {keys[1], keys[2]}
    assert {report.key for report in last.of(RoomFenced)[1:]} == still, "and over any link that is left"
