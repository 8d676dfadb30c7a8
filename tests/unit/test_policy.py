from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from functools import partial

import pytest

from bootstrap.routing import PrefillView, choose_prefill
from engine.core.config import load
from engine.core.errors import ConfigError
from engine.core.messages import NodeStats, Submit
from engine.core.page_keys import page_keys
from engine.core.types import Role, RoomKey
from engine.device.page_allocator import PageAllocator
from prefill_service.cost_model import CostModel, pairs
from prefill_service.options import SchedulerConfig
from prefill_service.policy import Policy, QueueOrder, without_cache
from prefill_service.prefix_cache import Node, PrefixCache
from prefill_service.records import PrefillBatch
from prefill_service.request import PrefillRequest, RequestState, sibling_key
from rpc.wire import command_from_wire, command_to_wire
from tests.helpers.front_door import House, ask
from tests.helpers.golden import Json, cases, fill_cache, make_request
from tests.helpers.scheduling import PAGE, task
from tests.helpers.scheduling import Node as PrefillNode

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
    with pytest.raises(ConfigError, match=f"policy is {policy}; allowed with priority_scheduling: fcfs, lof"):
        load(SchedulerConfig, file=None, env={}, flags={"policy": policy, "priority_scheduling": True})


@pytest.mark.parametrize("policy", [Policy.LPM, Policy.LPM_AGED, Policy.DFS_WEIGHT, Policy.HRRN])
def test_without_a_cache_cache_aware_policies_become_fcfs_and_say_so(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    load(SchedulerConfig, file=None, env={}, flags={"policy": policy, "prefix_cache": "false"})
    assert without_cache(policy) is Policy.FCFS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"policy {policy} needs the prefix cache" in caplog.text


def test_without_a_cache_shortest_prefill_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy is shortest-prefill-first; allowed without prefix_cache"):
        load(SchedulerConfig, file=None, env={}, flags={"policy": Policy.SHORTEST, "prefix_cache": "false"})


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.LOF, Policy.RANDOM, Policy.ROUTING_KEY, Policy.SLACK])
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


# ---- lpm-aged ----


def test_age_counts_as_cached_tokens(cache: PrefixCache, allocator: PageAllocator) -> None:
    fill_cache(cache, allocator, [[(0, 40)]], 4)
    specs: list[Json] = [{"ids": [(0, 50)], "arrival_tokens": 900}, {"ids": [(300, 50)], "arrival_tokens": 0}]
    for credit, first in ((0.01, "r0"), (0.1, "r1")):  # 900 tokens of age are worth 9, then 90; the match is 40
        queue = queue_of(cache, 4, *specs)
        QueueOrder(Policy.LPM_AGED, cache, 4, age_credit=credit).sort(queue, processed_tokens=1000)
        assert queue[0].task.request_id == first


def test_an_old_request_is_late_no_more(cache: PrefixCache) -> None:
    """The longest prompt, 60 tokens, is worth 600 tokens of age."""
    specs: list[Json] = [{"ids": [(0, 60)], "arrival_tokens": 500}, {"ids": [(0, 50)], "arrival_tokens": 100}]
    for now, late in ((700, True), (701, False)):
        queue = queue_of(cache, 4, *specs)
        QueueOrder(Policy.LPM_AGED, cache, 4, age_credit=0.1).sort(queue, processed_tokens=now)
        assert (queue[-1].task.request_id, queue[-1].deprioritized) == (("r1", True) if late else ("r0", False))


# ---- slack ----


def test_slack_is_earliest_deadline_first_until_costs_are_known(cache: PrefixCache, allocator: PageAllocator) -> None:
    queue = queue_of(cache, 4, {"ids": [(0, 50)]}, {"ids": [(100, 900)]}, {"ids": [(2000, 5)]})
    for request, deadline in zip(queue, (3.0, 2.0, 1.0), strict=True):
        request.deadline = deadline
    costs = CostModel()
    order = QueueOrder(Policy.SLACK, cache, 4, costs=costs)
    order.sort(queue)
    assert ids(queue) == ["r2", "r1", "r0"]
    for tokens in range(1, 100):  # 10 ms a token: r1 takes 9 s
        costs.observe(tokens, pairs(tokens, 0), 0.01 * tokens)
    order.sort(queue)
    assert ids(queue) == ["r1", "r2", "r0"]
    fill_cache(cache, allocator, [[(100, 900)]], 4)  # and nothing once it is cached
    order.sort(queue)
    assert ids(queue) == ["r2", "r1", "r0"]


def test_a_deadline_counts_from_the_front_door() -> None:
    node = PrefillNode(policy=Policy.SLACK, ttft_target=2.0)
    node.clock.advance(10)
    plain = node.submit(range(5))
    submit = partial(dataclasses.replace, plain.task)
    own = node.scheduler.submit(submit(key=RoomKey(1, 9), ttft_target=0.5))
    again = node.scheduler.submit(submit(key=RoomKey(2, 9), waited=1.5))
    both = node.scheduler.submit(submit(key=RoomKey(3, 9), ttft_target=0.5, waited=1.5))
    now = node.clock()
    assert [r.deadline - now for r in (plain, own, again, both)] == [2.0, 0.5, 0.5, -1.0]


@pytest.mark.parametrize("cached", [True, False])
def test_who_is_due_runs_first(cached: bool) -> None:
    node = PrefillNode(policy=Policy.SLACK, max_batch_requests=1, prefix_cache=cached)
    patient = node.submit(range(20))
    hasty = node.scheduler.submit(dataclasses.replace(task([*range(100, 120)]), ttft_target=0.1))
    node.scheduler.grant(hasty.key)
    assert [node.forward()[0].rows[0].request for _ in range(2)] == [hasty, patient]


# ---- one key from the front door to the queue ----


def test_the_key_that_chose_the_node_orders_its_queue() -> None:
    house = House()
    doors = [house.join(Role.PREFILL, f"p{i}") for i in range(4)]
    house.join(Role.DECODE, "d1", NodeStats(pages_total=1000, pages_free=1000, head_room=9999, serving=True))
    for number in range(6):
        house.submit(ask(f"r{number}", range(100 * number, 100 * number + 9), routing_key="ab"[number % 2]))
    submitted = {door.node_id: [command_to_wire(submit) for submit in house.submitted(door)] for door in doors}
    view = partial(PrefillView, cached=(), queued_tokens=0, tokens_per_second=0, requests=0, last_chosen=0)
    for key in "ab":
        chosen = choose_prefill([view(door.node_id) for door in doors], 9, (), PAGE, key)
        assert chosen is not None
        tasks = [message.submit for message in submitted[chosen.node_id] if message.submit.routing_key == key]
        assert len(tasks) == 3, "all of one key, and on the node that the key hashes to"

    node = PrefillNode(policy=Policy.ROUTING_KEY, max_batch_requests=1)
    for number in (0, 1, 3, 2):  # in this order of arrival: a, b, b, a
        (message,) = (m for some in submitted.values() for m in some if m.submit.request_id == f"r{number}")
        command = command_from_wire(message)
        assert isinstance(command, Submit)
        keys = page_keys(command.task.token_ids, PAGE)
        node.scheduler.submit(dataclasses.replace(command.task, page_keys=keys))
        node.scheduler.grant(command.task.key)
    order = [node.forward()[0].rows[0].request.task.request_id for _ in range(4)]
    assert order[:2] == ["r0", "r2"], "the second of key a goes before both of key b"


# ---- chunks by time ----


class Timed:
    """A node whose forwards take the time that a law says."""

    def __init__(self, target: float | None):
        self.node = PrefillNode(20_000, chunk_size=2048, forward_target=target)

    def forward(self) -> tuple[PrefillBatch, float]:
        batch = self.node.batch()
        seconds = 0.01 + 1e-4 * batch.tokens + 1e-7 * batch.pairs
        for span in self.node.scheduler.complete_forward(batch, seconds):
            if span.is_last:
                self.node.scheduler.finish(span.request.key)
        return batch, seconds

    def learn(self) -> None:
        """From forwards of several sizes, each of one prompt alone."""
        for number, length in enumerate([50, 400, 2000, 6000, 30, 900, 5000, 700, 8, 1500, 60, 90]):
            start = 100_000 * (number + 1)
            request = self.node.submit(range(start, start + length))
            while request.state is not RequestState.ENDED:
                self.forward()


def test_chunks_shrink_as_history_grows_and_forwards_keep_to_the_target() -> None:
    timed = Timed(0.1)
    timed.learn()
    request = timed.node.submit(range(10_000))
    chunks, times = [], []
    while request.state is not RequestState.ENDED:
        batch, seconds = timed.forward()
        chunks.append(batch.tokens)
        times.append(seconds)
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert chunks[0] > 1.5 * chunks[-2]
    assert all(seconds == pytest.approx(0.1, rel=0.05) for seconds in times[:-1])
    assert times[-1] < 0.105, "the last chunk is what is left"


def test_the_head_of_the_queue_counts_when_nothing_is_partly_computed() -> None:
    timed = Timed(0.1)
    timed.learn()
    fresh = timed.node.submit(range(8000))
    first = timed.forward()[0].tokens
    while fresh.state is not RequestState.ENDED:
        timed.forward()
    known = timed.node.submit(range(7900), range(9_000_000, 9_004_000))
    batch, seconds = timed.forward()
    assert batch.rows[0].request is known
    assert batch.rows[0].start == 7900
    assert seconds == pytest.approx(0.1, rel=0.05)
    assert batch.tokens < first


def test_chunks_stay_as_they_are_without_a_target_or_until_enough_is_known() -> None:
    for target in (None, 0.1):
        timed = Timed(target)
        timed.node.submit(range(10_000))
        assert timed.forward()[0].tokens == 2048


def test_chunk_size_is_the_most() -> None:
    timed = Timed(100.0)
    timed.learn()
    timed.node.submit(range(10_000))
    assert timed.forward()[0].tokens == 2048


def test_a_target_that_cannot_be_met_still_advances_by_a_page() -> None:
    timed = Timed(0.001)
    timed.learn()
    timed.node.submit(range(10_000))
    assert timed.forward()[0].tokens == PAGE


def test_a_time_per_forward_needs_prompts_to_be_cut() -> None:
    with pytest.raises(ConfigError, match="forward_target"):
        load(SchedulerConfig, file=None, env={}, flags={"forward_target": "0.1", "chunk_size": "none"})
