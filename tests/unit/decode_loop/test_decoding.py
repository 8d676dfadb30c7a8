"""Rooms come to a decode engine with a real device and real writes, are filled and decoded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.journal import RoomRecord
from engine.core.messages import (
    Abort,
    DecodeReport,
    Explain,
    Explanation,
    Grant,
    Granted,
    Heartbeat,
    LinkUp,
    Reserve,
    RoomFailed,
    WriterQuiesced,
)
from engine.core.metrics import NodeMetric
from engine.core.sampling import FinishReason, SamplingParams, StoppingParams
from engine.core.types import NodeIdentity, RoomKey
from engine.device.batch import ForwardBatch
from tests.helpers.decode_rooms import (
    PAGES,
    Decode,
    arriving,
    failed,
    grant_of,
    key_of,
    note,
    pages,
    reserve,
    running,
    write,
)
from tests.helpers.engines import PAGE
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FaultyPool, LocalNode


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
