"""A prefill node without its engine: the real scheduler, and forwards that succeed at once."""

from __future__ import annotations

import itertools

from engine.core.clock import ManualClock
from engine.core.page_keys import page_keys
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import PrefillTask, RoomKey
from engine.device.page_allocator import PageAllocator
from prefill_service.options import SchedulerConfig
from prefill_service.prefix_cache import PrefixCache
from prefill_service.request import PrefillRequest, RequestState
from prefill_service.scheduler import Decoding, PassRecord, PrefillBatch, Scheduler, SendSpan

PAGE = 4
_numbers = itertools.count()


def task(
    tokens: list[int], *, page_size: int = PAGE, priority: int | None = None, extra: str = "", routing_key: str = ""
) -> PrefillTask:
    number = next(_numbers)
    return PrefillTask(
        request_id=f"r{number}",
        key=RoomKey(number, 0),
        token_ids=tuple(tokens),
        first_index=0,
        page_keys=page_keys(tokens, page_size, extra),
        sampling=SamplingParams(),
        stopping=StoppingParams(64),
        priority=priority,
        routing_key=routing_key,
        extra_key=extra,
    )


class Node:
    """A prefill node without its engine: forwards succeed at once."""

    def __init__(self, num_pages: int = 64, decoding: Decoding | None = None, **config: object):
        self.config = SchedulerConfig(**config)  # type: ignore[arg-type]
        self.allocator = PageAllocator(num_pages)
        self.cache = PrefixCache(self.allocator, self.config.eviction)
        self.clock = ManualClock()
        self.records: list[PassRecord] = []
        self.scheduler = Scheduler(
            self.config, self.cache, self.allocator, PAGE, self.clock, self.records.append, decoding
        )

    def submit(self, *tokens: range, grant: bool = True, priority: int | None = None) -> PrefillRequest:
        request = self.scheduler.submit(task([t for run in tokens for t in run], priority=priority))
        if grant:
            self.scheduler.grant(request.key)
        return request

    def batch(self) -> PrefillBatch:
        batch = self.scheduler.next_batch()
        assert batch is not None
        self.scheduler.check_integrity()
        return batch

    def forward(self) -> tuple[PrefillBatch, list[SendSpan]]:
        batch = self.batch()
        spans = self.scheduler.complete_forward(batch)
        self.scheduler.check_integrity()
        return batch, spans

    def finish(self, request: PrefillRequest) -> None:
        """Run everything until `request` has ended."""
        while request.state is not RequestState.IN_FLIGHT:
            self.forward()
        self.scheduler.finish(request.key)
        self.scheduler.check_integrity()

    def assert_idle(self) -> None:
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (stats.held, stats.protected) == (0, 0), "every page is free or cached"
        assert stats.bootstrap == stats.waiting == stats.running == stats.in_flight == stats.queued_tokens == 0


def state(request: PrefillRequest) -> RequestState:
    """Its state now: a type checker believes that the attribute stays what it was last compared with."""
    return request.state
