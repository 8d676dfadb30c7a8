"""The benchmarks run, and the replay they rest on does what a node would do."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import cache_order, scheduler
from benchmarks.replay import CostModel, replay
from benchmarks.workloads import burst, read_trace
from prefill_service.options import SchedulerConfig
from prefill_service.policy import Policy

PAGE = 16
COST = CostModel(fixed=0.5, per_token=0.01, per_pair=0.0, token_bytes=1, link_bytes=1e9, source="made up")


def test_the_scheduler_benchmark_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "AT", 64)
    monkeypatch.setattr(scheduler, "QUICK", scheduler.Sizes((32, 64), (1_000,), (32,), 1))
    scheduler.main(["--quick"])
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n{policy} ") == 4 for policy in Policy)  # three states of a sort, one size of a pass


def test_the_order_benchmark_runs_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cache_order.main(["--quick", "--requests", "20", "--processes", "1", "--pictures", str(tmp_path)])
    printed = capsys.readouterr().out
    assert all(f"\n| {policy} " in printed for policy in Policy)
    pictures = sorted(tmp_path.iterdir())
    assert len(pictures) == 3
    for picture in pictures:
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_replay_computes_and_waits_as_its_costs_say() -> None:
    outcome = replay(burst(2, 64, 16, PAGE), SchedulerConfig(chunk_size=80), 64, PAGE, COST)
    assert outcome.computed_tokens == 80 + 16
    first = outcome.ttft[0]
    assert first == pytest.approx(0.02 + 0.5 + 0.8)  # the grant, one forward of 80 tokens
    assert outcome.ttft[1] == pytest.approx(first + 0.5 + 0.16)
    assert outcome.waits == pytest.approx((0.0, 1.3))


def test_the_ideal_of_a_trace_is_what_a_pool_that_holds_all_of_it_reaches() -> None:
    trace = read_trace(cache_order.TRACE, 60)
    arrivals = trace.arrivals(COST, load=0.5, chunk=2048, turns=True)
    outcome = replay(arrivals, SchedulerConfig(), 2 * trace.distinct_pages, 512, COST)
    assert outcome.hit_rate == pytest.approx(trace.ideal_hit_rate)
