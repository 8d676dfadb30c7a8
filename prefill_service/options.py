"""Options of the prefill scheduler."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.core.config import Bytes, option
from engine.core.node_config import host_pool_problems
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
    host_kv_memory: Bytes | None = option(
        None, "host memory for cached pages that the page pool has no room for any more; none: they are gone", low=1
    )
    priority_scheduling: bool = option(False, "order by the priority of requests first (policies fcfs and lof)")
    low_priority_first: bool = option(False, "smaller priorities run first, and larger ones are evicted first")
    refuse_priority: bool = option(
        False, "refuse requests with a priority instead of ignoring it while priorities are off"
    )
    dedup_shared_tokens: int = option(
        32, "without dedup_weighed: of those that share this many first tokens, one goes first; -1: off", low=-1
    )
    dedup_cached_tokens: int = option(32, "only requests with at most this many tokens cached wait so; -1: off", low=-1)
    dedup_weighed: bool = option(
        True, "with policies that match: a request waits for the shortest that shares more with it than a forward costs"
    )
    dedup_cost_tokens: int = option(
        256, "what one more forward costs a request, until that has been measured", unit="tokens", low=0
    )
    prefix_match_queue_limit: int | None = option(
        None, "with more requests waiting, lpm and hrrn order by fcfs; none: they always match", low=0
    )
    age_credit: float = option(
        0.03, "policy lpm-aged: a token computed since a request arrived is worth so many cached", low=1e-4, high=1e3
    )
    ttft_target: float = option(
        2.0,
        "policy slack, delay_self_set: time to first token, of requests that name no target",
        unit="s",
        low=1e-3,
        high=86400,
    )
    forward_target: float | None = option(
        None, "cut prompts so that a forward takes so long; none: to chunk_size, the most in any case", low=1e-4
    )
    lookahead: int = option(
        0, "of requests behind one that memory is too short for, so many are tried; it cannot be starved by them", low=0
    )
    preemption_threshold: int | None = option(
        10, "with priorities: one that is ahead by more than this may take the place of others; none: never", low=0
    )
    random_seed: int = option(0, "of the random policy")
    log_passes: Path | None = option(None, "append a line of JSON for every scheduling pass to this file; none: do not")

    def problems(self) -> Iterable[str]:
        yield from combination_problems(
            self.policy, cache_enabled=self.prefix_cache, priorities=self.priority_scheduling
        )
        yield from host_pool_problems(self.host_kv_memory)
        if self.log_passes is not None and (why := _cannot_write(self.log_passes)):
            yield f"log_passes: cannot write {self.log_passes}: {os.strerror(why)}"
        if self.host_kv_memory is not None and not self.prefix_cache:
            yield f"host_kv_memory is {self.host_kv_memory}; allowed without prefix_cache: none, as no page is cached"
        if self.forward_target is not None and self.chunk_size is None:
            yield f"forward_target is {self.forward_target:g}; allowed with chunk_size none: none, since none is cut"


def _cannot_write(path: Path) -> int | None:
    """Why not, as far as it shows before the file is opened: who reads a pipe would notice that."""
    try:
        if path.is_dir():
            return errno.EISDIR
        if not path.exists() and not path.parent.is_dir():
            return errno.ENOENT
        return None if os.access(path if path.exists() else path.parent, os.W_OK) else errno.EACCES
    except OSError as error:  # a name too long, say
        return error.errno
