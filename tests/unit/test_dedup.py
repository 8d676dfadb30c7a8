from __future__ import annotations

import itertools
import random

import pytest

from engine.device.page_allocator import PageAllocator
from prefill_service.cost_model import ENOUGH, CostModel, pairs
from prefill_service.dedup import leaders
from prefill_service.policy import Policy, QueueOrder
from prefill_service.prefix_cache import PrefixCache
from prefill_service.request import PrefillRequest
from tests.helpers.golden import fill_cache, make_request
from tests.helpers.scheduling import Node

PAGE = 16
COST = 256
WEIGHED = [Policy.LPM, Policy.LPM_AGED, Policy.HRRN, Policy.SHORTEST, Policy.SLACK]


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(20_000)


@pytest.fixture
def cache(allocator: PageAllocator) -> PrefixCache:
    return PrefixCache(allocator)


def waiting(cache: PrefixCache, *prompts: list[tuple[int, int]]) -> list[PrefillRequest]:
    """Requests r0, r1, … with fresh matches. Prompts are runs of (first token, count)."""
    queue = [make_request({"rid": f"r{i}", "ids": runs}, cache, PAGE) for i, runs in enumerate(prompts)]
    for request in queue:
        request.observe(cache.match(request.keys), PAGE)
    return queue


def names(waits: dict[PrefillRequest, PrefillRequest]) -> dict[str, str]:
    return {late.task.request_id: leader.task.request_id for late, leader in waits.items()}


def family(shared: int, *own: int, start: int = 0) -> list[list[tuple[int, int]]]:
    """Prompts with `shared` tokens in common, and so many of their own."""
    return [[(start, shared), (1_000_000 + start + 10_000 * i, count)] for i, count in enumerate(own)]


def test_long_and_short_siblings_are_not_treated_alike(cache: PrefixCache) -> None:
    long, short = family(100_000, 300, 200, 300), family(40, 5, 8, 5, start=500_000)
    assert names(leaders(waiting(cache, *long, *short), PAGE, COST)) == {"r0": "r1", "r2": "r1"}


def test_waiting_must_save_more_than_it_costs(cache: PrefixCache) -> None:
    for shared, waits in ((COST, False), (COST + PAGE - 1, False), (COST + PAGE, True)):
        queue = waiting(cache, *family(shared, 5, 6))
        assert bool(leaders(queue, PAGE, COST)) == waits, shared


def test_what_is_cached_already_is_not_saved(cache: PrefixCache, allocator: PageAllocator) -> None:
    fill_cache(cache, allocator, [[(0, 800)]], PAGE)
    assert not leaders(waiting(cache, *family(1000, 5, 6)), PAGE, COST)
    assert names(leaders(waiting(cache, *family(1100, 5, 6)), PAGE, COST)) == {"r1": "r0"}


def test_groups_within_a_group_have_leaders_of_their_own(cache: PrefixCache) -> None:
    """All share too little, but for two that go on together."""
    stem = (0, 40)
    queue = waiting(cache, [stem, (5000, 100)], [stem, (6000, 900), (1, 9)], [stem, (6000, 900), (2, 5)])
    assert names(leaders(queue, PAGE, COST)) == {"r1": "r2"}


def test_of_equals_the_first_leads(cache: PrefixCache) -> None:
    queue = waiting(cache, *family(1000, 7, 7, 7))
    assert names(leaders(queue, PAGE, COST)) == {"r1": "r0", "r2": "r0"}
    assert names(leaders(queue[::-1], PAGE, COST)) == {"r1": "r2", "r0": "r2"}


def test_the_last_page_of_a_prompt_is_no_saving(cache: PrefixCache) -> None:
    """A prompt that ends with the shared part computes its last token, so it cannot reuse its last page."""
    whole = [(0, COST + PAGE)]
    assert not leaders(waiting(cache, whole, whole), PAGE, COST)
    assert names(leaders(waiting(cache, whole, [*whole, (9, 1)]), PAGE, COST)) == {"r1": "r0"}


def test_the_continuation_leads_since_it_computes_anyway(cache: PrefixCache, allocator: PageAllocator) -> None:
    fill_cache(cache, allocator, [[(0, 320)]], PAGE)
    continuation, *queue = waiting(cache, *family(1000, 500, 7, 7), [(700_000, 900)])
    continuation.computed = 320
    waits = leaders(queue, PAGE, COST, continuation=continuation)
    assert names(waits) == {"r1": "r0", "r2": "r0"}


def test_who_must_go_leads_and_never_waits(cache: PrefixCache) -> None:
    queue = waiting(cache, *family(1000, 5, 100, 200, 300))
    old = queue[1:3]
    assert names(leaders(queue, PAGE, COST, must_go=lambda r: r in old)) == {"r0": "r1", "r3": "r1"}


def test_it_agrees_with_comparing_all_pairs() -> None:
    rng = random.Random(5)
    for _ in range(50):
        cache = PrefixCache(allocator := PageAllocator(200))
        prompts = [[(rng.randrange(2), 1) for _ in range(rng.randrange(1, 12))] for _ in range(12)]
        fill_cache(cache, allocator, rng.sample(prompts, 2), 1)
        queue = [make_request({"rid": f"r{i}", "ids": runs}, cache, 1) for i, runs in enumerate(prompts)]
        for request in queue:
            request.observe(cache.match(request.keys), 1)
        cost = rng.randrange(4)
        assert leaders(queue, 1, cost) == obvious(queue, cost)


def obvious(queue: list[PrefillRequest], cost: int) -> dict[PrefillRequest, PrefillRequest]:
    """By pairs, with pages of one token: who could save enough, and the least of those it could save it by."""

    def common(a: PrefillRequest, b: PrefillRequest) -> int:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.keys, b.keys, strict=False))
        return len(list(same))

    waits = {}
    for request in queue:
        enough = request.node.depth + cost
        group = [other for other in queue if common(request, other) > enough]
        if group and request.length - 1 > enough:
            leader = min(group, key=lambda other: other.uncached)
            if leader is not request:
                waits[request] = leader
    return waits


# ---- in the order of the queue ----


@pytest.mark.parametrize("policy", WEIGHED)
def test_late_ones_stand_last_under_every_policy(policy: Policy, cache: PrefixCache) -> None:
    queue = waiting(cache, *family(2000, 50, 10, 60), [(900_000, 1500)])
    QueueOrder(policy, cache, PAGE, dedup_weighed=True).sort(queue)
    order = [request.task.request_id for request in queue]
    assert order.index("r1") < 2
    assert {*order[2:]} == {"r0", "r2"}
    assert {r.task.request_id for r in queue if r.deprioritized} == {"r0", "r2"}


def test_a_leader_takes_the_place_of_the_most_urgent_that_waits_for_it(cache: PrefixCache) -> None:
    """Else one with all the time in the world would hold up one that is due."""
    queue = waiting(cache, *family(2000, 50, 10), [(900_000, 100)])
    for request, deadline in zip(queue, (1.0, 9.0, 5.0), strict=True):
        request.deadline = deadline
    QueueOrder(Policy.SLACK, cache, PAGE, dedup_weighed=True).sort(queue)
    assert [request.task.request_id for request in queue] == ["r1", "r2", "r0"]


def test_under_lpm_aged_a_leader_stays_behind_those_that_are_much_older(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    """A token of age is worth one of match, and the longest prompt has 2,050."""
    fill_cache(cache, allocator, [[(0, 512)]], PAGE)
    queue = waiting(cache, *family(2000, 50, 10), [(900_000, 50)])
    for request, arrival in zip(queue, (300, 2200, 100), strict=True):
        request.arrival_tokens = arrival
    order = QueueOrder(Policy.LPM_AGED, cache, PAGE, dedup_weighed=True, age_credit=1.0)
    order.sort(queue, processed_tokens=2200)
    assert [request.task.request_id for request in queue] == ["r2", "r1", "r0"]


def test_the_cost_of_a_forward_is_measured(cache: PrefixCache) -> None:
    queue = waiting(cache, *family(2000, 50, 10))
    costs, rng = CostModel(), random.Random(0)
    order = QueueOrder(Policy.LPM, cache, PAGE, dedup_weighed=True, costs=costs)
    order.sort(queue)
    assert any(request.deprioritized for request in queue), "256 tokens, so long as nothing is known"
    late = []
    for _ in range(50):  # a forward costs as much as 10,000 tokens
        tokens = rng.randrange(1, 4000)
        costs.observe(tokens, pairs(tokens, 0), 1.0 + 1e-4 * tokens)
        order.sort(queue)
        late.append(any(request.deprioritized for request in queue))
    assert late == [True] * (ENOUGH - 1) + [False] * (51 - ENOUGH)


@pytest.mark.parametrize("policy", [p for p in Policy if p not in WEIGHED])
def test_policies_that_do_not_look_at_the_cache_hold_nobody_back(policy: Policy) -> None:
    node = Node(1000, policy=policy, chunk_size=48, dedup_cost_tokens=4)
    for _ in range(3):
        node.submit(range(16))
    assert len(node.batch().rows) == 3


# ---- in the scheduler ----


def serve(node: Node, *requests: PrefillRequest) -> int:
    """Run everything; tokens computed."""
    while any(request.chunks == 0 or request.computed < request.length for request in requests):
        node.forward()
    for request in requests:
        node.scheduler.finish(request.key)
    node.assert_idle()
    return node.scheduler.stats().computed_tokens_total


@pytest.mark.parametrize("policy", WEIGHED)
def test_what_many_share_is_computed_once(policy: Policy) -> None:
    """Also past the end of the leader's last chunk, where the rule for equal first tokens lets a second one in."""
    node = Node(1000, policy=policy, chunk_size=48, dedup_weighed=True, dedup_cost_tokens=4)
    prompts = [(range(200), range(1000 * i, 1000 * i + 10)) for i in range(1, 9)]
    requests = [node.submit(*prompt) for prompt in prompts]
    assert serve(node, *requests) == 200 + 8 * 10


def test_what_is_short_is_computed_twice_sooner_than_waited_for() -> None:
    node = Node(1000, policy=Policy.LPM, chunk_size=400, dedup_weighed=True, dedup_cost_tokens=100)
    requests = [node.submit(range(40), range(1000 * i, 1000 * i + 10)) for i in range(1, 5)]
    assert len(node.batch().rows) == len(requests)


def test_the_leader_may_be_aborted() -> None:
    node = Node(1000, policy=Policy.LPM, chunk_size=48, dedup_weighed=True, dedup_cost_tokens=4)
    leader, other = node.submit(range(200)), node.submit(range(205))
    batch, _ = node.forward()
    assert [row.request for row in batch.rows] == [leader]
    node.scheduler.abort(leader.key)
    node.scheduler.finish(leader.key)
    assert serve(node, other) == 205
    assert other.cached_tokens == 48


def test_nobody_is_held_back_once_the_queue_is_too_long_to_match() -> None:
    node = Node(1000, policy=Policy.LPM, dedup_weighed=True, dedup_cost_tokens=4, prefix_match_queue_limit=2)
    leader, late = node.submit(range(40)), node.submit(range(44))
    batch = node.batch()
    assert [row.request for row in batch.rows] == [leader]
    assert late.deprioritized
    node.scheduler.abandon_forward(batch)
    others = [node.submit(range(1000 * i, 1000 * i + 9)) for i in (1, 2)]
    assert [row.request for row in node.batch().rows] == [late, *others]
