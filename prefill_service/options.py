"""Options of the prefill scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.config import option
from prefill_service.policy import Policy, combination_problems
from prefill_service.prefix_cache import Eviction

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Prefill scheduling."""

    policy: Policy = option(Policy.FCFS, "order of the waiting queue")
    chunk_size: int | None = option(
        2048, "tokens of one long prompt computed in one forward; none: prompts are not cut", unit="tokens", low=1
    )
    max_prefill_tokens: int = option(
        16384, "tokens computed in one forward, except that the first prompt may exceed it", unit="tokens", low=1
    )
    max_batch_requests: int | None = option(None, "requests in one forward; none: no limit", low=1)
    prefix_cache: bool = option(True, "keep computed pages for later requests that start the same")
    eviction: Eviction = option(Eviction.LRU, "which cached pages leave first when memory is short")
    priority_scheduling: bool = option(False, "order by the priority of requests first (policies fcfs and lof)")
    low_priority_first: bool = option(False, "smaller priorities run first, and larger ones are evicted first")
    refuse_priority: bool = option(
        False, "refuse requests with a priority instead of ignoring it while priorities are off"
    )
    dedup_shared_tokens: int = option(
        32, "of waiting requests that share this many first tokens, one goes first and fills the cache; -1: off", low=-1
    )
    dedup_cached_tokens: int = option(32, "only requests with at most this many tokens cached wait so; -1: off", low=-1)
    prefix_match_queue_limit: int | None = option(
        None, "with more requests waiting, lpm and hrrn order by fcfs; none: they always match", low=0
    )
    random_seed: int = option(0, "of the random policy")

    def problems(self) -> Iterable[str]:
        return combination_problems(self.policy, cache_enabled=self.prefix_cache, priorities=self.priority_scheduling)
