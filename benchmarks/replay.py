"""Replays requests on the real scheduler, cache and allocator, with a forward that only takes time, on a virtual clock.

    arrives ─► submit ─(grant delay)─► grant ─► next_batch ─► forward: the clock moves on by what the cost model says
                                                     └─ cached pages ─┐    └─ finished pages ─┐
                                                                      └──► link, one after another ─► finish

A forward takes `fixed + per_token * tokens + per_pair * pairs` seconds; pairs: for each token computed, how many it
attends to. The time that decisions take is left out: see benchmarks/scheduler.py. A replay depends on its inputs alone.
"""

from __future__ import annotations

import heapq
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.core.clock import ManualClock
from engine.core.lifetime import LifetimeEvent
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import PrefillTask, RoomKey
from engine.device.page_allocator import PageAllocator
from prefill_service.adder import Verdict
from prefill_service.options import SchedulerConfig
from prefill_service.prefix_cache import PrefixCache
from prefill_service.request import PrefillRequest
from prefill_service.scheduler import PassRecord, PrefillBatch, Scheduler

__all__ = ["Arrival", "CostModel", "Outcome", "pairs", "replay"]

GRANT_DELAY_S = 0.02  # from arrival to the decode node's answer
WRITE_LATENCY_S = 0.005  # from the last byte to the notice that a room is done with


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a forward, and of what is sent. `source` says where the numbers come from."""

    fixed: float
    per_token: float
    per_pair: float
    token_bytes: int  # of K and V
    link_bytes: float  # a second
    source: str

    def seconds(self, tokens: int, pairs: float) -> float:
        return self.fixed + self.per_token * tokens + self.per_pair * pairs

    def of(self, batch: PrefillBatch) -> float:
        return self.seconds(batch.tokens, sum(pairs(row.start, row.end) for row in batch.rows))

    def of_prompt(self, start: int, end: int, chunk: int) -> float:
        """A prompt by itself, of which `start` tokens are cached."""
        chunks = -(-(end - start) // chunk)
        return chunks * self.fixed + self.per_token * (end - start) + self.per_pair * pairs(start, end)

    @classmethod
    def read(cls, path: Path) -> CostModel:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def pairs(start: int, end: int) -> float:
    """How many tokens the tokens at [start, end) attend to, themselves included, summed."""
    return (end - start) * (start + end + 1) / 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is still to come. Its tokens are made when it does: a long trace would not fit in memory."""

    time: float  # seconds
    tokens: Callable[[], tuple[int, ...]]
    page_keys: tuple[bytes, ...]
    max_new_tokens: int = 64
    target: float | None = None  # seconds to the first token; None: the scheduler's own
    after: int | None = None  # does not come before this one (its place among all) has its first token


@dataclass(frozen=True, slots=True)
class Outcome:
    prompt_tokens: int
    computed_tokens: int
    ttft: tuple[float, ...]  # seconds from arrival to the end of the last chunk, in the order of arrival
    waits: tuple[float, ...]  # seconds from grant to admission
    in_time: float  # share whose first token came within their target
    makespan: float  # seconds from the first arrival until the last request is done
    busy: float  # share of it spent in forwards
    passes: int
    short_passes: int  # that refused a request since memory was short

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed_tokens / self.prompt_tokens

    @property
    def mean_ttft(self) -> float:
        return statistics.fmean(self.ttft)

    @property
    def p99_ttft(self) -> float:
        return sorted(self.ttft)[int(0.99 * (len(self.ttft) - 1))]


class _Replay:
    def __init__(
        self, arrivals: Iterable[Arrival], config: SchedulerConfig, num_pages: int, page_size: int, cost: CostModel
    ):
        self.clock = ManualClock()
        self.cost = cost
        self.page_size = page_size
        allocator = PageAllocator(num_pages)
        cache = PrefixCache(allocator, config.eviction)
        self.scheduler = Scheduler(config, cache, allocator, page_size, self.clock, self.take_record)
        self.requests: list[PrefillRequest] = []
        self.short_passes = 0
        self.busy = 0.0
        self.link_free = 0.0  # when the link has sent all it was given
        self.answered: set[int] = set()
        self.held: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)  # until that one is answered
        self.order = itertools.count()
        self.events: list[tuple[float, int, Callable[[], object]]] = []
        for number, arrival in enumerate(arrivals):
            self.at(arrival.time, lambda n=number, a=arrival: self.come(n, a))  # type: ignore[misc]

    def take_record(self, record: PassRecord) -> None:
        self.short_passes += any(a.extend == 0 and a.verdict is Verdict.NO_TOKEN for a in record.attempts)

    def at(self, time: float, action: Callable[[], object]) -> None:
        heapq.heappush(self.events, (time, next(self.order), action))

    def come(self, number: int, arrival: Arrival) -> None:
        if arrival.after is None or arrival.after in self.answered:
            self.submit(number, arrival)
        else:
            self.held[arrival.after].append(lambda: self.submit(number, arrival))

    def submit(self, number: int, arrival: Arrival) -> None:
        task = PrefillTask(
            request_id=f"r{number}",
            key=RoomKey(number, 0),
            token_ids=arrival.tokens(),
            first_index=0,
            page_keys=arrival.page_keys,
            sampling=SamplingParams(),
            stopping=StoppingParams(arrival.max_new_tokens),
            ttft_target=arrival.target,
        )
        self.requests.append(self.scheduler.submit(task))
        self.at(self.clock.now + GRANT_DELAY_S, lambda: self.scheduler.grant(task.key))

    def send(self, pages: int) -> None:
        seconds = pages * self.page_size * self.cost.token_bytes / self.cost.link_bytes
        self.link_free = max(self.link_free, self.clock.now) + seconds

    def run(self) -> None:
        while True:
            while self.events and self.events[0][0] <= self.clock.now:
                heapq.heappop(self.events)[2]()
            batch = self.scheduler.next_batch()
            if batch is not None:
                self.forward(batch)
            elif self.events:
                self.clock.now = self.events[0][0]
            else:
                return

    def forward(self, batch: PrefillBatch) -> None:
        for row in batch.rows:
            if row.admitted:
                self.send(row.start // self.page_size)
        seconds = self.cost.of(batch)
        self.busy += seconds
        self.clock.advance(seconds)
        for span in self.scheduler.complete_forward(batch, seconds):
            self.send(len(span.pages))
            if span.is_last:
                key = span.request.key
                self.at(self.link_free + WRITE_LATENCY_S, lambda k=key: self.scheduler.finish(k))  # type: ignore[misc]
                self.answered.add(key.room)
                for come in self.held.pop(key.room, ()):
                    come()


def replay(
    arrivals: Sequence[Arrival], config: SchedulerConfig, num_pages: int, page_size: int, cost: CostModel
) -> Outcome:
    """`arrivals` are in the order of their times."""
    run = _Replay(arrivals, config, num_pages, page_size, cost)
    run.run()
    run.scheduler.check_integrity()
    stats = run.scheduler.stats()
    assert stats.requests_total == len(arrivals)
    assert stats.free + stats.evictable == stats.num_pages, "a request was never served"
    ttft, waits, late = [], [], 0
    for request in run.requests:
        answered = request.times.between(LifetimeEvent.ARRIVED, LifetimeEvent.CHUNK_DONE)
        waited = request.times.between(LifetimeEvent.GRANTED, LifetimeEvent.ADMITTED)
        assert answered is not None
        assert waited is not None
        ttft.append(answered)
        waits.append(waited)
        target = request.task.ttft_target
        late += target is not None and answered > target
    makespan = run.clock.now - arrivals[0].time
    return Outcome(
        prompt_tokens=sum(request.length for request in run.requests),
        computed_tokens=stats.computed_tokens_total,
        ttft=tuple(ttft),
        waits=tuple(waits),
        in_time=1 - late / len(ttft),
        makespan=makespan,
        busy=run.busy / makespan,
        passes=stats.passes,
        short_passes=run.short_passes,
    )
