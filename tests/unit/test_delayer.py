from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from engine.core.clock import ManualClock
from prefill_service.config import RankConfig
from prefill_service.delayer import DELAY_SHARE, QUEUE_WAIT_S, RATE_WINDOW_S, Decision, Delayer, Reason, Row, Status
from tests.helpers.golden import Json, cases

READY, NOTHING = Row(prefillable=True, running=4, max_prefill_batch=4, queue=1), Row()


def golden_row(values: list[int]) -> Row:
    prefillable, forced, running, batch, queue, timed_out = values
    return Row(bool(prefillable), bool(forced), running, batch, queue, waited=QUEUE_WAIT_S * timed_out)


@pytest.mark.parametrize(("args", "want"), cases("delay"))
def test_golden(args: Json, want: list[Json]) -> None:
    # token_usage_low_watermark and prefill_max_requests are already in the rows: watermark forced, max prefill batch.
    config = RankConfig(max_delay_passes=args["max_delay_passes"], delay_queue_ratio=args["queue_min_ratio"])
    delayer = Delayer(config, ttft_target=2.0)
    answers = [
        delayer.decide([golden_row(row) for row in one["rows"]], one["max_running_requests"]) for one in args["passes"]
    ]
    assert [asdict(answer) for answer in answers] == want


def test_no_golden_case_is_left_out() -> None:
    assert len(cases("delay")) == 50


def test_by_default_a_lone_rank_with_work_waits_29_passes_for_the_others() -> None:
    delayer = Delayer(RankConfig(), 2.0)
    answers = [delayer.decide([READY, NOTHING], None) for _ in range(31)]
    assert [answer.allow for answer in answers] == [False] * 29 + [True, False]
    assert answers[29].reason is Reason.WAIT_TIMEOUT


def test_by_default_ranks_that_all_have_work_do_not_wait() -> None:
    delayer = Delayer(RankConfig(), 2.0)
    assert all(delayer.decide([READY, READY], None).reason is Reason.NO_WAIT for _ in range(3))


def test_one_pass_means_never() -> None:
    assert Delayer(RankConfig(max_delay_passes=1), 2.0).decide([READY, NOTHING], None).allow


@pytest.mark.parametrize(("waited", "held_back"), [(QUEUE_WAIT_S - 0.1, True), (QUEUE_WAIT_S, False)])
def test_a_request_that_has_waited_long_is_not_kept_for_a_fuller_queue(waited: float, held_back: bool) -> None:
    delayer = Delayer(RankConfig(delay_queue_ratio=0.5), 2.0)
    delayer.decide([READY], None)  # the first reason to wait never counts
    assert delayer.decide([Row(True, False, 4, 4, 1, waited)], None).allow is not held_back


# ---- self-set bounds ----

TARGET = 2.0
LONGEST = DELAY_SHARE * TARGET
PATIENT = Row(prefillable=True, running=8, max_prefill_batch=8, queue=2)


class SelfSet:
    """A delayer that has seen `rate` arrivals a second for long enough to know."""

    def __init__(self, rate: int, **options: Any):
        self.clock = ManualClock()
        self.delayer = Delayer(RankConfig(delay_self_set=True, max_delay_passes=1, **options), TARGET, self.clock)
        self.arrived = 0
        for _ in range(1000):
            self.clock.advance(1.0 / rate)
            self.arrived += 1
            self.ask(NOTHING)

    def ask(self, *rows: Row, max_running: int | None = None) -> Decision:
        return self.delayer.decide([replace(rows[0], arrived=self.arrived), *rows[1:]], max_running)


def test_ranks_wait_for_others_only_while_so_many_are_expected_in_time() -> None:
    # 20 a second and 0.2 s to spend: 3 more requests come in time, 5 do not. The rate is known to some percent.
    node = SelfSet(20)
    assert not node.ask(READY, *[NOTHING] * 3).allow
    answer = node.ask(READY, *[NOTHING] * 5)
    assert (answer.allow, answer.reason, answer.status) == (True, Reason.WAIT_TIMEOUT, Status.MIXED)


def test_what_has_been_waited_counts_and_passes_do_not() -> None:
    node = SelfSet(20)
    for _ in range(100):
        assert not node.ask(READY, NOTHING).allow
    assert not node.ask(replace(READY, waited=LONGEST - 0.08), NOTHING).allow
    assert node.ask(replace(READY, waited=LONGEST - 0.02), NOTHING).allow


def test_queues_are_filled_only_as_far_as_requests_come_in_time() -> None:
    # Half of the 8 that run would be 4 in the queue.
    for rate, held_back in ((20, True), (5, False)):
        node = SelfSet(rate, delay_queue_ratio=0.5)
        node.ask(PATIENT, PATIENT)  # the first reason to wait never counts
        assert node.ask(PATIENT, PATIENT).allow is not held_back, f"2 are missing, and {rate} come in a second"


def test_for_places_the_wait_so_far_counts_alone() -> None:
    node = SelfSet(1)
    node.ask(PATIENT, PATIENT, max_running=10)
    assert not node.ask(PATIENT, replace(PATIENT, waited=LONGEST), max_running=10).allow
    assert node.ask(PATIENT, replace(PATIENT, waited=LONGEST + 0.01), max_running=10).allow


def test_where_nothing_arrives_nobody_waits() -> None:
    node = SelfSet(20)
    assert not node.ask(READY, NOTHING).allow
    node.clock.advance(10 * RATE_WINDOW_S)
    assert node.ask(READY, NOTHING).allow


def test_the_requests_of_a_rank_that_has_left_are_not_missed() -> None:
    node = SelfSet(20)
    node.arrived //= 2
    assert not node.ask(READY, NOTHING).allow
    assert node.delayer.decide([READY, NOTHING], None).delayed == 2
