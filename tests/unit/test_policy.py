from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from engine.core.config import load
from engine.core.errors import ConfigError
from engine.device.page_allocator import PageAllocator
from prefill_service.options import SchedulerConfig
from prefill_service.policy import Policy, QueueOrder, without_cache
from prefill_service.prefix_cache import Node, PrefixCache
from prefill_service.request import PrefillRequest, sibling_key
from tests.helpers.golden import Json, cases, fill_cache, make_request

LIMIT = 128  # the reference's, where a case names none


def ids(queue: list[PrefillRequest]) -> list[str]:
    return [request.task.request_id for request in queue]


def queue_of(cache: PrefixCache, page_size: int, *specs: Json) -> list[PrefillRequest]:
    return [make_request({"rid": f"r{i}", "max_new": 1, **spec}, cache, page_size) for i, spec in enumerate(specs)]


@pytest.mark.parametrize(("args", "want"), cases("order"))
def test_golden_order(args: Json, want: Json) -> None:
    page_size = args["page_size"]
    allocator = PageAllocator(4096)
    cache = PrefixCache(allocator)
    fill_cache(cache, allocator, args["cached_prefixes"], page_size)
    queue = [make_request(spec, cache, page_size) for spec in args["requests"]]
    order = QueueOrder(
        Policy(args["policy"]),
        cache,
        page_size,
        priorities=args.get("enable_priority", False),
        low_priority_first=args.get("low_first", False),
        match_limit=args.get("match_max", LIMIT),
    )
    running = Counter(row["routing_key"] for row in args.get("running", []))
    in_effect = order.sort(queue, processed_tokens=args.get("processed_tokens", 0), running_keys=running)
    assert {
        "order": ids(queue),
        "deprioritized": sorted(request.task.request_id for request in queue if request.deprioritized),
        "matched": {request.task.request_id: request.matched for request in queue},
        "active_policy": in_effect,
    } == want


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(256)


@pytest.fixture
def cache(allocator: PageAllocator) -> PrefixCache:
    return PrefixCache(allocator)


def test_unknown_policy_lists_the_names() -> None:
    with pytest.raises(ConfigError) as error:
        load(SchedulerConfig, file=None, env={}, flags={"policy": "fastest"})
    assert all(policy in str(error.value) for policy in Policy)


@pytest.mark.parametrize("policy", [p for p in Policy if p not in (Policy.FCFS, Policy.LOF)])
def test_priorities_go_with_fcfs_and_lof_only(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="it goes with: fcfs, lof"):
        load(SchedulerConfig, file=None, env={}, flags={"policy": policy, "priority_scheduling": True})


@pytest.mark.parametrize("policy", [Policy.LPM, Policy.DFS_WEIGHT, Policy.HRRN])
def test_without_a_cache_cache_aware_policies_become_fcfs_and_say_so(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    load(SchedulerConfig, file=None, env={}, flags={"policy": policy, "prefix_cache": "false"})
    assert without_cache(policy) is Policy.FCFS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"policy {policy} needs the prefix cache" in caplog.text


def test_without_a_cache_shortest_prefill_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the prefix cache"):
        load(SchedulerConfig, file=None, env={}, flags={"policy": Policy.SHORTEST, "prefix_cache": "false"})


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.LOF, Policy.RANDOM, Policy.ROUTING_KEY])
def test_other_policies_need_no_cache(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    assert without_cache(policy) is policy
    assert not caplog.records


def test_random_is_a_shuffle_by_a_seed_of_its_own(cache: PrefixCache) -> None:
    orders = []
    for seed in (1, 1, 2):
        queue = queue_of(cache, 4, *({"ids": [(i, 9)]} for i in range(20)))
        QueueOrder(Policy.RANDOM, cache, 4, seed=seed).sort(queue)
        orders.append(ids(queue))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_there_is_no_match_limit_unless_set(cache: PrefixCache, allocator: PageAllocator) -> None:
    fill_cache(cache, allocator, [[(5000, 8)]], 4)
    queue = queue_of(cache, 4, *({"ids": [(i, 9)]} for i in range(300)), {"ids": [(5000, 9)]})
    assert QueueOrder(Policy.LPM, cache, 4).sort(queue) is Policy.LPM
    assert queue[0].task.request_id == "r300"


def test_a_fully_cached_prompt_leaves_its_last_token_uncached(cache: PrefixCache, allocator: PageAllocator) -> None:
    fill_cache(cache, allocator, [[(0, 8)]], 4)
    (request,) = queue = queue_of(cache, 4, {"ids": [(0, 8)]})
    QueueOrder(Policy.LPM, cache, 4).sort(queue)
    assert (request.matched, request.uncached) == (7, 1)
    assert request.reusable(4).depth == 1, "only whole pages are reused, and one token is left to compute"


@pytest.mark.parametrize(("cached", "shared"), [(-1, 32), (32, -1), (32, 0)])
def test_deduplication_can_be_switched_off(cache: PrefixCache, cached: int, shared: int) -> None:
    queue = queue_of(cache, 4, {"ids": [(0, 60)]}, {"ids": [(0, 50)]})
    for request in queue:
        request.sibling = sibling_key(request.task, shared)
    QueueOrder(Policy.LPM, cache, 4, dedup_cached_tokens=cached).sort(queue)
    assert not any(request.deprioritized for request in queue)


def test_late_requests_are_late_for_one_pass_only(cache: PrefixCache, allocator: PageAllocator) -> None:
    queue = queue_of(cache, 4, {"ids": [(0, 60)]}, {"ids": [(0, 50), (900, 9)]}, {"ids": [(300, 40)]})
    order = QueueOrder(Policy.LPM, cache, 4)
    order.sort(queue)
    assert ids(queue) == ["r0", "r2", "r1"]
    fill_cache(cache, allocator, [[(0, 60)]], 4)
    del queue[0]
    order.sort(queue)
    assert ids(queue) == ["r1", "r2"]


def test_siblings_need_equal_extra_keys(cache: PrefixCache) -> None:
    queue = queue_of(cache, 4, {"ids": [(0, 60)]}, {"ids": [(0, 50)], "extra_key": "a"}, {"ids": [(0, 40)]})
    QueueOrder(Policy.SHORTEST, cache, 4).sort(queue)
    assert ids(queue) == ["r1", "r0", "r2"]


def test_depth_first_prefers_heavy_subtrees_then_older_ones(cache: PrefixCache, allocator: PageAllocator) -> None:
    stem = (0, 8)
    fill_cache(cache, allocator, [[stem, (100, 8)], [stem, (200, 8)], [stem, (300, 8)], [(900, 8)]], 4)
    ask = [
        [(7000, 3)],  # at the root
        [(900, 9)],
        [stem, (1, 1)],  # at the stem itself
        [stem, (300, 9)],
        [stem, (200, 9)],
        [stem, (300, 4), (5, 1)],  # half way down a branch
        [stem, (100, 9)],
    ]
    queue = queue_of(cache, 4, *({"ids": runs} for runs in ask))
    QueueOrder(Policy.DFS_WEIGHT, cache, 4).sort(queue)
    assert ids(queue) == ["r3", "r5", "r6", "r4", "r2", "r1", "r0"]


def test_depth_first_agrees_with_a_walk_of_the_tree() -> None:
    """Against the obvious algorithm, on random bushy trees."""
    rng = random.Random(7)
    for _ in range(30):
        paths = [[rng.randrange(3) for _ in range(rng.randrange(1, 7))] for _ in range(12)]
        cache = PrefixCache(allocator := PageAllocator(256))
        fill_cache(cache, allocator, [[(token, 1) for token in path] for path in paths], 1)
        wanted = [[*rng.choice(paths)[: rng.randrange(7)], 9] for _ in range(20)]
        queue = queue_of(cache, 1, *({"ids": [(token, 1) for token in path]} for path in wanted))
        expected = walk(queue, cache)
        QueueOrder(Policy.DFS_WEIGHT, cache, 1).sort(queue)
        assert ids(queue) == expected


def walk(queue: list[PrefillRequest], cache: PrefixCache) -> list[str]:
    weights: Counter[Node] = Counter()
    children: dict[Node, set[Node]] = defaultdict(set)
    at: dict[Node, list[str]] = defaultdict(list)
    for request in queue:
        node = cache.match(request.keys)
        at[node].append(request.task.request_id)
        weights[node] += 1
        while node is not cache.root:
            children[node.parent].add(node)
            node = node.parent
            weights[node] += 1

    def visit(node: Node) -> list[str]:
        below = sorted(children[node], key=lambda child: (-weights[child], child.born))
        return [rid for child in below for rid in visit(child)] + at[node]

    return visit(cache.root)
