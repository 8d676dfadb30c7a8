"""What passes leave behind: a journal of each request, kept small, and a file with a line a pass."""

from __future__ import annotations

import itertools
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.clock import ManualClock
from engine.core.errors import ConfigError
from engine.core.journal import ENDED_KEPT, PASSES_KEPT, ROOMS_TOLD, Considered, Refusal, RoomJournal, RoomRecord
from engine.core.lifetime import CHUNKS_KEPT, LifetimeEvent, Timeline
from engine.core.page_keys import page_keys
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import PrefillTask, RoomKey
from engine.device.page_allocator import PageAllocator
from prefill_service.journal import PassJournal, PassLog
from prefill_service.options import SchedulerConfig
from prefill_service.prefix_cache import PrefixCache
from prefill_service.records import PassRecord, PrefillBatch
from prefill_service.scheduler import Scheduler

PAGE = 4
PASS_S = 1.0


class Node:
    """A scheduler whose passes take a second each, and what is noted of them."""

    def __init__(self, num_pages: int = 16, log: PassLog | None = None, **config: Any):
        self.clock = ManualClock(100.0)
        self.journal = PassJournal(self.clock)
        self.records: list[PassRecord] = []
        self._log = log
        allocator = PageAllocator(num_pages)
        cache = PrefixCache(allocator)
        self.scheduler = Scheduler(SchedulerConfig(**config), cache, allocator, PAGE, self.clock, self._on_pass)
        self._firsts = itertools.count(0, 1000)

    def _on_pass(self, record: PassRecord) -> None:
        self.records.append(record)
        self.journal.on_pass(record)
        if self._log is not None:
            self._log.on_pass(record)

    def submit(self, name: str, length: int, shared: int = 0) -> RoomKey:
        """A request of `length` tokens, of which nobody else has all but the `shared` first ones. Granted at once."""
        first, key = next(self._firsts), RoomKey.new(0)
        tokens = (*range(10**6, 10**6 + shared), *range(first, first + length - shared))
        keys = page_keys(tokens, PAGE)
        task = PrefillTask(name, key, tokens, 0, keys, SamplingParams(), StoppingParams(8))
        request = self.scheduler.submit(task)
        self.journal.arrived(name, key, length, request.times)
        self.scheduler.grant(key)
        self.journal.waits(key)
        return key

    def turn(self) -> PrefillBatch | None:
        self.clock.advance(PASS_S)
        batch = self.scheduler.next_batch()
        if batch is not None:
            self.scheduler.complete_forward(batch)
        return batch

    def finish(self, key: RoomKey) -> None:
        self.scheduler.finish(key)
        self.journal.ended(key)

    def explain(self, name: str) -> RoomRecord:
        (record,) = self.journal.explain(name)
        return record


def spans(record: RoomRecord) -> list[tuple[int, int, int, int, str]]:
    return [(one.first_number, one.number, one.count, one.extend, one.refusal) for one in record.passes]


# ---- requests ----


def test_a_request_that_memory_is_too_short_for_tells_by_how_much_and_how_often() -> None:
    node = Node(num_pages=16)
    first = node.submit("first", 40)
    assert node.turn() is not None
    node.submit("second", 32)
    node.submit("third", 4)
    for _ in range(5):
        assert node.turn() is None
    node.finish(first)  # its pages stay cached, and can be evicted
    node.turn()

    record = node.explain("second")
    assert spans(record) == [(2, 6, 5, 0, "memory"), (7, 7, 1, 32, "")]
    refused, admitted = record.passes
    assert (refused.need, refused.left) == (32 + 1 + PAGE, 6 * PAGE)
    assert (refused.prefix, refused.wanted, refused.verdict) == (0, 32, "NO_TOKEN")
    assert refused.before == refused.after
    assert (refused.position, refused.waiting) == (1, 2)
    assert (refused.first_time, refused.time) == (PASS_S, 5 * PASS_S), "since it arrived"
    assert admitted.before.rem_input - admitted.after.rem_input == 32
    assert admitted.before.total - admitted.after.total == 32 + PAGE + 1
    assert not admitted.chunked
    assert record.not_reached == 0
    third = node.explain("third")
    assert third.not_reached == 5, "each of these passes ended before it"
    assert spans(third) == [(7, 7, 1, 4, "")]
    assert third.passes[0].position == 2
    node.submit("fourth", 4)
    node.turn()
    assert node.explain("second").not_reached == 0, "it waits no more"


def test_passes_that_never_reach_a_request_are_counted_while_it_lives_and_once_it_has_ended() -> None:
    node = Node(num_pages=16)
    node.submit("first", 40)
    node.turn()
    node.submit("second", 32)
    third = node.submit("third", 4)
    node.turn()
    node.turn()
    assert node.explain("third").not_reached == 2
    node.scheduler.abort(third)
    node.journal.failed(third, "aborted: client")
    node.journal.ended(third)
    node.turn()
    record = node.explain("third")
    assert (record.not_reached, record.passes, record.outcome) == (2, (), "aborted: client")


def test_passes_that_hold_a_request_back_for_another_reach_it() -> None:
    node = Node(num_pages=64, policy="lpm", dedup_cost_tokens=8, chunk_size=16)
    node.submit("leader", 40, shared=36)
    late = node.submit("late", 44, shared=36)
    for _ in range(2):
        assert node.turn() is not None
    assert (node.explain("late").deferred, node.explain("late").passes) == (2, ()), "the leader is being computed"
    node.turn()
    record = node.explain("late")
    assert (record.deferred, record.not_reached) == (2, 0)
    assert [(one.number, one.prefix) for one in record.passes] == [(3, 32)], "less is left to save than a forward costs"
    node.scheduler.abort(late)
    node.journal.ended(late)
    assert node.explain("late").deferred == 2


def test_a_long_prompt_shows_each_pass_and_each_chunk() -> None:
    node = Node(num_pages=32, chunk_size=16)
    key = node.submit("long", 40)
    while node.turn() is not None:
        pass
    node.finish(key)
    record = node.explain("long")
    assert spans(record) == [(1, 1, 1, 16, ""), (2, 2, 1, 16, ""), (3, 3, 1, 8, "")]
    assert [one.position for one in record.passes] == [1, None, None], "the rest of it goes ahead of the queue"
    assert [one.chunked for one in record.passes] == [True, True, False]
    assert [(one.prefix, one.wanted) for one in record.passes] == [(0, 40), (16, 24), (32, 8)]
    assert [(one.end, one.tokens, one.time) for one in record.chunks] == [(16, 16, 1.0), (32, 16, 2.0), (40, 8, 3.0)]
    assert [one.event for one in record.events] == ["arrived", "granted", "admitted", "last_write", "ended"]
    assert record.outcome == "finished"


@pytest.mark.parametrize(
    ("config", "lengths", "refusal"),
    [
        ({"max_batch_requests": 1}, (8, 8), Refusal.REQUESTS),
        ({"chunk_size": None, "max_prefill_tokens": 16}, (8, 12), Refusal.INPUT),
        ({"chunk_size": 16}, (13, 8), None),
        ({"chunk_size": 18}, (14, 8), Refusal.CHUNK),
        ({}, (20, 200), Refusal.MEMORY),
        ({"lookahead": 2}, (20, 200, 60), Refusal.SPARE),
    ],
)
def test_why_the_last_of_several_requests_is_refused(
    config: dict[str, Any], lengths: tuple[int, ...], refusal: Refusal | None
) -> None:
    node = Node(num_pages=56, **config)
    for number, length in enumerate(lengths):
        node.submit(str(number), length)
    node.turn()
    passes = node.explain(str(len(lengths) - 1)).passes
    assert [one.refusal for one in passes] == ([refusal] if refusal else [])
    memory = refusal in (Refusal.MEMORY, Refusal.SPARE)
    assert all((one.verdict == "NO_TOKEN") == memory for one in passes)


def test_a_request_tried_twice_in_one_pass_has_one_position_and_counts_one_pass() -> None:
    """As when others are preempted for it, and it does not fit all the same."""
    node = Node(num_pages=16)
    node.submit("first", 40)
    node.turn()
    node.submit("second", 32)
    node.submit("third", 4)
    node.turn()
    (attempt,) = node.records[-1].attempts
    twice = replace(node.records[-1], number=9, attempts=(attempt, attempt))
    assert [position for position, _ in twice.placed()] == [1, 1]
    node.journal.on_pass(twice)
    record = node.explain("second")
    assert [(one.first_number, one.number, one.count) for one in record.passes] == [(2, 9, 2)]
    assert record.not_reached == 6, "3 to 8, had there been any"
    assert node.explain("third").not_reached == 8


def _refusal(like: Considered, number: int, left: float = 3) -> Considered:
    return Considered(
        1, number, float(number), number, float(number), like.policy, like.in_effect, 1, 1, 0, 0, 8, 0, False,
        "NO_TOKEN", "memory", 12, left, like.before, like.before,
    )  # fmt: skip


def test_what_is_given_twice_is_shown_twice() -> None:
    """As after a retraction: only refusals are folded."""
    node = Node()
    key = node.submit("x", 8)
    node.turn()
    (given,) = node.explain("x").passes
    node.journal.considered(key, replace(given, number=2))
    assert [(one.number, one.count) for one in node.explain("x").passes] == [(1, 1), (2, 1)]


# ---- bounds ----


def arrived(journal: RoomJournal, name: str, clock: ManualClock) -> RoomKey:
    times, key = Timeline(clock), RoomKey.new(0)
    times.stamp(LifetimeEvent.ARRIVED)
    journal.arrived(name, key, 8, times)
    return key


def test_of_many_ended_requests_the_oldest_is_forgotten_and_no_live_one() -> None:
    clock = ManualClock()
    journal = RoomJournal(clock)
    arrived(journal, "live", clock)
    for number in range(ENDED_KEPT + 1):
        journal.ended(arrived(journal, f"r{number}", clock))
    assert journal.explain("r0") == ()
    assert journal.explain("r1")[0].outcome == "finished"
    assert journal.explain("live")[0].outcome == ""
    assert journal.explain("nobody") == ()


def test_every_attempt_at_a_request_is_told_oldest_first_up_to_a_bound() -> None:
    clock = ManualClock()
    journal = RoomJournal(clock)
    keys = []
    for _ in range(ROOMS_TOLD + 2):
        keys.append(arrived(journal, "again", clock))
        clock.advance(1.0)
        journal.failed(keys[-1], "failed while prefilling: no luck")
        journal.failed(keys[-1], "aborted: it failed")
        journal.ended(keys[-1])
    told = journal.explain("again")
    assert [record.key for record in told] == keys[2:]
    assert {record.outcome for record in told} == {"failed while prefilling: no luck"}


def test_of_very_many_different_passes_the_oldest_and_the_newest_are_kept_and_the_others_counted() -> None:
    node = Node()
    key = node.submit("x", 8)
    node.turn()
    (first,) = node.explain("x").passes
    for number in range(2, 2 * PASSES_KEPT + 1):
        node.journal.considered(key, _refusal(first, number, left=number))
    record = node.explain("x")
    assert len(record.passes) == PASSES_KEPT
    assert record.left_out == PASSES_KEPT
    assert record.passes[0] == first
    assert record.passes[-1].number == 2 * PASSES_KEPT
    assert sum(one.count for one in record.passes) + record.left_out == 2 * PASSES_KEPT


def test_of_very_many_chunks_the_first_and_the_last_are_kept() -> None:
    times = Timeline(ManualClock())
    for number in range(1, CHUNKS_KEPT + 9):
        times.chunk_done(number * PAGE, PAGE)
    assert len(times.chunks) == CHUNKS_KEPT
    assert [times.chunks[0].end, times.chunks[-1].end] == [PAGE, (CHUNKS_KEPT + 8) * PAGE]


# ---- the file ----


def test_every_pass_is_a_line_of_json_with_all_that_it_saw(tmp_path: Path) -> None:
    path = tmp_path / "passes.jsonl"
    path.write_text('{"older": true}\n')
    log = PassLog(path, "prefill-0")
    node = Node(num_pages=16, log=log, policy="lpm", chunk_size=16)
    key = node.submit("first", 36)
    node.submit("second", 4)
    for _ in range(4):
        node.turn()
    log.close()
    log.close()
    older, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert older == {"older": True}
    assert [line["number"] for line in lines] == [1, 2, 3]
    first, second, third = lines
    assert {name: value for name, value in first.items() if name not in ("attempts", "unix")} == {
        "node": "prefill-0", "time": 101.0, "number": 1, "policy": "lpm", "in_effect": "lpm", "bootstrap": 0,
        "waiting": 2, "in_flight": 0, "batch_tokens": 16, "cached_tokens": 0,
    }  # fmt: skip
    (attempt,) = first["attempts"]
    assert attempt == {
        "request_id": "first", "room": str(key), "position": 1, "prefix": 0, "loaded": 0, "wanted": 36,
        "extend": 16, "chunked": True, "verdict": "OTHER", "refusal": None, "need": 36 + 1 + PAGE, "left": 64,
        "before": {"rem_input": 16384, "rem_chunk": 16, "total": 64, "current": 64},
        "after": {"rem_input": 16368, "rem_chunk": 0, "total": 44, "current": 44},
    }  # fmt: skip
    assert [one["position"] for one in second["attempts"]] == [None]
    assert [(one["request_id"], one["position"]) for one in third["attempts"]] == [("first", None), ("second", 1)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(num_pages=32, log=PassLog(Path("/dev/full"), "prefill-0"), chunk_size=16)
    node.submit("long", 40)
    with caplog.at_level(logging.ERROR, logger="kvrelay.prefill"):
        while node.turn() is not None:
            pass
    assert [record.message for record in caplog.records] == ["passes are logged no more"]
    assert len(node.explain("long").chunks) == 3


def test_a_file_that_cannot_be_written_is_an_error_of_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^log_passes: cannot write .*: Is a directory"):
        PassLog(tmp_path, "prefill-0")
    with pytest.raises(ConfigError, match="No such file or directory"):
        PassLog(tmp_path / "none" / "passes.jsonl", "prefill-0")


def test_a_pipe_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / "passes"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"^log_passes: cannot write .*: No such device or address"):
        PassLog(pipe, "prefill-0")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        node = Node(num_pages=32, log=PassLog(pipe, "prefill-0"), chunk_size=16)
        while not caplog.records:  # nobody reads, so the pipe is full sooner or later
            node.submit("one", 40)
            while node.turn() is not None:
                pass
        assert [record.message for record in caplog.records] == ["passes are logged no more"]
        assert os.read(reader, 1 << 20).startswith(b'{"node":"prefill-0","number":1,')
    finally:
        os.close(reader)
