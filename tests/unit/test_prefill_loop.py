"""The prefill engine with a real device and real writes: prompts come, are computed and handed over, or end early."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from engine.core.handoff_note import HandoffNote
from engine.core.journal import RoomRecord
from engine.core.loop import FATAL_FAILURES
from engine.core.messages import (
    Abort,
    CacheDelta,
    Explain,
    Explanation,
    Granted,
    LinkLost,
    LinkUp,
    PeerJoined,
    PeerLeft,
    Reserve,
    RoomFailed,
    RoomQuiesced,
    StepOutput,
    Submit,
)
from engine.core.page_keys import page_keys
from engine.core.sampling import FinishReason, SamplingParams, StoppingParams
from engine.core.types import NodeIdentity, PeerInfo, PrefillTask, Reservation, Role, RoomKey
from engine.device.batch import ForwardBatch
from engine.device.kv_pool import KVPool
from prefill_service import announce
from prefill_service.loop import PrefillEngine
from prefill_service.tier_copier import TierCopier
from tests.helpers.engines import PAGE, Driven, prefill_engine
from tests.helpers.models import prepared_tiny
from tests.helpers.reference import greedy
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FilePool, LocalNode, eventually
from transfer.agent import Write, WriteState
from transfer.receiver import RoomComplete, RoomProgress

PAGES = 24
CHUNK = 8
GREEDY = SamplingParams(temperature=0)
Prefill = Driven[PrefillEngine]


@pytest.fixture
def p(request: pytest.FixtureRequest) -> Iterator[Prefill]:
    """The parameter, if there is one: pages of a host tier."""
    host_pages = getattr(request, "param", None)
    with prefill_engine(PAGES, host_pages=host_pages, chunk_size=CHUNK, max_prefill_tokens=4 * CHUNK) as engine:
        yield engine


@pytest.fixture
def d(p: Prefill, tmp_path: Path) -> Iterator[LocalNode]:
    """A node that takes pages in."""
    node = LocalNode(NodeIdentity.new("d"), FilePool(tmp_path / "pool", PAGES, p.device.pool.page_bytes))
    node.start_receiver()
    yield node
    node.close()


@pytest.fixture
def link(p: Prefill, d: LocalNode) -> RecordingLink:
    """A bootstrap that knows the node `d`."""
    one = RecordingLink()
    peer = PeerInfo(d.identity, Role.DECODE, d.agent.memory, d.agent.metadata)
    p.tell(one, LinkUp(), PeerJoined(peer))
    one.reports.clear()
    return one


def prompt(length: int, first: int = 10) -> tuple[int, ...]:
    return tuple(3 + (first + 7 * i) % 250 for i in range(length))


def submit(token_ids: Sequence[int], max_new: int = 8, *, first_index: int = 0, **stopping: Any) -> Submit:
    key, ids = RoomKey.new(0), tuple(token_ids)
    stop = StoppingParams(max_new, **({"ignore_eos": True} | stopping))
    return Submit(PrefillTask(f"r{key}", key, ids, first_index, page_keys(ids, PAGE), GREEDY, stop))


def key_of(asked: Submit) -> RoomKey:
    return asked.task.key


class Pages:
    """Which pages of the decode node are taken: each room gets the next ones."""

    def __init__(self, d: LocalNode):
        self._d = d
        self._next = 0

    def grant(self, asked: Submit) -> Granted:
        count = -(-len(asked.task.token_ids) // PAGE)
        pages = tuple(i % PAGES for i in range(self._next, self._next + count))
        self._next += count
        self._d.receiver.expect(key_of(asked), pages)
        return Granted(key_of(asked), self._d.identity, pages)


@pytest.fixture
def grants(d: LocalNode) -> Pages:
    return Pages(d)


def rest(p: Prefill) -> None:
    """Everything that can be done is done."""
    p.until(lambda: p.stats.idle and not p.turn(), "the node is at rest")


def failed(link: RecordingLink) -> list[tuple[RoomKey, str, bool]]:
    return [(report.key, report.phase, report.retriable) for report in link.of(RoomFailed)]


def quiesced(link: RecordingLink) -> list[RoomKey]:
    return [report.key for report in link.of(RoomQuiesced)]


def complete(d: LocalNode, key: RoomKey) -> list[RoomComplete]:
    return [event for event in d.received.of(key) if isinstance(event, RoomComplete)]


def arrived(d: LocalNode, key: RoomKey) -> HandoffNote:
    """All pages of a room are on the other side, once; with what was said with the last."""
    eventually(lambda: bool(complete(d, key)))
    (event,) = complete(d, key)
    return HandoffNote.decode(event.last)


def answer(token_ids: Sequence[int]) -> int:
    return greedy(prepared_tiny().path, token_ids, 1)[0]


class Gate:
    """Writes look as if they were still in progress until it is opened."""

    def __init__(self, p: Prefill, monkeypatch: pytest.MonkeyPatch):
        self.open = False
        poll = p.agent.poll

        def gated(write: Write) -> WriteState:
            return poll(write) if self.open else WriteState.ACTIVE

        monkeypatch.setattr(p.agent, "poll", gated)


# ---- the usual way ----


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


# ---- what cannot be done ----


def test_what_can_never_run_is_refused_with_the_reason(p: Prefill, link: RecordingLink) -> None:
    most = PAGES * PAGE - PAGE - 2
    fits, too_long = submit(prompt(most)), submit(prompt(most + 1))
    p.tell(link, fits, too_long, fits)  # told twice, it is taken in once
    (long,) = link.of(RoomFailed)
    assert (long.key, long.phase, long.retriable, long.code) == (key_of(too_long), "queued", False, "INVALID_ARGUMENT")
    assert long.reason == f"token_ids is {most + 1}; allowed: 1 to {most} tokens, the room on this node"
    assert p.stats.ungranted == 1


def test_a_submit_that_cannot_be_handled_is_answered(
    p: Prefill, link: RecordingLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: PrefillTask) -> None:
        raise ZeroDivisionError("a secret")

    asked, other = submit(prompt(5)), submit(prompt(5))
    with monkeypatch.context() as patch:
        patch.setattr(p.engine._scheduler, "submit", fail)
        p.tell(link, asked)
    p.tell(link, other)
    (record,) = caplog.records
    incident = vars(record)["incident"]
    assert link.reports == [
        RoomFailed(key_of(asked), "queued", f"internal error, incident {incident}", retriable=False)
    ]
    assert p.stats.ungranted == 1


def failing(p: Prefill, monkeypatch: pytest.MonkeyPatch, on: Callable[[int], bool]) -> None:
    """Forwards raise when `on` their number, from 1 on."""
    forward, count = p.device.runner.forward, iter(range(1, 1000))

    def compute(batch: ForwardBatch) -> Tensor:
        if on(next(count)):
            raise RuntimeError("a secret")
        return forward(batch)

    monkeypatch.setattr(p.device.runner, "forward", compute)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_forward_that_raises_fails_its_rooms_and_no_others(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """In the first pass is `short`, and in all three `long`; `late` comes afterwards, `never` is not granted."""
    long, short, late, never = (submit(prompt(n, n)) for n in (20, 3, 6, 5))
    failing(p, monkeypatch, lambda call: call == number)
    p.tell(link, short, long, never, grants.grant(short), grants.grant(long))
    while p.turn():
        pass
    (incident,) = p.incidents
    victims = [key_of(short), key_of(long)] if number == 1 else [key_of(long)]
    assert failed(link) == [(key, "prefilling", False) for key in victims]
    assert {report.reason for report in link.of(RoomFailed)} == {f"internal error, incident {incident}"}
    assert {report.code for report in link.of(RoomFailed)} == {"INTERNAL"}
    assert p.failures() == len(victims)
    p.tell(link, late, grants.grant(late))
    p.until(lambda: len(quiesced(link)) == 3, "all but one are over")
    arrived(d, key_of(late))
    if number > 1:
        arrived(d, key_of(short))
    assert bool(complete(d, key_of(short))) == (number > 1)
    assert complete(d, key_of(long)) == []
    assert (p.stats.ungranted, p.stats.transferring, p.stats.pages_held) == (1, 0, 0)


def test_what_failed_can_be_asked_for_again(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks before the one that failed are cached, and right; what the failed one wrote is not."""
    failing(p, monkeypatch, lambda call: call == 2)
    for _ in range(2):
        asked = submit(prompt(20))
        p.tell(link, asked, grants.grant(asked))
        rest(p)
    (token,) = link.tokens(key_of(asked))
    assert token.token_id == answer(prompt(20))
    assert p.stats.cached_tokens_total == CHUNK


def test_a_room_that_cannot_be_opened_fails_its_pass(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = submit(prompt(3)), submit(prompt(4))
    p.tell(link, one, other, grants.grant(one), grants.grant(other))
    opened = p.engine._sender.open

    def fail(room: RoomKey, *rest: Any) -> None:
        assert room != key_of(other)
        opened(room, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(p.engine._sender, "open", fail)
        p.turn()
    assert {key for key, _, _ in failed(link)} == {key_of(one), key_of(other)}
    rest(p)
    assert p.stats.pages_free == PAGES
    assert len(quiesced(link)) == 2


class BadLink(RecordingLink):
    """Takes no tokens."""

    def publish(self, output: StepOutput) -> None:
        if output.tokens:
            raise RuntimeError("no")
        super().publish(output)


def test_an_answer_that_cannot_be_sent_fails_its_pass(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages
) -> None:
    """The forward was good, so what it computed stays cached; the pages of its rooms come back all the same."""
    bad = BadLink()
    one, other = submit(prompt(9)), submit(prompt(3))
    p.tell(bad, one, grants.grant(one))
    p.tell(link, other, grants.grant(other))
    while p.turn():
        pass
    rest(p)
    assert [key for key, _, _ in failed(bad)] == quiesced(bad) == [key_of(one)]
    assert p.stats.pages_held == 0
    assert quiesced(link) == [key_of(other)]


def test_without_a_lease_nothing_is_written(p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages) -> None:
    asked = submit(prompt(9))
    link.lease = False
    p.tell(link, asked, grants.grant(asked))
    rest(p)
    assert failed(link) == [(key_of(asked), "transferring", True)]
    assert link.of(RoomFailed)[0].reason == "this node's lease ran out"
    assert quiesced(link) == [key_of(asked)]
    assert not d.pool.pages.any()
    link.lease = True
    again = submit(prompt(9))
    p.tell(link, again, grants.grant(again))
    rest(p)
    arrived(d, key_of(again))


def test_a_peer_nobody_named_costs_its_rooms_only(p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages) -> None:
    stranger = NodeIdentity.new("d")
    lost, good = submit(prompt(6)), submit(prompt(6))
    p.tell(link, lost, good, Granted(key_of(lost), stranger, (0, 1)), grants.grant(good))
    rest(p)
    assert failed(link) == [(key_of(lost), "transferring", True)]
    assert link.of(RoomFailed)[0].reason == f"no transfer peer {stranger}"
    assert sorted(quiesced(link), key=str) == sorted([key_of(lost), key_of(good)], key=str)
    arrived(d, key_of(good))


def test_commands_for_another_kind_of_node_are_ignored(
    p: Prefill, link: RecordingLink, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = StoppingParams(1)
    p.tell(link, Reserve(Reservation("r", RoomKey.new(0), 1, 0, GREEDY, stopping, NodeIdentity("p", "1"))))
    assert [record.message for record in caplog.records] == ["not for a prefill node"]
    assert link.reports == []


# ---- rooms end early ----

STATES = ("ungranted", "waiting", "running", "transferring")


def at(p: Prefill, link: RecordingLink, grants: Pages, state: str) -> Submit:
    """A room in this state, beside one that must not notice."""
    asked = submit(prompt(2 * CHUNK + 2, 99))
    p.tell(link, asked)
    if state != "ungranted":
        p.tell(link, grants.grant(asked))
    if state == "running":
        p.turn()
    if state == "transferring":
        while p.turn():
            pass
    assert getattr(p.stats, state) >= 1
    return asked


@pytest.mark.parametrize("ending", ["abort", "link lost", "peer left"])
@pytest.mark.parametrize("state", STATES)
def test_a_room_ends_in_any_state(
    p: Prefill,
    d: LocalNode,
    link: RecordingLink,
    grants: Pages,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    ending: str,
) -> None:
    gate = Gate(p, monkeypatch)
    mine, other = RecordingLink(), submit(prompt(5))
    p.tell(link, other)
    asked = at(p, mine, grants, state)
    key = key_of(asked)
    said = len(mine.outputs)
    if ending == "abort":
        p.tell(mine, Abort(key, "x"))
    elif ending == "link lost":
        p.tell(mine, LinkLost())
    else:
        p.tell(link, PeerLeft(d.identity))
    ended = not (ending == "peer left" and state == "ungranted")  # that one may still be granted elsewhere
    while p.turn():
        pass
    assert len(mine.outputs) == said, "nothing more is computed"
    if ending == "peer left" and ended:
        assert failed(mine) == [(key, "transferring", True)]
        assert mine.of(RoomFailed)[0].reason == "decode node d left"
    else:
        assert failed(mine) == []
    opened = state in ("running", "transferring")
    assert quiesced(mine) == ([key] if ended and not opened else []), "not while a write may be in progress"
    assert p.stats.pages_held == 0 or opened
    gate.open = True
    p.until(lambda: quiesced(mine) == [key] or not ended, "it is quiet")
    assert (p.stats.ungranted, p.stats.pages_held, p.stats.transferring) == (1 if ended else 2, 0, 0)
    if ending != "peer left":
        p.tell(link, grants.grant(other))
        p.until(lambda: bool(complete(d, key_of(other))), "others go on")
    if ended:
        p.tell(mine, Granted(key, d.identity, (0, 1, 2, 3, 4)))
    assert (p.turn(), p.stats.waiting) == (False, 0), "what has ended does not come back"
    assert quiesced(mine) == ([key] if ended else [])


@pytest.mark.parametrize("state", STATES)
def test_each_abort_is_answered_once_it_is_quiet(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Also when the bootstrap that asked first is gone, and another asks again over its own link."""
    gate = Gate(p, monkeypatch)
    first, second = RecordingLink(), RecordingLink()
    key = key_of(at(p, first, grants, state))
    p.tell(first, LinkLost())
    p.tell(second, LinkUp(), Abort(key, "asked again"))
    p.turn()
    assert quiesced(second) == ([] if state in ("running", "transferring") else [key])
    gate.open = True
    p.until(lambda: quiesced(second) == [key], "it is answered where it was asked")
    p.tell(second, Abort(key, "and again"), Abort(RoomKey.new(5), "never heard of"))
    assert len(quiesced(second)) == 3, "what is not here is quiet"


def test_a_room_ends_for_one_reason(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(p, monkeypatch)
    key = key_of(at(p, link, grants, "transferring"))
    p.tell(link, Abort(key, "x"), PeerLeft(d.identity), Abort(key, "again"))
    gate.open = True
    rest(p)
    assert (failed(link), quiesced(link)) == ([], [key])


def test_an_aborted_room_may_still_be_written_whole(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages
) -> None:
    """The last write had ended before the sender heard of the abort: quiet is quiet."""
    asked = submit(prompt(5))
    p.tell(link, asked, grants.grant(asked))
    p.turn()
    eventually(lambda: p.engine._sender.stats().rooms == 0)
    p.tell(link, Abort(key_of(asked), "too late"))
    p.until(lambda: p.stats.idle, "it is quiet")
    arrived(d, key_of(asked))
    assert set(quiesced(link)) == {key_of(asked)}


def test_a_peer_that_left_is_written_to_no_more(p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages) -> None:
    p.tell(link, PeerLeft(d.identity), PeerLeft(d.identity), PeerLeft(NodeIdentity.new("other")))
    asked = submit(prompt(5))
    p.tell(link, asked, grants.grant(asked))
    rest(p)
    assert failed(link) == [(key_of(asked), "transferring", True)]
    p.tell(link, PeerJoined(PeerInfo(d.identity, Role.DECODE, d.agent.memory, d.agent.metadata)))
    again = submit(prompt(5))
    p.tell(link, again, grants.grant(again))
    rest(p)
    arrived(d, key_of(again))


# ---- the cache is announced ----


def test_a_bootstrap_learns_what_is_cached(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = submit(prompt(30))
    p.tell(link, asked, grants.grant(asked))
    rest(p)
    known: set[bytes] = set()
    for delta in link.of(CacheDelta):
        known = (set() if delta.reset else known) - set(delta.removed) | set(delta.added)
    assert known == set(asked.task.page_keys)
    monkeypatch.setattr(announce, "KEYS_A_MESSAGE", 3)
    new, empty = RecordingLink(), RecordingLink()
    p.tell(new, LinkUp())
    deltas = new.of(CacheDelta)
    assert [len(delta.added) for delta in deltas] == [3, 3, 1]
    assert [delta.reset for delta in deltas] == [True, False, False]
    assert tuple(key for delta in deltas for key in delta.added) == asked.task.page_keys, "parents first"
    for i in range(4):  # fills the pool: what is oldest leaves, and both are told
        more = submit(prompt(30, 50 * i))
        p.tell(link, more, grants.grant(more))
        rest(p)
    for one in (link, new):
        known = set()
        for delta in one.of(CacheDelta):
            known = (set() if delta.reset else known) - set(delta.removed) | set(delta.added)
        assert known == set(p.engine._cache.keys())
        assert any(delta.removed for delta in one.of(CacheDelta))
    with prefill_engine(4, chunk_size=CHUNK) as fresh:
        fresh.tell(empty, LinkUp())
    assert empty.reports == [CacheDelta((), (), reset=True)], "an empty cache is said to be so"


# ---- the host tier ----

WITH_HOST = pytest.mark.parametrize("p", [64], indirect=True, ids=["host"])


def kept_away(p: Prefill) -> int:
    return p.stats.host_pages_cached  # type: ignore[no-any-return]


@WITH_HOST
def test_pages_come_back_from_the_host_and_the_answer_is_the_same(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages
) -> None:
    """Five prompts of 30 tokens, each with 7 whole pages, take turns in a pool of 24 pages."""
    prompts = [prompt(30, 50 * i) for i in range(5)]
    arrivals: list[list[bytes]] = []
    for token_ids in prompts * 2:
        asked = submit(token_ids)
        grant = grants.grant(asked)
        p.tell(link, asked, grant)
        rest(p)
        (token,) = link.tokens(key_of(asked))
        assert token.token_id == answer(token_ids)
        arrived(d, key_of(asked))
        arrivals.append([d.pool.pages[page].tobytes() for page in grant.pages[:7]])
    first, second = arrivals[:5], arrivals[5:]
    assert first == second, "what is sent from loaded pages is what was computed, byte by byte"
    found = [report.cached_tokens for output in link.outputs for report in output.admitted]
    assert found == [0] * 5 + [28] * 5
    assert p.stats.cached_tokens_total == 5 * 28
    assert p.stats.host_hit_tokens_total >= 3 * 28
    assert kept_away(p) > 0
    assert p.stats.host_pages_free + kept_away(p) == p.stats.host_pages_total == 64
    known: set[bytes] = set()
    for delta in link.of(CacheDelta):
        assert not delta.removed, "both tiers together have room for all"
        known |= set(delta.added)
    assert known == {key for token_ids in prompts for key in page_keys(token_ids, PAGE)}


@WITH_HOST
def test_loaded_pages_are_there_before_they_are_sent_or_computed_on(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        asked = submit(prompt(30, 50 * i))
        p.tell(link, asked, grants.grant(asked))
        rest(p)
    again = submit(prompt(30, 0))
    assert p.engine._cache.match(again.task.page_keys).host >= 0
    done: list[str] = []
    for owner, name in ((p.engine._copier, "execute"), (p.engine._sender, "send"), (p.device.runner, "forward")):
        plain = getattr(owner, name)

        def noted(*args: Any, plain: Callable[..., Any] = plain, name: str = name, **more: Any) -> Any:
            done.append(name)
            return plain(*args, **more)

        monkeypatch.setattr(owner, name, noted)
    p.tell(link, again, grants.grant(again))
    p.turn()
    assert done[:3] == ["execute", "send", "forward"]
    rest(p)


@WITH_HOST
def test_a_copy_that_fails_ends_the_engine(p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages) -> None:
    first = [submit(prompt(30, 50 * i)) for i in range(3)]
    for asked in first:
        p.tell(link, asked, grants.grant(asked))
        rest(p)
    p.engine._copier = TierCopier(p.device.pool, KVPool(p.device.layout, 1))  # it lacks the pages that are offloaded to
    link.outputs.clear()
    again = submit(prompt(30, 200))
    p.tell(link, again, grants.grant(again))
    while not p.incidents:
        p.turn()
    assert failed(link) == [(key_of(again), "prefilling", False)]
    assert not link.tokens(key_of(again))
    for count in range(2, FATAL_FAILURES + 1):
        p.turn()
        assert len(p.incidents) == count, "also where nothing is to be copied, so the engine gives up"
