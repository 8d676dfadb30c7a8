"""The decode engine with a real device and real writes: rooms come, decode, and end in every way they can."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode_service import loop
from engine.core.journal import RoomRecord
from engine.core.messages import (
    Abort,
    DecodeReport,
    Explain,
    Explanation,
    Grant,
    Granted,
    Heartbeat,
    LinkLost,
    LinkUp,
    PeerJoined,
    PeerLeft,
    Reserve,
    RoomFailed,
    RoomFenced,
    WriterQuiesced,
)
from engine.core.metrics import NodeMetric
from engine.core.sampling import FinishReason, SamplingParams, StoppingParams
from engine.core.types import NodeIdentity, PeerInfo, Role, RoomKey
from engine.device.batch import ForwardBatch
from tests.helpers.decode_rooms import Decode, arriving, failed, grant_of, key_of, note, pages, reserve, running, write
from tests.helpers.engines import PAGE, decode_engine
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FaultyPool, FilePool, LocalNode, NodeProcess
from transfer.receiver import RoomComplete, WriterGone

PAGES = 16


@pytest.fixture
def d() -> Iterator[Decode]:
    with decode_engine(PAGES) as engine:
        yield engine


@pytest.fixture
def writer(d: Decode, tmp_path: Path) -> Iterator[LocalNode]:
    """A node that writes into the decode node's pool, which it alone has to know for that."""
    node = LocalNode(NodeIdentity.new("p"), FilePool(tmp_path / "pool", PAGES, d.device.pool.page_bytes))
    node.agent.add_peer(d.agent.identity, d.agent.metadata, d.agent.memory)
    node.start_sender()
    yield node
    node.close()


@pytest.fixture
def link(d: Decode) -> RecordingLink:
    one = RecordingLink()
    d.tell(one, LinkUp())
    return one


def told(d: Decode, link: RecordingLink, asked: Reserve) -> RoomRecord:
    """What the node answers when it is asked about a request."""
    d.tell(link, Explain(5, asked.reservation.request_id))
    (room,) = link.of(Explanation)[-1].rooms
    return room


def test_a_request_is_explained_while_it_lives_and_afterwards(
    d: Decode, link: RecordingLink, writer: LocalNode
) -> None:
    asked = reserve(writer, prompt=6, max_new=4)
    d.tell(link, asked)
    assert [event.event for event in told(d, link, asked).events] == ["arrived"]
    d.until(lambda: bool(link.of(Grant)), "it is granted")
    write(writer, d, grant_of(d, link, key_of(asked)), note())
    d.until(lambda: d.stats.idle, "it has ended")
    record = told(d, link, asked)
    assert (record.outcome, record.prompt_tokens, record.passes) == ("finished", 6, ())
    assert [event.event for event in record.events] == ["arrived", "granted", "complete", "first_step", "ended"]


def test_of_a_request_that_ended_early_it_says_why(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    asked = reserve(writer)
    d.tell(link, asked, Abort(key_of(asked), "the client has gone"))
    assert told(d, link, asked).outcome == "aborted: the client has gone"


def late(d: Decode) -> float:
    labels = {"kind": "room_complete"}
    return d.engine.metrics.registry.get_sample_value(NodeMetric.LATE.metric, labels) or 0.0


# ---- the usual way ----


def test_a_room_is_granted_filled_and_decoded(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    asked = reserve(writer, prompt=6, max_new=8)
    d.tell(link, asked)
    assert d.stats.ungranted == 1
    grant = grant_of(d, link, key_of(asked))
    assert len(grant.pages) == 2
    assert grant.head_room == (PAGES - 2) * PAGE
    assert pages(d) == (PAGES - 2, 2, 0)
    assert d.stats.transferring == 1
    write(writer, d, grant, note())
    d.until(lambda: not d.stats.pages_held, "it is decoded")
    tokens = link.tokens(key_of(asked))
    assert [token.index for token in tokens] == list(range(1, 8))
    assert [token.finish for token in tokens] == [None] * 6 + [FinishReason.LENGTH]
    assert all(token.logprob <= 0 for token in tokens)
    reports = [report for output in link.outputs for report in output.decoded]
    assert [report.key for report in reports] == [key_of(asked)]
    assert isinstance(reports[0], DecodeReport)
    assert pages(d) == (PAGES, 0, 0)
    assert failed(link) == []
    assert d.stats.output_tokens_total == 7
    assert d.stats.relayed_bytes_total == 2 * d.device.pool.page_bytes


def test_a_page_that_is_not_what_was_sent_fails_the_attempt(d: Decode, link: RecordingLink, tmp_path: Path) -> None:
    pool = FaultyPool(tmp_path / "pool", PAGES, d.device.pool.page_bytes)
    writer = LocalNode(NodeIdentity.new("p"), pool, checksum=True)
    writer.agent.add_peer(d.agent.identity, d.agent.metadata, d.agent.memory)
    writer.start_sender()
    asked, again = reserve(writer, prompt=10), reserve(writer, prompt=10)
    d.tell(link, asked)
    pool.faulty = 1
    write(writer, d, grant_of(d, link, key_of(asked)), note())
    d.until(lambda: bool(failed(link)), "the attempt fails")
    assert failed(link) == [(key_of(asked), "transferring", True)]
    assert link.of(RoomFailed)[0].reason.startswith("page 1 of the room is not what was sent")
    assert pages(d) == (PAGES - 3, 0, 3)
    assert d.engine.metrics.registry.get_sample_value(NodeMetric.CORRUPT_PAGES.metric) == 1
    d.tell(link, WriterQuiesced(key_of(asked)), again)
    write(writer, d, grant_of(d, link, key_of(again)), note())
    d.until(lambda: d.stats.idle and pages(d) == (PAGES, 0, 0), "the next one is decoded")
    assert not link.tokens(key_of(asked))
    assert len(link.tokens(key_of(again))) == 7
    writer.close()


@pytest.mark.parametrize(
    "stopping",
    [StoppingParams(1), StoppingParams(9, stop_token_ids=(5,)), StoppingParams(9, eos_token_ids=(5,))],
    ids=["length", "stop token", "end of sequence"],
)
def test_token_0_may_be_the_last(d: Decode, link: RecordingLink, writer: LocalNode, stopping: StoppingParams) -> None:
    asked = reserve(writer, stopping=stopping)
    d.tell(link, asked)
    write(writer, d, grant_of(d, link, key_of(asked)), note(token_id=5))
    d.until(lambda: not d.stats.transferring, "its pages arrive")
    assert pages(d) == (PAGES, 0, 0)
    assert link.outputs == [], "the front door has it from the prefill node, with the same verdict"


def test_a_stop_token_ends_the_answer_and_is_named(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    (free,) = running(d, link, writer, reserve(writer, max_new=12))
    d.until(lambda: not d.stats.pages_held, "it is decoded")
    ids = [token.token_id for token in link.tokens(free)]
    at = next(i for i in range(len(ids)) if ids[i] not in ids[:i] and i >= 2)
    stopping = StoppingParams(12, stop_token_ids=(ids[at],), ignore_eos=True)
    (key,) = running(d, link, writer, reserve(writer, stopping=stopping))
    d.until(lambda: not d.stats.pages_held, "it is decoded")
    tokens = link.tokens(key)
    assert [token.token_id for token in tokens] == ids[: at + 1]
    assert (tokens[-1].finish, tokens[-1].matched_token) == (FinishReason.STOP, ids[at])
    assert all(token.finish is None and token.matched_token is None for token in tokens[:-1])


def test_an_attempt_goes_on_where_the_last_one_ended(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    (key,) = running(d, link, writer, reserve(writer, prompt=9, max_new=3, first_index=4))
    d.until(lambda: not d.stats.pages_held, "it is decoded")
    assert [token.index for token in link.tokens(key)] == [5, 6]


def test_penalties_count_what_was_said_before(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    sampling = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=1.0)
    asked = reserve(writer, prompt=9, max_new=20, first_index=4, sampling=sampling)
    (key,) = running(d, link, writer, asked)
    d.until(lambda: not d.stats.pages_held, "it is decoded")
    (plain,) = running(d, link, writer, reserve(writer, prompt=9, max_new=20, first_index=4))
    d.until(lambda: not d.stats.pages_held, "it is decoded")
    unlike, alike = ([token.token_id for token in link.tokens(one)] for one in (key, plain))
    assert len(set(unlike)) > len(set(alike))


def test_each_link_hears_of_its_own_rooms(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    other = RecordingLink()
    d.tell(other, LinkUp())
    (here,) = running(d, link, writer, reserve(writer, max_new=4))
    (there,) = running(d, other, writer, reserve(writer, max_new=4))
    d.until(lambda: not d.stats.pages_held, "they are decoded")
    assert {token.key for output in link.outputs for token in output.tokens} == {here}
    assert {token.key for output in other.outputs for token in output.tokens} == {there}
    assert [grant.key for grant in other.of(Grant)] == [there]
    freed = [heartbeat.stats.pages_free for heartbeat in other.of(Heartbeat)]
    assert freed[-1] == PAGES, "room that came back is told at once, to all"


def test_a_room_begins_once(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    """A reservation that comes again, while the room lives or later, or only after its end, changes nothing."""
    asked, aborted = reserve(writer, max_new=4), reserve(writer)
    d.tell(link, asked, Abort(key_of(aborted), "over"), aborted)
    write(writer, d, grant_of(d, link, key_of(asked)), note())
    d.tell(link, asked)
    d.until(lambda: len(link.tokens(key_of(asked))) == 3, "it is decoded")
    d.tell(link, asked)
    d.turn()
    assert d.stats.idle
    assert len(link.of(Grant)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": 0},
        {"first_index": 6},
        {"sampling": SamplingParams(temperature=math.nan)},
        {"sampling": SamplingParams(presence_penalty=1.0)},
        {"history": (10_000,) * 6},
        {"stopping": StoppingParams(max_new_tokens=0)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_would_fail_the_step_is_refused(
    d: Decode, link: RecordingLink, writer: LocalNode, wrong: dict[str, Any]
) -> None:
    """A front door that is wrong about one room must not cost the others, which share its step."""
    asked = reserve(writer, prompt=6)
    d.tell(link, Reserve(replace(asked.reservation, **wrong)))
    (refused,) = link.of(RoomFailed)
    assert (refused.key, refused.code, refused.retriable) == (key_of(asked), "INVALID_ARGUMENT", False)
    assert d.stats.idle


def test_more_than_fits_waits_in_order(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    asked = [reserve(writer, prompt=20, max_new=4) for _ in range(5)]
    d.tell(link, *asked)
    d.turn()
    assert [grant.key for grant in link.of(Grant)] == [key_of(one) for one in asked[:3]]
    assert (d.stats.transferring, d.stats.ungranted) == (3, 2)
    write(writer, d, link.of(Grant)[1], note())
    d.until(lambda: len(link.of(Grant)) == 4, "the next takes its place")
    assert link.of(Grant)[3].key == key_of(asked[3])


# ---- a pass fails ----


def test_a_forward_that_raises_fails_its_rooms_and_no_others(
    d: Decode, link: RecordingLink, writer: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = running(d, link, writer, reserve(writer), reserve(writer))
    waits = arriving(d, link, writer, prompt=20, max_new=4)
    first = [key for key in first if d.stats.running]
    queued = reserve(writer, prompt=40, max_new=4)
    d.tell(link, queued)
    d.turn()
    assert (d.stats.running, d.stats.transferring, d.stats.ungranted) == (2, 1, 1)
    forward = d.device.runner.forward

    def fail(batch: ForwardBatch) -> None:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(d.device.runner, "forward", fail)
        d.turn()
    (incident,) = d.incidents
    reasons = [report.reason for report in link.of(RoomFailed)]
    assert failed(link) == [(key, "decoding", False) for key in first]
    assert reasons == [f"internal error, incident {incident}"] * 2
    assert all(report.code == "INTERNAL" for report in link.of(RoomFailed))
    assert pages(d) == (PAGES - 5, 5, 0), "their pages are free, those of the others are not"
    assert d.failures() == 2
    assert d.device.runner.forward == forward
    write(writer, d, grant_of(d, link, waits), note())
    d.until(lambda: bool(link.tokens(waits)) and link.tokens(waits)[-1].finish is not None, "the others go on")
    grant_of(d, link, key_of(queued))


# ---- out of pages ----


def together(d: Decode, link: RecordingLink, writer: LocalNode, rooms: Sequence[tuple[int, int]]) -> list[RoomKey]:
    """Rooms of (prompt tokens, first index) that decode together."""
    asked = [reserve(writer, prompt, 12, first_index=first_index) for prompt, first_index in rooms]
    return running(d, link, writer, *asked)


@pytest.mark.parametrize(
    ("rooms", "order"),
    [
        ([(4, 0), (4, 0), (4, 0), (4, 0)], [0, 1, 2]),  # all alike: the first, which is as good as any
        ([(4, 3), (4, 2), (4, 1), (4, 0)], [3, 2, 1]),  # fewest tokens of the answer, those of earlier attempts too
        ([(4, 0), (8, 0), (4, 1), (8, 0)], [1, 3]),  # then the longest prompt; two are enough here
        ([(12, 8), (8, 0), (4, 0), (16, 12)], [1, 2]),
        ([(8, 4), (12, 4), (8, 4)], [1]),  # a prompt is counted without the answer's part of it
    ],
)
def test_who_gives_way_when_pages_run_out(
    d: Decode, link: RecordingLink, writer: LocalNode, rooms: list[tuple[int, int]], order: list[int]
) -> None:
    held = sum(prompt for prompt, _ in rooms) // PAGE
    blocker = arriving(d, link, writer, prompt=(PAGES - held - 3) * PAGE, max_new=1)  # leaves three pages to grow
    keys = together(d, link, writer, rooms)
    assert pages(d)[0] == 3
    d.until(lambda: d.stats.running == 0, "some give way, one after another, and the others are done")
    assert [keys.index(key) for key, _, _ in failed(link)] == order
    assert {(phase, retriable) for _, phase, retriable in failed(link)} == {("decoding", True)}
    assert {report.reason for report in link.of(RoomFailed)} == {"retracted: out of pages"}
    for i in set(range(len(keys))) - set(order):
        assert link.tokens(keys[i])[-1].finish is FinishReason.LENGTH
    assert pages(d) == (held + 3, PAGES - held - 3, 0)
    assert blocker not in [key for key, _, _ in failed(link)]


@pytest.mark.parametrize(("low_first", "order"), [(False, [2, 1]), (True, [2, 0])])
def test_the_least_important_gives_way_first(tmp_path: Path, low_first: bool, order: list[int]) -> None:
    with decode_engine(PAGES, priority_scheduling=True, low_priority_first=low_first) as d:
        link = RecordingLink()
        d.tell(link, LinkUp())
        writer = LocalNode(NodeIdentity.new("p"), FilePool(tmp_path / "pool", PAGES, d.device.pool.page_bytes))
        writer.agent.add_peer(d.agent.identity, d.agent.metadata, d.agent.memory)
        writer.start_sender()
        try:
            # What is left of the pool is three pages; the first room has the fewest tokens, the third no priority.
            arriving(d, link, writer, prompt=(PAGES - 6) * PAGE, max_new=1)
            asked = [reserve(writer, 4, 12, priority=p, first_index=i) for p, i in ((9, 0), (1, 1), (None, 2))]
            keys = running(d, link, writer, *asked)
            d.until(lambda: d.stats.running == 0, "some give way, and the others are done")
        finally:
            writer.close()
        assert [keys.index(key) for key, _, _ in failed(link)] == order


def test_a_prompt_counts_without_the_answer_in_it(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    """Two of equal progress: the one whose own prompt is longer gives way, though fewer tokens came with its pages."""
    arriving(d, link, writer, prompt=(PAGES - 7) * PAGE, max_new=1)
    fresh, resumed = reserve(writer, 8, 20), reserve(writer, 10, 10, first_index=4)
    d.tell(link, fresh, resumed)
    write(writer, d, grant_of(d, link, key_of(fresh)), note())
    d.until(lambda: len(link.tokens(key_of(fresh))) == 4, "one has a start of four tokens")
    write(writer, d, grant_of(d, link, key_of(resumed)), note(4))
    d.until(lambda: d.stats.running == 2, "the other joins it", passes=False)
    d.until(lambda: d.stats.running == 0, "both are over")
    assert failed(link) == [(key_of(fresh), "decoding", True)]
    assert link.tokens(key_of(resumed))[-1].finish is FinishReason.LENGTH


def test_the_last_one_waits_for_pages_of_others(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    """Pages that arrive, or are fenced, come back: nothing is wrong with the one that needs them."""
    keys = running(d, link, writer, *(reserve(writer, prompt=4, max_new=14) for _ in range(2)))
    blocker = arriving(d, link, writer, prompt=48, max_new=1)  # what admission lets in comes a page too near
    while d.turn():
        pass
    assert [(key, retriable) for key, _, retriable in failed(link)] == [(keys[0], True)]
    said = len(link.tokens(keys[1]))
    assert (d.turn(), d.stats.running, pages(d)) == (False, 1, (0, PAGES, 0))
    d.tell(link, Abort(blocker, "given up"))
    assert (d.turn(), len(link.tokens(keys[1]))) == (False, said), "fenced pages are not free"
    d.tell(link, WriterQuiesced(blocker))
    d.until(lambda: d.stats.running == 0, "it goes on")
    assert [token.index for token in link.tokens(keys[1])] == list(range(1, 14))
    assert len(failed(link)) == 1
    assert pages(d) == (PAGES, 0, 0)


def test_the_last_one_fails_when_it_has_the_whole_pool(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    """Not admitted by the formula unless it was resumed: there, what fitted at arrival is not refused."""
    asked = reserve(writer, prompt=(PAGES - 1) * PAGE, max_new=9, first_index=PAGE)
    (key,) = running(d, link, writer, asked)
    d.until(lambda: bool(failed(link)), "it fails")
    assert failed(link) == [(key, "decoding", False)]
    (report,) = link.of(RoomFailed)
    assert report.reason == f"out of pages: this node has {PAGES} pages of {PAGE} tokens"
    assert report.code == "RESOURCE_EXHAUSTED"
    assert [token.index for token in link.tokens(key)] == [5, 6, 7, 8]
    assert pages(d) == (PAGES, 0, 0)


# ---- rooms end early ----


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


# ---- what a writer says is input ----


def test_a_room_that_breaks_its_word_fails(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    key = arriving(d, link, writer, prompt=8, max_new=4)
    writer.sender.open(key, d.agent.identity, grant_of(d, link, key).pages, lambda: True)
    writer.sender.send(key, 0, [0], last=note().encode())  # one of two pages
    d.until(lambda: bool(failed(link)), "it fails")
    assert failed(link) == [(key, "transferring", True)]
    assert link.of(RoomFailed)[0].reason == "1 pages came, 2 were expected"
    assert pages(d) == (PAGES - 2, 0, 2)


@pytest.mark.parametrize("last", [b"", b"nonsense", b"{}", b"[1,2,3,4,5]"])
def test_a_note_that_is_none_fails_its_room(
    d: Decode, link: RecordingLink, writer: LocalNode, last: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (other,) = running(d, link, writer, reserve(writer, max_new=12))
    key = arriving(d, link, writer, prompt=8, max_new=4)
    write(writer, d, grant_of(d, link, key), last)
    d.until(lambda: bool(failed(link)), "it fails")
    assert failed(link) == [(key, "transferring", False)]
    incident = vars(next(record for record in caplog.records if record.message == "handling failed"))["incident"]
    assert link.of(RoomFailed)[0].reason == f"internal error, incident {incident}"
    assert d.stats.pages_fenced == 2
    d.until(lambda: link.tokens(other)[-1].finish is not None, "others go on")


def test_commands_for_another_kind_of_node_are_ignored(
    d: Decode, link: RecordingLink, caplog: pytest.LogCaptureFixture
) -> None:
    d.tell(link, Granted(RoomKey.new(0), NodeIdentity("d", "1"), (1,)))
    assert [record.message for record in caplog.records] == ["not for a decode node"]
    assert link.reports == []
