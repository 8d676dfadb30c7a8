"""How long a request may wait, on the real scheduler with forwards that succeed at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_service.policy import Policy
from prefill_service.request import PrefillRequest, RequestState
from tests.helpers.scheduling import PAGE, Node, task

LONGEST = 24  # tokens

# Prompts of one stem match each other; their last tokens nobody else has. Before each pass some arrive.
PROMPTS = st.tuples(st.integers(0, 2), st.sampled_from([0, 4, 9, 16]), st.integers(1, LONGEST - 16))
STEPS = st.lists(st.tuples(st.lists(PROMPTS, max_size=3), st.booleans()), min_size=10, max_size=40)
_fresh = itertools.count(10_000)


def prompt(stem: int, shared: int, own: int) -> list[int]:
    return [1000 * stem + i for i in range(shared)] + [next(_fresh) for _ in range(own)]


class Queue:
    """A node and, in order of arrival, those that wait on it."""

    def __init__(self, **config: object):
        self.node = Node(**config)  # type: ignore[arg-type]
        self.waiting: list[PrefillRequest] = []
        self.computed: list[PrefillRequest] = []

    def arrive(self, tokens: list[int]) -> PrefillRequest:
        request = self.node.scheduler.submit(task(tokens))
        self.node.scheduler.grant(request.key)
        self.waiting.append(request)
        return request

    def forward(self) -> Iterator[PrefillRequest]:
        """Run a pass; those it admits, in order, each while it and those behind it still wait."""
        batch = self.node.scheduler.next_batch()
        if batch is None:
            return
        for row in batch.rows:
            if row.admitted:
                yield row.request
                self.waiting.remove(row.request)
            if row.is_last:
                self.computed.append(row.request)
        self.node.scheduler.complete_forward(batch)
        self.node.scheduler.check_integrity()

    def release(self) -> None:
        """Their pages are needed no longer."""
        for request in self.computed:
            self.node.scheduler.finish(request.key)
        self.computed.clear()


@settings(max_examples=300, deadline=None)
@given(
    steps=STEPS,
    credit=st.sampled_from([0.25, 1.0, 4.0]),
    chunk_size=st.sampled_from([None, 4, 8, 40]),
    most=st.sampled_from([None, 1, 1, 2]),
    pages=st.sampled_from([9, 30, 400]),
    weighed=st.booleans(),
    shared=st.sampled_from([4, 9]),
)
def test_nobody_goes_before_one_that_arrived_long_before(
    steps: list[tuple[list[tuple[int, int, int]], bool]],
    credit: float,
    chunk_size: int | None,
    most: int | None,
    pages: int,
    weighed: bool,
    shared: int,
) -> None:
    queue = Queue(
        num_pages=pages,
        policy=Policy.LPM_AGED,
        age_credit=credit,
        chunk_size=chunk_size,
        max_batch_requests=most,
        dedup_weighed=weighed,
        dedup_cost_tokens=PAGE,
        dedup_shared_tokens=shared,
    )

    def run_pass() -> None:
        for admitted in queue.forward():
            for other in queue.waiting:
                assert admitted.arrival_tokens - other.arrival_tokens <= LONGEST / credit

    for arrivals, release in steps:
        for arrival in arrivals:
            queue.arrive(prompt(*arrival))
        run_pass()
        if release:
            queue.release()
    while queue.waiting or queue.node.scheduler.stats().running:
        before = queue.node.scheduler.stats().computed_tokens_total, len(queue.computed)
        run_pass()
        queue.release()
        assert before != (queue.node.scheduler.stats().computed_tokens_total, 0), "nothing runs, and nothing is held"


def passed_by(queue: Queue, victim: list[int], newcomer: list[int], passes: int) -> int | None:
    """A newcomer arrives before each pass. Tokens computed until the victim is admitted; None: it still waits."""
    for _ in queue.forward():
        pass
    queue.release()
    waits = queue.arrive(victim)
    before = queue.node.scheduler.stats().computed_tokens_total
    for _ in range(passes):
        queue.arrive([*newcomer, next(_fresh)])
        for _ in queue.forward():
            pass
        queue.release()
        if waits.state is not RequestState.WAITING:
            return queue.node.scheduler.stats().computed_tokens_total - before
    return None


STEM = [*range(16)]


@pytest.mark.parametrize("policy", [Policy.LPM, Policy.LPM_AGED])
@pytest.mark.parametrize("weighed", [False, True])
def test_newcomers_that_match_starve_others_under_lpm_but_not_under_lpm_aged(policy: Policy, weighed: bool) -> None:
    queue = Queue(num_pages=400, policy=policy, age_credit=0.5, max_batch_requests=1, dedup_weighed=weighed)
    queue.arrive([*STEM, next(_fresh)])
    waited = passed_by(queue, [500, 501, 502], STEM, 300)
    if policy is Policy.LPM:
        assert waited is None
    else:
        assert waited is not None
        assert waited <= (len(STEM) + 1) / 0.5 + 3 + len(STEM)
