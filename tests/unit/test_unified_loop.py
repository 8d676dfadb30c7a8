"""The unified engine with a real device: prompts and answers in one loop, and what happens when memory is short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from engine.core.messages import (
    Abort,
    CacheDelta,
    Command,
    Granted,
    LinkLost,
    LinkUp,
    RoomFailed,
    Submit,
)
from engine.core.page_keys import page_keys
from engine.core.sampling import FinishReason, SamplingParams, StoppingParams
from engine.core.types import NodeIdentity, PrefillTask, RoomKey
from engine.device.batch import ForwardBatch
from prefill_service.options import SchedulerConfig
from tests.helpers.engines import PAGE, DrivenAlone, unified_engine
from tests.helpers.models import prepared_tiny
from tests.helpers.reference import greedy
from tests.helpers.tiny_engine import RecordingLink
from unified_service.config import UnifiedConfig, UnifiedOptions
from unified_service.loop import UnifiedEngine

CHUNK = 16
GREEDY = SamplingParams(temperature=0)
Unified = DrivenAlone[UnifiedEngine]


@contextmanager
def node(
    num_pages: int = 64, *, max_running: int = 8, mixed_chunk: bool = True, eager: bool = False, **scheduler: Any
) -> Iterator[Unified]:
    """eager: admits as if answers ended at once, so that memory runs out while it decodes."""
    config = SchedulerConfig(**({"chunk_size": CHUNK} | scheduler))
    options = UnifiedOptions(max_running, mixed_chunk, schedule_conservativeness=0.0 if eager else 1.0)
    with unified_engine(num_pages, scheduler=config, options=options) as engine:
        yield engine


def link_to(u: Unified) -> RecordingLink:
    link = RecordingLink()
    u.tell(link, LinkUp())
    link.reports.clear()
    return link


def prompt(length: int, first: int = 10) -> tuple[int, ...]:
    return tuple(3 + (first + 7 * i) % 250 for i in range(length))


def submit(
    token_ids: Sequence[int],
    max_new: int = 8,
    *,
    first_index: int = 0,
    priority: int | None = None,
    sampling: SamplingParams = GREEDY,
    **stopping: Any,
) -> Submit:
    key, ids = RoomKey.new(0), tuple(token_ids)
    stop = StoppingParams(max_new, **({"ignore_eos": True} | stopping))
    return Submit(PrefillTask(f"r{key}", key, ids, first_index, page_keys(ids, PAGE), sampling, stop, priority))


def key_of(asked: Submit) -> RoomKey:
    return asked.task.key


def tokens(link: RecordingLink, asked: Submit) -> list[int]:
    """Ids in order. Every index came once."""
    made = link.tokens(key_of(asked))
    start = asked.task.first_index
    assert [token.index for token in made] == list(range(start, start + len(made)))
    return [token.token_id for token in made]


def rest(u: Unified) -> None:
    u.until(lambda: u.stats.idle and not u.turn(), "the node is at rest")
    stats = u.stats
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def expected(asked: Submit) -> list[int]:
    stopping, start = asked.task.stopping, asked.task.first_index
    return greedy(prepared_tiny().path, asked.task.token_ids, stopping.max_new_tokens - start)


def admitted(link: RecordingLink) -> list[tuple[RoomKey, int]]:
    return [(report.key, report.cached_tokens) for output in link.outputs for report in output.admitted]


def gave_way(u: Unified, asked: Submit) -> list[str]:
    """What the journal says of giving pages up and having some again."""
    (record,) = u.engine.journal.explain(asked.task.request_id)
    return [one.event for one in record.events if one.event in ("retracted", "preempted", "resumed")]


def failed(link: RecordingLink) -> list[tuple[RoomKey, str, bool, str]]:
    return [(report.key, report.phase, report.retriable, report.code) for report in link.of(RoomFailed)]


class Forwards:
    """Tokens of each row of every forward."""

    def __init__(self, u: Unified, monkeypatch: pytest.MonkeyPatch):
        self.rows: list[list[int]] = []
        self.fail = False
        inner = u.device.runner.forward

        def forward(batch: ForwardBatch) -> Tensor:
            self.rows.append(batch.query_starts.diff().tolist())
            if self.fail:
                raise RuntimeError("no forward")
            return inner(batch)

        monkeypatch.setattr(u.device.runner, "forward", forward)


# ---- the usual way ----


def test_a_request_is_read_and_answered() -> None:
    with node() as u:
        link = link_to(u)
        asked = submit(prompt(37), max_new=9)
        u.tell(link, asked)
        assert (u.stats.waiting, u.stats.running) == (1, 0)
        rest(u)
    assert tokens(link, asked) == expected(asked)
    finishes = [token.finish for token in link.tokens(key_of(asked))]
    assert finishes == [None] * 8 + [FinishReason.LENGTH]
    assert admitted(link) == [(key_of(asked), 0)]
    (report,) = [report for output in link.outputs for report in output.prefilled]
    assert (report.key, report.chunks) == (key_of(asked), 3)
    assert report.prefill > 0
    assert u.stats.output_tokens_total == 9
    assert link.reports[-1] == CacheDelta(page_keys(asked.task.token_ids + tuple(tokens(link, asked)), PAGE)[9:11], ())


@pytest.mark.parametrize("mixed_chunk", [True, False], ids=["mixed", "apart"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no cache"])
def test_a_crowd_gets_the_answers_each_would_get_alone(mixed_chunk: bool, prefix_cache: bool) -> None:
    crowd = [submit(prompt(5 + 9 * i, first=i % 3), max_new=3 + i) for i in range(8)]
    with node(128, mixed_chunk=mixed_chunk, prefix_cache=prefix_cache) as u:
        link = link_to(u)
        for asked in crowd:
            u.tell(link, asked)
            u.turn()
        rest(u)
        assert u.stats.pages_cached == 0 or prefix_cache
    assert [tokens(link, asked) for asked in crowd] == [expected(asked) for asked in crowd]


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer_cached() -> None:
    with node() as u:
        link = link_to(u)
        first = submit(prompt(18), max_new=12)
        u.tell(link, first)
        rest(u)
        second = submit([*first.task.token_ids, *tokens(link, first), *prompt(6, first=99)])
        u.tell(link, second)
        rest(u)
    # 18 + 12 tokens, of which the last one was never computed: 7 whole pages.
    assert admitted(link)[-1] == (key_of(second), 28)
    assert tokens(link, second) == expected(second)


def test_prompts_and_answers_share_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    with node() as u:
        link, forwards = link_to(u), Forwards(u, monkeypatch)
        u.tell(link, submit(prompt(4), max_new=6), submit(prompt(7, first=50), max_new=6))
        u.turn()
        u.tell(link, submit(prompt(30, first=90), max_new=2))
        rest(u)
    # Two decode rows leave 14 of 16 tokens, and a chunk ends on a page boundary.
    assert forwards.rows[:5] == [[4, 7], [12, 1, 1], [12, 1, 1], [6, 1, 1], [1, 1, 1]]


def test_without_mixing_prompts_go_first_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with node(mixed_chunk=False) as u:
        link, forwards = link_to(u), Forwards(u, monkeypatch)
        u.tell(link, submit(prompt(4), max_new=3))
        u.turn()
        u.tell(link, submit(prompt(30, first=90), max_new=2))
        rest(u)
    assert forwards.rows == [[4], [16], [14], [1, 1], [1]]


def test_without_chunks_nothing_is_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    with node(chunk_size=None) as u:
        link, forwards = link_to(u), Forwards(u, monkeypatch)
        u.tell(link, submit(prompt(4), max_new=3))
        u.turn()
        u.tell(link, submit(prompt(30, first=90), max_new=2))
        rest(u)
    assert forwards.rows == [[4], [30], [1, 1], [1]]


def test_no_more_run_at_once_than_may() -> None:
    crowd = [submit(prompt(20, first=20 * i), max_new=5) for i in range(5)]
    with node(max_running=2) as u:
        link = link_to(u)
        u.tell(link, *crowd)
        most = 0
        while u.turn():
            most = max(most, u.stats.running)
        rest(u)
    assert most == 2
    assert [key for key, _ in admitted(link)] == [key_of(asked) for asked in crowd]


def test_an_attempt_goes_on_where_the_last_one_ended() -> None:
    with node() as u:
        link = link_to(u)
        whole = submit(prompt(9), max_new=10)
        rest_of_it = submit([*whole.task.token_ids, *expected(whole)[:4]], max_new=10, first_index=4)
        u.tell(link, rest_of_it)
        rest(u)
    assert tokens(link, rest_of_it) == expected(whole)[4:]


def test_penalties_count_what_was_said_before() -> None:
    penalty = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=1.0)
    alike, unlike = submit(prompt(9), max_new=24), submit(prompt(9), max_new=24, sampling=penalty)
    with node() as u:
        link = link_to(u)
        u.tell(link, alike, unlike)
        rest(u)
    assert len(set(tokens(link, unlike))) > len(set(tokens(link, alike)))


def test_a_stop_token_ends_the_answer_and_is_named() -> None:
    free = expected(submit(prompt(33), max_new=12))
    at = next(i for i in range(1, 12) if free[i] not in free[:i])
    with node() as u:
        link = link_to(u)
        asked = submit(prompt(33), max_new=12, stop_token_ids=(free[at],))
        at_once = submit(prompt(33), max_new=12, stop_token_ids=(free[0],))
        u.tell(link, asked, at_once)
        rest(u)
    assert tokens(link, asked) == free[: at + 1]
    last = link.tokens(key_of(asked))[-1]
    assert (last.finish, last.matched_token) == (FinishReason.STOP, free[at])
    assert tokens(link, at_once) == free[:1]


def test_each_link_hears_of_its_own_rooms() -> None:
    with node() as u:
        here, there = link_to(u), link_to(u)
        mine, theirs = submit(prompt(9)), submit(prompt(9, first=70))
        u.tell(here, mine)
        u.tell(there, theirs)
        rest(u)
    for link, asked in ((here, mine), (there, theirs)):
        assert {token.key for output in link.outputs for token in output.tokens} == {key_of(asked)}
        assert [key for key, _ in admitted(link)] == [key_of(asked)]
    assert here.of(CacheDelta) == there.of(CacheDelta)


# ---- memory is short ----


def test_when_pages_run_out_the_one_with_the_shortest_answer_waits_again() -> None:
    """Two that fit when they are read and not when they are answered: the later one makes way, and nothing shows."""
    old = submit(prompt(16), max_new=40, ignore_eos=False)
    young = submit(prompt(8, first=60), max_new=28, ignore_eos=False)
    with node(16, eager=True) as u:
        link = link_to(u)
        u.tell(link, old)
        u.turn()
        u.tell(link, young)
        u.until(lambda: bool(link.tokens(key_of(young))) and u.stats.waiting == 1, "one is retracted")
        (waiting,) = [r for r in u.engine._rooms.values() if not r.decoding]
        assert waiting.key == key_of(young)
        assert u.engine._ratio.value > 0.3, "and more is set aside from now on"
        rest(u)
    assert failed(link) == []
    assert tokens(link, old) == expected(old)
    assert tokens(link, young) == expected(young)
    assert len(admitted(link)) == 2, "the front door hears of the first time only"
    assert (gave_way(u, old), gave_way(u, young)) == ([], ["retracted", "resumed"])


def test_a_crowd_in_a_tiny_pool_is_answered_one_way_or_the_other() -> None:
    crowd = [submit(prompt(6 + i, first=17 * i), max_new=24, ignore_eos=False) for i in range(9)]
    penalty = SamplingParams(temperature=0, repetition_penalty=1.3)
    crowd += [submit(prompt(11, first=200 + i), max_new=24, ignore_eos=False, sampling=penalty) for i in range(2)]
    with node(512) as u:
        roomy = link_to(u)
        u.tell(roomy, *crowd)
        rest(u)
    with node(14, eager=True) as u:
        link = link_to(u)
        u.tell(link, *crowd)
        rest(u)
        explained = [record for asked in crowd for record in u.engine.journal.explain(asked.task.request_id)]
    assert [tokens(link, asked) for asked in crowd] == [tokens(roomy, asked) for asked in crowd]
    assert failed(link) == []
    assert any(len(record.chunks) > 1 for record in explained), "some were retracted"


def test_a_prompt_that_is_half_read_gives_way_before_any_answer() -> None:
    answering, reading = submit(prompt(6), max_new=40, ignore_eos=False), submit(prompt(48, first=80), max_new=2)
    with node(16, eager=True, chunk_size=8, max_running=2) as u:
        link = link_to(u)
        u.tell(link, answering)
        u.turn()
        u.tell(link, reading)
        u.until(lambda: u.stats.waiting == 1 and len(admitted(link)) == 2, "the prompt is put back")
        assert not link.tokens(key_of(reading)), "before it was read"
        rest(u)
    assert failed(link) == []
    assert tokens(link, answering) == expected(answering)
    assert tokens(link, reading) == expected(reading)


def test_priorities_choose_who_is_retracted() -> None:
    low, high = (submit(prompt(8, first=60 * i), max_new=28, priority=i, ignore_eos=False) for i in (0, 1))
    with node(16, eager=True, priority_scheduling=True) as u:
        link = link_to(u)
        u.tell(link, low)
        u.turn()
        u.tell(link, high)
        u.until(lambda: bool(link.tokens(key_of(high))) and u.stats.waiting == 1, "one is retracted")
        (waiting,) = [r for r in u.engine._rooms.values() if not r.decoding]
        assert waiting.key == key_of(low), "though it has generated more"
        rest(u)
    assert [tokens(link, one) for one in (low, high)] == [expected(one) for one in (low, high)]


def test_a_request_of_much_higher_priority_takes_the_place_of_another() -> None:
    low, high = submit(prompt(12), max_new=20, priority=0), submit(prompt(12, first=60), max_new=4, priority=50)
    with node(max_running=1, priority_scheduling=True) as u:
        link = link_to(u)
        u.tell(link, low)
        for _ in range(5):
            u.turn()
        u.tell(link, high)
        u.turn()
        assert [room.key for room in u.engine._rooms.values() if room.decoding] == [key_of(high)]
        rest(u)
    assert tokens(link, low) == expected(low)
    assert gave_way(u, low) == ["preempted", "resumed"]
    assert tokens(link, high) == expected(high)
    order = [token.key for output in link.outputs for token in output.tokens]
    assert order.index(key_of(high)) < len(order) - 1 - order[::-1].index(key_of(low))


def test_the_last_one_ends_with_the_limit_when_the_node_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission counts 4096 tokens of an answer at most; here it counts 8, so that more than fits is let in."""
    for module in ("engine.core.room_budget", "prefill_service.adder"):
        monkeypatch.setattr(f"{module}.CLIP_NEW_TOKENS", 8)
    with node(8) as u:
        link = link_to(u)
        asked = submit(prompt(10), max_new=60)
        u.tell(link, asked)
        rest(u)
    assert failed(link) == [(key_of(asked), "decoding", False, "RESOURCE_EXHAUSTED")]
    assert link.of(RoomFailed)[0].reason == "out of pages: this node has 8 pages of 4 tokens"
    # 32 tokens have a page, and what follows the last of them is known as well.
    assert tokens(link, asked) == expected(asked)[:23]


def test_an_answer_that_has_begun_goes_on_as_far_as_it_can() -> None:
    """Elsewhere there was room for all of it, here there is not."""
    with node(16) as u:
        link = link_to(u)
        asked = submit(prompt(30), max_new=500, first_index=10)
        u.tell(link, asked)
        rest(u)
    assert failed(link) == [(key_of(asked), "decoding", False, "RESOURCE_EXHAUSTED")]
    assert len(tokens(link, asked)) == 64 - 30 + 1


def test_what_can_never_fit_is_refused_with_the_limit() -> None:
    with node(16) as u:
        link = link_to(u)
        fits, long_answer, long_prompt = submit(prompt(20), 39), submit(prompt(20), 40), submit(prompt(60), 1)
        u.tell(link, fits, long_answer, long_prompt)
        rest(u)
    assert len(tokens(link, fits)) == 39
    assert failed(link) == [(key_of(one), "queued", False, "INVALID_ARGUMENT") for one in (long_answer, long_prompt)]
    assert "at most 39 after 20 prompt tokens" in link.of(RoomFailed)[0].reason


# ---- ends that others bring about ----


@pytest.mark.parametrize("when", ["waiting", "half read", "decoding"])
@pytest.mark.parametrize("ending", ["abort", "link lost"])
def test_a_room_may_be_ended_at_any_time(when: str, ending: str) -> None:
    with node(max_running=2) as u:
        link, other_link = link_to(u), link_to(u)
        ahead = [submit(prompt(9, first=100 * i), max_new=20) for i in range(2 if when == "waiting" else 1)]
        u.tell(other_link, *ahead)
        u.turn()
        asked = submit(prompt(60), max_new=20)
        u.tell(link, asked)
        u.turn()
        if when == "decoding":
            u.until(lambda: bool(link.tokens(key_of(asked))), "it decodes")
        said, running = len(link.outputs), u.stats.running
        commands: list[Command | LinkLost] = [Abort(key_of(asked), "x"), Abort(key_of(asked), "again")]
        u.tell(link, *(commands if ending == "abort" else [LinkLost()]))
        assert (running, u.stats.running) == (2, len(ahead))
        rest(u)
        assert len(link.outputs) == said
    assert [tokens(other_link, one) for one in ahead] == [expected(one) for one in ahead]


def test_a_forward_that_fails_costs_what_was_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with node(max_running=2) as u:
        link, forwards = link_to(u), Forwards(u, monkeypatch)
        decoding, reading, waiting = submit(prompt(9)), submit(prompt(60, first=40)), submit(prompt(8, first=90))
        u.tell(link, decoding)
        u.turn()
        u.tell(link, reading, waiting)
        u.turn()
        forwards.fail = True
        u.turn()
        forwards.fail = False
        rest(u)
    assert {(key, phase) for key, phase, _, _ in failed(link)} == {
        (key_of(decoding), "decoding"),
        (key_of(reading), "prefilling"),
    }
    assert link.of(RoomFailed)[0].reason == f"internal error, incident {u.incidents[0]}"
    assert tokens(link, waiting) == expected(waiting)


def test_a_room_is_not_taken_in_twice() -> None:
    with node() as u:
        link = link_to(u)
        asked = submit(prompt(9))
        u.tell(link, asked, asked)
        rest(u)
        u.tell(link, asked)
        rest(u)
    assert failed(link) == []
    assert tokens(link, asked) == expected(asked)


def test_commands_for_another_kind_of_node_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with node() as u:
        link = link_to(u)
        u.tell(link, Granted(RoomKey.new(0), NodeIdentity("d", "1"), (1,)))
    assert [record.message for record in caplog.records] == ["not for a unified node"]


@pytest.mark.parametrize(("chunk", "fine"), [(None, True), (79, False), (80, True)])
def test_a_chunk_has_room_for_a_page_beside_all_that_decodes(chunk: int | None, fine: bool) -> None:
    config = UnifiedConfig(scheduler=SchedulerConfig(chunk_size=chunk))
    assert (not list(config.problems())) == fine
