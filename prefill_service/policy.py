"""The order of the waiting queue. Sorting is stable and in place: ties show the order left by the pass before.

Sort keys, ascending. `matched` = tokens found cached, at most length - 1; `late` = deprioritized in this pass.

    fcfs                     no sort; with priorities (priority, queue entry time)
    lof                      -max_new_tokens; with priorities (priority, -max_new_tokens)
    random                   a shuffle
    routing-key              running requests with the same key, most first; then by key
    lpm                      -matched; late last
    dfs-weight               depth first over the cache tree, subtrees with more waiting requests first
    hrrn                     -(tokens processed since arrival / uncached), then request id; late last
    shortest-prefill-first   (late, uncached, queue entry time)

In-batch deduplication: of requests that share their first tokens and find little cached, the first leads; the others
are late in this pass, and find the leader's prefix cached in the next.

Nothing here admits a request, takes a lock or allocates a page.
"""

from __future__ import annotations

import enum
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence

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
    DFS_WEIGHT = "dfs-weight"
    HRRN = "hrrn"
    SHORTEST = "shortest-prefill-first"


_CACHE_AWARE = frozenset({Policy.LPM, Policy.DFS_WEIGHT, Policy.HRRN, Policy.SHORTEST})
_WITH_PRIORITIES = frozenset({Policy.FCFS, Policy.LOF})
_LIMITED = frozenset({Policy.LPM, Policy.HRRN})  # those that prefix_match_queue_limit concerns


def combination_problems(policy: Policy, *, cache_enabled: bool, priorities: bool) -> Iterator[str]:
    """Why these options cannot go together."""
    if priorities and policy not in _WITH_PRIORITIES:
        allowed = ", ".join(p for p in Policy if p in _WITH_PRIORITIES)
        yield f"priority scheduling does not go with policy {policy}; it goes with: {allowed}"
    if not cache_enabled and policy is Policy.SHORTEST:
        yield f"policy {policy} needs the prefix cache, which is off"


def without_cache(policy: Policy) -> Policy:
    """What takes the place of `policy` on a node whose prefix cache is off; logs a warning when it is another one."""
    if policy not in _CACHE_AWARE:
        return policy
    log.warning("policy %s needs the prefix cache, which is off: ordering by fcfs instead", policy)
    return Policy.FCFS


class QueueOrder:
    """Orders the waiting queue once a pass."""

    def __init__(
        self,
        policy: Policy,
        cache: PrefixCache,
        page_size: int,
        *,
        priorities: bool = False,
        low_priority_first: bool = False,
        dedup_cached_tokens: int = 32,
        match_limit: int | None = None,
        seed: int = 0,
    ):
        self.policy = policy
        self._cache = cache
        self._page_size = page_size
        self._priorities = priorities
        self._sign = 1 if low_priority_first else -1
        self._dedup_cached_tokens = dedup_cached_tokens
        self._match_limit = match_limit
        self._random = random.Random(seed)

    def in_effect(self, waiting: int) -> Policy:
        """The policy for a queue of `waiting` requests: fcfs beyond the match limit, where there is one."""
        if self._match_limit is not None and waiting > self._match_limit and self.policy in _LIMITED:
            return Policy.FCFS
        return self.policy

    def sort(
        self, queue: list[PrefillRequest], *, processed_tokens: int = 0, running_keys: Mapping[str, int] | None = None
    ) -> Policy:
        """Order `queue` in place; return the policy in effect.

        processed_tokens: the node's count of tokens processed (the clock of hrrn). running_keys: requests in progress
        by routing key. Cache-aware policies also leave the match of each request on it.
        """
        policy = self.in_effect(len(queue))
        if policy in _CACHE_AWARE:
            self._match(queue)
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
            case Policy.DFS_WEIGHT:
                queue[:] = _depth_first(queue, self._cache)
            case Policy.HRRN:
                queue.sort(key=lambda r: (_response_rank(r, processed_tokens), r.task.request_id))
            case Policy.SHORTEST:
                queue.sort(key=lambda r: (r.deprioritized, r.length - r.matched, r.queue_time))
        return policy

    def _match(self, queue: Sequence[PrefillRequest]) -> None:
        match, page_size, most = self._cache.match, self._page_size, self._dedup_cached_tokens
        leaders: set[bytes] = set()
        for request in queue:
            request.observe(match(request.keys, request.node), page_size)
            request.deprioritized = False
            if request.sibling is not None and request.matched <= most:
                request.deprioritized = request.sibling in leaders
                leaders.add(request.sibling)

    def _rank(self, request: PrefillRequest) -> float:
        return math.inf if request.priority is None else self._sign * request.priority


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
    group parts is found by binary search, and long unbranched chains cost no more than short ones.
    """
    ordered: list[PrefillRequest] = []
    stack: list[tuple[list[PrefillRequest], int]] = [(list(queue), 0)]  # (group, pages known to be shared); -1: emit
    while stack:
        group, shared = stack.pop()
        if shared < 0 or len(group) <= 1:
            ordered += group
            continue
        depth = _parting(group, shared)
        own: list[PrefillRequest] = []
        children: dict[bytes, list[PrefillRequest]] = {}
        for request in group:
            if request.node.depth == depth:
                own.append(request)
            else:
                children.setdefault(request.keys[depth], []).append(request)
        stack.append((own, -1))
        heaviest_last = sorted(children.items(), key=lambda item: (len(item[1]), -cache.find(item[0]).born))
        stack += [(members, depth + 1) for _, members in heaviest_last]
    return ordered


def _parting(group: Sequence[PrefillRequest], shared: int) -> int:
    """Matched pages that all of `group` have in common, at least `shared`."""
    low, high = shared, min(request.node.depth for request in group)
    first = group[0].keys
    while low < high:
        middle = (low + high + 1) // 2
        key = first[middle - 1]
        if all(request.keys[middle - 1] == key for request in group):
            low = middle
        else:
            high = middle - 1
    return low
