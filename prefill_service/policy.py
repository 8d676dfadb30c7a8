"""The order of the waiting queue. Sorting is stable and in place: ties show the order left by the pass before.

Sort keys, ascending. `matched` = tokens found cached, at most length - 1; `late` = deprioritized in this pass.

    fcfs                     no sort; with priorities (priority, queue entry time)
    lof                      -max_new_tokens; with priorities (priority, -max_new_tokens)
    random                   a shuffle
    routing-key              running requests with the same key, most first; then by key
    lpm                      -matched; late last
    lpm-aged                 -(matched + credit * tokens processed since arrival); late last
    dfs-weight               depth first over the cache tree, subtrees with more waiting requests first
    hrrn                     -(tokens processed since arrival / uncached), then request id; late last
    shortest-prefill-first   (late, uncached, queue entry time)
    slack                    deadline of the first token - estimated seconds to compute what is uncached

In-batch deduplication (lpm, lpm-aged, hrrn, shortest-prefill-first): of requests that share their first tokens and find
little cached, the first leads; the others are late in this pass, and find the leader's prefix cached in the next.
Weighed deduplication takes its place where it is switched on, and goes with slack too: see `prefill_service.dedup`.
Late requests then stay out of this pass altogether, and their leader takes the place of the first of them (but under
lpm-aged, where that would let it past older ones).

The bound of lpm-aged. Let W = the longest prompt that waits / credit, in tokens processed by the node. A request that
arrives after W tokens were processed since r arrived is never ordered before r: its match, shorter than its prompt, is
worth less than r's lead in age. Nor does deduplication break this, since whoever arrived W ago is late no more. So what
runs before r is at most what had arrived by then, however well newcomers match. A smaller credit orders more like lpm,
a larger one more like fcfs. On simulated queues of prompts with 24 common beginnings, more than the pool holds, 0.03
had the hit rate of lpm and a shorter longest wait; from 0.1 on, hits were lost and everybody waited longer.

slack without a cost model that has measured enough is earliest deadline first. It uses matches, but needs none: without
a prefix cache everything is uncached, and the policy stays.

Nothing here admits a request, takes a lock or allocates a page.
"""

from __future__ import annotations

import enum
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from engine.core.priority import importance
from prefill_service.cost_model import CostModel, pairs
from prefill_service.dedup import leaders
from prefill_service.prefix_cache import PrefixCache
from prefill_service.request import PrefillRequest

__all__ = ["Policy", "QueueOrder", "combination_problems", "without_cache"]

log = logging.getLogger(__name__)


class Policy(enum.StrEnum):
    FCFS = "fcfs"
    LOF = "lof"
    RANDOM = "random"
    ROUTING_KEY = "routing-key"
    LPM = "lpm"
    LPM_AGED = "lpm-aged"
    DFS_WEIGHT = "dfs-weight"
    HRRN = "hrrn"
    SHORTEST = "shortest-prefill-first"
    SLACK = "slack"


_CACHE_AWARE = frozenset({Policy.LPM, Policy.LPM_AGED, Policy.DFS_WEIGHT, Policy.HRRN, Policy.SHORTEST})
_MATCHING = _CACHE_AWARE | {Policy.SLACK}
_WEIGHED = _MATCHING - {Policy.DFS_WEIGHT}
_WITH_PRIORITIES = frozenset({Policy.FCFS, Policy.LOF})
_LIMITED = frozenset({Policy.LPM, Policy.HRRN})  # those that prefix_match_queue_limit concerns


def combination_problems(policy: Policy, *, cache_enabled: bool, priorities: bool) -> Iterator[str]:
    """Why these options cannot go together."""
    if priorities and policy not in _WITH_PRIORITIES:
        allowed = ", ".join(p for p in Policy if p in _WITH_PRIORITIES)
        yield f"policy is {policy}; allowed with priority_scheduling: {allowed}"
    if not cache_enabled and policy is Policy.SHORTEST:
        yield f"policy is {policy}; allowed without prefix_cache: any other, as this one orders by what is cached"


def without_cache(policy: Policy) -> Policy:
    """What takes the place of `policy` on a node whose prefix cache is off; logs a warning when it is another one."""
    if policy not in _CACHE_AWARE:
        return policy
    log.warning("policy %s needs the prefix cache, which is off: ordering by fcfs instead", policy)
    return Policy.FCFS


class QueueOrder:
    """Orders the waiting queue once a pass.

    age_credit: tokens of match that a request gains with each token processed (lpm-aged). dedup_cost_tokens: what one
    more forward costs a request, while `costs` has not measured it.
    """

    def __init__(
        self,
        policy: Policy,
        cache: PrefixCache,
        page_size: int,
        *,
        priorities: bool = False,
        low_priority_first: bool = False,
        dedup_cached_tokens: int = 32,
        dedup_weighed: bool = False,
        dedup_cost_tokens: int = 256,
        match_limit: int | None = None,
        age_credit: float = 0.03,
        costs: CostModel | None = None,
        seed: int = 0,
    ):
        self.policy = policy
        self._cache = cache
        self._page_size = page_size
        self._priorities = priorities
        self._low_first = low_priority_first
        self._dedup_weighed = dedup_weighed and policy in _WEIGHED
        self._dedup_cached_tokens = dedup_cached_tokens if policy in _CACHE_AWARE and not self._dedup_weighed else -1
        self._dedup_cost_tokens = dedup_cost_tokens
        self._match_limit = match_limit
        self._age_credit = age_credit
        self._costs = CostModel() if costs is None else costs
        self._random = random.Random(seed)

    def in_effect(self, waiting: int) -> Policy:
        """The policy for a queue of `waiting` requests: fcfs beyond the match limit, where there is one."""
        if self._match_limit is not None and waiting > self._match_limit and self.policy in _LIMITED:
            return Policy.FCFS
        return self.policy

    def sort(
        self,
        queue: list[PrefillRequest],
        *,
        processed_tokens: int = 0,
        running_keys: Mapping[str, int] | None = None,
        continuation: PrefillRequest | None = None,
    ) -> Policy:
        """Order `queue` in place; return the policy in effect.

        processed_tokens: the node's count of tokens processed (the clock of hrrn and lpm-aged). running_keys: requests
        in progress by routing key. continuation: the partly computed one, which goes first. Policies that look at the
        cache also leave the match of each request on it.
        """
        policy = self.in_effect(len(queue))
        mature = self._mature(queue, processed_tokens) if policy is Policy.LPM_AGED else -math.inf
        if policy in _MATCHING:
            self._match(queue, mature)
        match policy:
            case Policy.FCFS:
                if self._priorities:
                    queue.sort(key=lambda r: (self._rank(r), r.queue_time))
            case Policy.LOF:
                queue.sort(key=lambda r: (self._rank(r), -r.max_new) if self._priorities else -r.max_new)
            case Policy.RANDOM:
                self._random.shuffle(queue)
            case Policy.ROUTING_KEY:
                if running_keys:
                    queue.sort(key=lambda r: _routing_rank(r.task.routing_key, running_keys))
            case Policy.LPM:
                queue.sort(key=lambda r: math.inf if r.deprioritized else -r.matched)
            case Policy.LPM_AGED:  # the tokens processed until now are the same for all
                credit = self._age_credit
                queue.sort(key=lambda r: math.inf if r.deprioritized else credit * r.arrival_tokens - r.matched)
            case Policy.DFS_WEIGHT:
                queue[:] = _depth_first(queue, self._cache)
            case Policy.HRRN:
                queue.sort(key=lambda r: (_response_rank(r, processed_tokens), r.task.request_id))
            case Policy.SHORTEST:
                queue.sort(key=lambda r: (r.deprioritized, r.length - r.matched, r.queue_time))
            case Policy.SLACK:
                queue.sort(key=self._latest_start)
        if self._dedup_weighed:
            self._weigh(queue, policy, continuation, mature)
        return policy

    def admissible(self, queue: Sequence[PrefillRequest]) -> Sequence[PrefillRequest]:
        """Those of an ordered queue that this pass may admit: all but who had better wait for a leader.

        Somebody can always run: leaders do not wait, and are in the queue or partly computed.
        """
        return [r for r in queue if not r.deprioritized] if self._dedup_weighed else queue

    def deferred(self, queue: Sequence[PrefillRequest]) -> tuple[PrefillRequest, ...]:
        """Those that are not admissible."""
        return tuple(r for r in queue if r.deprioritized) if self._dedup_weighed else ()

    def _match(self, queue: Sequence[PrefillRequest], mature: float) -> None:
        match, page_size, most = self._cache.match, self._page_size, self._dedup_cached_tokens
        seen: set[bytes] = set()
        for request in queue:
            request.observe(match(request.keys, request.node), page_size)
            request.deprioritized = False
            if request.matched <= most and request.sibling is not None:
                request.deprioritized = request.sibling in seen and request.arrival_tokens >= mature
                seen.add(request.sibling)

    def _mature(self, queue: Sequence[PrefillRequest], processed_tokens: int) -> float:
        """Who arrived earlier, on the clock of tokens processed, is never late under lpm-aged."""
        return processed_tokens - max((request.length for request in queue), default=0) / self._age_credit

    def _weigh(
        self, queue: list[PrefillRequest], policy: Policy, continuation: PrefillRequest | None, mature: float
    ) -> None:
        """Mark as late who had better wait for a leader, and put them last."""
        waits: Mapping[PrefillRequest, PrefillRequest] = {}
        if policy in _WEIGHED:
            waits = leaders(
                queue,
                self._page_size,
                self._forward_tokens(),
                continuation=continuation,
                must_go=lambda request: request.arrival_tokens < mature,
            )
        for request in queue:
            request.deprioritized = request in waits
        if waits:
            leads = {} if policy is Policy.LPM_AGED else waits
            early = dict.fromkeys(leads.get(request, request) for request in queue)  # each at its first place
            early = {r: None for r in early if not r.deprioritized and r is not continuation}
            queue[:] = [*early, *(request for request in queue if request.deprioritized)]

    def _forward_tokens(self) -> float:
        """Tokens that one could compute in the time that a forward takes whatever it computes."""
        costs = self._costs
        return costs.fixed / costs.per_token if costs.measured and costs.per_token else self._dedup_cost_tokens

    def _latest_start(self, request: PrefillRequest) -> float:
        """When its computing has to begin, at the latest, for the first token to be in time."""
        costs, uncached = self._costs, request.length - request.matched
        left = costs.seconds(uncached, pairs(uncached, request.matched)) if costs.measured else 0.0
        return request.deadline - left

    def _rank(self, request: PrefillRequest) -> float:
        return -importance(request.priority, low_first=self._low_first)


def _routing_rank(key: str, running: Mapping[str, int]) -> tuple[int, int, str]:
    count = running.get(key, 0) if key else 0
    return (0, -count, key) if count else (1, 0, key)


def _response_rank(request: PrefillRequest, processed_tokens: int) -> float:
    if request.deprioritized:
        return math.inf
    return -max(0, processed_tokens - request.arrival_tokens) / (request.length - request.matched)


def _depth_first(queue: Sequence[PrefillRequest], cache: PrefixCache) -> list[PrefillRequest]:
    """Requests by a walk of the cache tree: the heavier child first (weight = requests at or below it, ties by age of
    the child), a node's own requests after those of its children.

    The tree itself is not walked. A group of requests that share a prefix shares its keys, so the depth at which the
    group parts is found by binary search, and long unbranched chains cost no more than short ones. Most children have
    one request: they come last among their siblings and make no group of their own.
    """
    ordered: list[PrefillRequest] = []
    stack: list[tuple[list[PrefillRequest], int]] = [(list(queue), 0)]  # (group, pages known to be shared); -1: emit
    while stack:
        group, shared = stack.pop()
        if shared < 0 or len(group) <= 1:
            ordered += group
            continue
        depth = _parting(group, shared)
        own = [request for request in group if request.node.depth == depth]
        below = [request for request in group if request.node.depth > depth] if own else group
        keys = [request.keys[depth] for request in below]
        weights = Counter(keys)
        groups: dict[bytes, list[PrefillRequest]] = {key: [] for key, weight in weights.items() if weight > 1}
        single = {}
        for key, request in zip(keys, below, strict=True):
            if key in groups:
                groups[key].append(request)
            else:
                single[key] = request
        oldest_first = sorted(single, key=lambda key: cache.find(key).born)
        stack.append(([single[key] for key in oldest_first] + own, -1))
        heaviest_last = sorted(groups, key=lambda key: (weights[key], -cache.find(key).born))
        stack += [(groups[key], depth + 1) for key in heaviest_last]
    return ordered


def _parting(group: Sequence[PrefillRequest], shared: int) -> int:
    """Matched pages that all of `group` have in common, at least `shared`."""
    low, high = shared, min([request.node.depth for request in group])
    chains = [request.keys for request in group]
    while low < high:
        middle = (low + high + 1) // 2
        key = chains[0][middle - 1]
        if all(chain[middle - 1] == key for chain in chains):
            low = middle
        else:
            high = middle - 1
    return low
