"""What every engine that computes prompts has in common, whether it then sends their pages or decodes on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from torch import Tensor

from engine.core.clock import Clock
from engine.core.errors import KVRelayError
from engine.core.handoff import HandoffState
from engine.core.lifetime import LifetimeEvent
from engine.core.loop import EngineLoop, Link
from engine.core.messages import NodeStats, PrefillReport, RoomFailed
from engine.core.metrics import Metrics, NodeMetric
from engine.core.node_config import NodeConfig
from engine.core.room_checks import check_room
from engine.core.types import PrefillTask
from engine.device.batch import Row, build_batch
from engine.device.page_allocator import PageAllocator
from engine.device.setup import NodeDevice
from prefill_service.announce import announce_all
from prefill_service.compute_rate import ComputeRate
from prefill_service.journal import PassJournal, PassLog
from prefill_service.options import SchedulerConfig
from prefill_service.prefix_cache import PrefixCache
from prefill_service.request import PrefillRequest
from prefill_service.scheduler import BatchRow, Decoding, PassRecord, Scheduler
from prefill_service.tier_copier import TierCopier

__all__ = ["PromptEngine"]

CANARY_TOKENS = 16
Event = TypeVar("Event")


class PromptEngine(EngineLoop[Event]):
    """Owns scheduler, prefix cache and page pool of a node, and the records of its passes."""

    def __init__(
        self,
        name: str,
        device: NodeDevice,
        node: NodeConfig,
        scheduler: SchedulerConfig,
        metrics: Metrics,
        clock: Clock,
        pass_log: PassLog | None,
        decoding: Decoding | None = None,
    ):
        self._passes = PassJournal(clock)
        self._pass_log = pass_log
        super().__init__(name, metrics, node.stall_timeout, clock, self._passes)
        self._device = device
        self._page_size = device.layout.page_size
        allocator = PageAllocator(device.pool.num_pages)
        host = None if device.host_pool is None else PageAllocator(device.host_pool.num_pages)
        self._cache = PrefixCache(allocator, scheduler.eviction, host)
        self._copier = TierCopier(device.pool, device.host_pool)
        self._scheduler = Scheduler(scheduler, self._cache, allocator, self._page_size, clock, self._on_pass, decoding)
        self._rate = ComputeRate()
        self._outputs = 0

    def warm_up(self) -> None:
        self._device.bind()
        tokens = min(CANARY_TOKENS, self._page_size)
        self._try_out(Row([0] * tokens, 0, [0], True))

    def link_up(self, link: Link) -> None:
        announce_all(self._cache, link)

    def _try_out(self, row: Row) -> None:
        assert self._forward([row]).isfinite().all(), "the canary's logits are not finite"

    def _take_on(self, task: PrefillTask, link: Link) -> PrefillRequest | None:
        """Submit a task. None: it is refused, and the front door has been told."""
        vocab_size = self._device.model.vocab_size
        try:
            check_room(len(task.token_ids), task.first_index, task.sampling, task.stopping, task.token_ids, vocab_size)
            request = self._scheduler.submit(task)
        except KVRelayError as error:
            phase = HandoffState.QUEUED.phase
            link.report(RoomFailed(task.key, phase, str(error), retriable=False, code=error.code))
            return None
        self.journal.arrived(task.request_id, task.key, len(task.token_ids), request.times)
        return request

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        return self._device.runner.forward(build_batch(rows, self._page_size, self._device.pool.device))

    @staticmethod
    def _row(row: BatchRow) -> Row:
        return Row(row.request.task.token_ids[row.start : row.end], row.start, row.pages, row.is_last)

    @staticmethod
    def _report(request: PrefillRequest) -> PrefillReport:
        """What goes with its first token, which has just been drawn."""
        times = request.times
        wait = times.between(LifetimeEvent.GRANTED, LifetimeEvent.ADMITTED) or 0.0
        prefill = times.between(LifetimeEvent.ADMITTED, LifetimeEvent.CHUNK_DONE) or 0.0
        times.stamp(LifetimeEvent.TOKEN_0)
        return PrefillReport(request.key, request.chunks, wait, prefill)

    def _on_pass(self, record: PassRecord) -> None:
        self._passes.on_pass(record)
        if self._pass_log is not None:
            self._pass_log.on_pass(record)

    def _measure(self, prompt_tokens: int, decoded: int, seconds: float) -> None:
        self._rate.observe(prompt_tokens, seconds)
        self.metrics.observe(NodeMetric.STEP_SECONDS, seconds)
        self.metrics.observe(NodeMetric.STEP_TOKENS, prompt_tokens + decoded)

    def collect_stats(self) -> NodeStats:
        stats = self._scheduler.stats()
        return NodeStats(
            pages_total=stats.num_pages,
            pages_free=stats.free,
            pages_cached=stats.evictable + stats.protected,
            pages_held=stats.held,
            ungranted=stats.bootstrap,
            waiting=stats.waiting,
            running=stats.running,
            transferring=stats.in_flight,
            queued_tokens=stats.queued_tokens,
            tokens_per_second=self._rate.value,
            requests_total=stats.requests_total,
            cached_tokens_total=stats.cached_tokens_total,
            computed_tokens_total=stats.computed_tokens_total,
            output_tokens_total=self._outputs,
            host_pages_total=stats.host_pages,
            host_pages_free=stats.host_free,
            host_pages_cached=stats.host_pages - stats.host_free,
            host_hit_tokens_total=stats.host_hit_tokens_total,
        )

    def _check_books(self, requests: Collection[PrefillRequest]) -> None:
        """Assert that scheduler, pool and journal are sound. requests: of this engine's rooms."""
        self._scheduler.check_integrity()
        self._device.pool.check_integrity()
        assert all(self._scheduler.get(one.key) is one for one in requests), "a room outlived its request"
        assert self.journal.live == {one.key for one in requests}, "the journal knows other rooms"
