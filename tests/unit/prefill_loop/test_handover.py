"""Prompts come to a prefill engine with a real device and real writes, are computed and handed over."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from engine.core.journal import RoomRecord
from engine.core.messages import Abort, Explain, Explanation, Granted, LinkLost, LinkUp, PeerJoined, RoomFailed, Submit
from engine.core.sampling import FinishReason, SamplingParams
from engine.core.types import NodeIdentity, PeerInfo, Role
from engine.device.batch import ForwardBatch
from tests.helpers.engines import PAGE, prefill_engine
from tests.helpers.prefill_rooms import (
    CHUNK,
    PAGES,
    Pages,
    Prefill,
    answer,
    arrived,
    failed,
    key_of,
    prompt,
    quiesced,
    rest,
    submit,
)
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FilePool, LocalNode, eventually
from transfer.receiver import RoomProgress


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 30])
def test_a_prompt_is_computed_and_handed_over(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, length: int
) -> None:
    asked = submit(prompt(length))
    key = key_of(asked)
    p.tell(link, asked)
    assert (p.turn(), p.stats.ungranted) == (False, 1), "nothing is computed before there is room for it"
    grant = grants.grant(asked)
    p.tell(link, grant)
    assert (p.stats.ungranted, p.stats.waiting) == (0, 1)
    p.until(lambda: bool(quiesced(link)), "it is handed over")
    (token,) = link.tokens(key)
    assert (token.index, token.token_id, token.finish) == (0, answer(prompt(length)), None)
    admitted, tokens, relayed = link.outputs
    assert [(report.key, report.cached_tokens) for report in admitted.admitted] == [(key, 0)]
    assert [(report.key, report.chunks) for report in tokens.prefilled] == [(key, -(-length // CHUNK))]
    assert [report.bytes for report in relayed.relayed] == [len(grant.pages) * p.device.pool.page_bytes]
    assert (quiesced(link), failed(link)) == ([key], [])
    note = arrived(d, key)
    assert (note.token_id, note.index, note.logprob) == (token.token_id, 0, token.logprob)
    assert p.stats.idle
    assert (p.stats.pages_cached, p.stats.pages_free) == (length // PAGE, PAGES - length // PAGE)
    ours = p.device.pool.data.view(PAGES, -1).numpy().view(np.uint8)
    for theirs, page in zip(
        grant.pages, p.engine._cache.pages(p.engine._cache.match(asked.task.page_keys)), strict=False
    ):
        assert np.array_equal(ours[page], d.pool.pages[theirs]), "the pages are ours, byte by byte"


class WatchedPool(FilePool):
    """Notes which pages were checked."""

    def __init__(self, path: Path, page_bytes: int):
        super().__init__(path, PAGES, page_bytes)
        self.checked: list[int] = []

    def checksums(self, pages: Sequence[int]) -> tuple[int, ...]:
        self.checked += pages
        return super().checksums(pages)


@pytest.mark.parametrize("kv_checksum", [False, True])
def test_checksums_of_all_pages_are_sent_if_wanted(tmp_path: Path, kv_checksum: bool) -> None:
    """Of those that a chunk has finished, of the last one in part, and of those that were cached."""
    with prefill_engine(PAGES, kv_checksum=kv_checksum, chunk_size=CHUNK) as p:
        pool = WatchedPool(tmp_path / "pool", p.device.pool.page_bytes)
        d = LocalNode(NodeIdentity.new("d"), pool)
        d.start_receiver()
        link, grants = RecordingLink(), Pages(d)
        p.tell(link, LinkUp(), PeerJoined(PeerInfo(d.identity, Role.DECODE, d.agent.memory, d.agent.metadata)))
        expected: list[int] = []
        for length in (30, 30, 33):
            asked = submit(prompt(length))
            grant = grants.grant(asked)
            p.tell(link, asked, grant)
            p.until(lambda asked=asked: key_of(asked) in quiesced(link), "it is handed over")  # type: ignore[misc]
            arrived(d, key_of(asked))
            expected += grant.pages
        assert pool.checked == (expected if kv_checksum else [])
        assert d.receiver.stats().corrupt_pages == 0
        d.close()


def told(p: Prefill, link: RecordingLink, asked: Submit) -> RoomRecord:
    """What the node answers when it is asked about a request."""
    p.tell(link, Explain(5, asked.task.request_id))
    explanation = link.of(Explanation)[-1]
    assert explanation.inspection_id == 5
    (room,) = explanation.rooms
    return room


def test_a_request_is_explained_while_it_lives_and_afterwards(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages
) -> None:
    asked = submit(prompt(3 * CHUNK))
    p.tell(link, asked)
    waiting = told(p, link, asked)
    assert (waiting.key, waiting.prompt_tokens, waiting.outcome) == (key_of(asked), 3 * CHUNK, "")
    assert ([event.event for event in waiting.events], waiting.passes) == (["arrived"], ())
    p.tell(link, grants.grant(asked))
    p.turn()
    assert [(one.extend, one.chunked) for one in told(p, link, asked).passes] == [(CHUNK, True)]
    rest(p)
    ended = told(p, link, asked)
    assert ended.outcome == "finished"
    names = ["arrived", "granted", "admitted", "token_0", "last_write", "ended"]
    assert [event.event for event in ended.events] == names
    assert [(chunk.end, chunk.tokens) for chunk in ended.chunks] == [(n * CHUNK, CHUNK) for n in (1, 2, 3)]
    assert [one.extend for one in ended.passes] == [CHUNK] * 3
    times = [event.time for event in ended.events]
    assert times == sorted(times)
    assert times[2] < ended.chunks[0].time < ended.chunks[-1].time < times[3]


@pytest.mark.parametrize("pages", [(), (0,), (0, 1, 2, 3)])
def test_a_grant_of_another_number_of_pages_costs_its_own_room_only(
    p: Prefill, link: RecordingLink, grants: Pages, pages: tuple[int, ...]
) -> None:
    """However wrong a decode node is, others' rooms share the pass."""
    wrong, sound = submit(prompt(2 * PAGE + 1)), submit(prompt(2 * PAGE + 1))
    granted = grants.grant(sound)
    p.tell(link, wrong, sound, Granted(key_of(wrong), granted.peer, pages), granted)
    (failed,) = link.of(RoomFailed)
    assert (failed.key, failed.retriable) == (key_of(wrong), True)
    p.until(lambda: bool(link.tokens(key_of(sound))), "the other one goes on")
    rest(p)


@pytest.mark.parametrize(
    "asked",
    [
        submit((3, 10_000, 4)),
        submit((3, 4), first_index=2),
        replace(submit((3, 4)), task=replace(submit((3, 4)).task, sampling=SamplingParams(temperature=math.nan))),
        submit((3, 4), max_new=0),
    ],
    ids=["no token", "all is answer", "sampling", "nothing to make"],
)
def test_what_would_fail_the_pass_is_refused(p: Prefill, link: RecordingLink, asked: Submit) -> None:
    p.tell(link, asked)
    (failed,) = link.of(RoomFailed)
    assert (failed.key, failed.code, failed.retriable) == (key_of(asked), "INVALID_ARGUMENT", False)


def test_of_a_request_that_ended_early_it_says_why(p: Prefill, link: RecordingLink, grants: Pages) -> None:
    aborted, lost = submit(prompt(5)), submit(prompt(6))
    p.tell(link, aborted, Abort(key_of(aborted), "the client has gone"))
    assert told(p, link, aborted).outcome == "aborted: the client has gone"
    other = RecordingLink()
    p.tell(other, LinkUp(), lost, LinkLost())
    assert told(p, link, lost).outcome == "its front door was lost"


def test_pages_go_out_chunk_by_chunk(p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages) -> None:
    asked = submit(prompt(3 * CHUNK))
    p.tell(link, asked, grants.grant(asked))
    for chunk in (1, 2):
        assert p.turn()
        progress = RoomProgress(key_of(asked), chunk * CHUNK // PAGE)
        eventually(functools.partial(d.received.__contains__, progress))
        assert link.tokens(key_of(asked)) == []
    assert p.turn()
    assert link.tokens(key_of(asked)), "token 0 is there before the last pages are"
    rest(p)


def test_cached_pages_go_out_before_anything_is_computed(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = submit(prompt(18))
    p.tell(link, first, grants.grant(first))
    rest(p)
    second = submit((*prompt(18)[:14], 9, 9, 9, 9))
    forward = p.device.runner.forward

    def compute(batch: ForwardBatch) -> Tensor:
        eventually(lambda: RoomProgress(key_of(second), 3) in d.received)
        assert batch.input_ids.tolist() == list(second.task.token_ids[12:]), "what is cached is not computed"
        return forward(batch)

    monkeypatch.setattr(p.device.runner, "forward", compute)
    p.tell(link, second, grants.grant(second))
    rest(p)
    (admitted,) = [r for output in link.outputs for r in output.admitted if r.key == key_of(second)]
    assert admitted.cached_tokens == 12
    (token,) = link.tokens(key_of(second))
    assert token.token_id == answer(second.task.token_ids)
    assert p.stats.cached_tokens_total == 12


def test_prompts_share_a_forward_and_each_gets_its_own_answer(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages
) -> None:
    asked = [submit(prompt(2 + i, 40 * i)) for i in range(2)]
    p.tell(link, *asked, *map(grants.grant, asked))
    p.turn()
    assert [link.tokens(key_of(one))[0].token_id for one in asked] == [answer(one.task.token_ids) for one in asked]
    assert len([output for output in link.outputs if output.tokens]) == 1, "one message a pass"
    rest(p)
    assert sorted(quiesced(link), key=str) == sorted(map(key_of, asked), key=str)


@pytest.mark.parametrize(
    ("max_new", "stops", "min_new", "finish"),
    [
        (1, False, 0, FinishReason.LENGTH),
        (5, True, 0, FinishReason.STOP),
        (1, True, 0, FinishReason.STOP),
        (5, True, 1, None),
    ],
)
def test_token_0_may_be_the_last(
    p: Prefill,
    d: LocalNode,
    link: RecordingLink,
    grants: Pages,
    max_new: int,
    stops: bool,
    min_new: int,
    finish: FinishReason | None,
) -> None:
    token_id = answer(prompt(6))
    stop_ids = (token_id,) if stops else ()
    asked = submit(prompt(6), max_new, min_new_tokens=min_new, stop_token_ids=stop_ids)
    p.tell(link, asked, grants.grant(asked))
    rest(p)
    (token,) = link.tokens(key_of(asked))
    assert token.finish is finish
    assert token.matched_token == (token_id if finish is FinishReason.STOP else None)
    assert (token.token_id == token_id) == (finish is not None), "until min_new_tokens are out no end is sampled"
    arrived(d, key_of(asked))


def test_an_attempt_goes_on_where_the_last_one_ended(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages
) -> None:
    asked = submit(prompt(11), 9, first_index=5)
    p.tell(link, asked, grants.grant(asked))
    rest(p)
    (token,) = link.tokens(key_of(asked))
    assert (token.index, token.finish) == (5, None)
    assert arrived(d, key_of(asked)).index == 5
