"""The scheduling pass of a prefill node: what the next forward computes, and what becomes of the pages.

Synchronous and pure: no tensor, thread or socket. The engine loop calls, in this order and from one thread:

    submit ─► grant ─► next_batch ─► (forward) ─► complete_forward ─► (writes) ─► finish
    bootstrap  waiting    │ order, touch, admit,      │ cache finished pages,        │ unlock, free the
    queue      queue      │ allocate                  │ name those to send           │ private pages
                          └── the continuation ◄──────┤
                                                      └─► in-flight queue

Queues, their producers and consumers: the bootstrap queue is filled by `submit` and emptied by `grant`; the waiting
queue by `grant` and `next_batch`; the in-flight queue by `complete_forward` and `finish`. `abort` may take a
request out of any of them; one that was admitted stays, marked, until `finish` says that nothing reads its pages.

Page ownership: free | cache (evictable, or protected by the one lock of each admitted request) | held by a room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.core.clock import Clock, monotonic
from engine.core.errors import AlreadyExists, ConfigError, InvalidField
from engine.core.lifetime import LifetimeEvent, Timeline
from engine.core.page_keys import page_keys
from engine.core.room_budget import longest_prompt, never_fits_unified
from engine.core.types import PrefillTask, RoomKey
from engine.device.page_allocator import PageAllocator
from prefill_service.adder import Adder, Attempt, shortest_first_limit
from prefill_service.admission import Admission
from prefill_service.cost_model import CostModel
from prefill_service.host_tier import TierCopies
from prefill_service.options import SchedulerConfig
from prefill_service.policy import Policy, QueueOrder, without_cache
from prefill_service.preemption import Decoding, Ranking, choose_victims
from prefill_service.prefix_cache import CACHE, PrefixCache
from prefill_service.records import BatchRow, PassRecord, PrefillBatch, SchedulerStats, SendSpan
from prefill_service.request import PrefillRequest, RequestState, sibling_key
from prefill_service.request_pages import RequestPages

__all__ = ["BatchRow", "Decoding", "PassRecord", "PrefillBatch", "Scheduler", "SchedulerStats", "SendSpan"]


class Scheduler:
    """Owns the queues and decides over the pages of `allocator`, which cache and allocator share with nobody else.

    on_pass, if given, gets a record of every pass that had something to decide. decoding, if given: requests decode
    here once they are prefilled, and the in-flight queue is theirs.
    Raises ConfigError when the options contradict each other or do not go with the page size.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        allocator: PageAllocator,
        page_size: int,
        clock: Clock = monotonic,
        on_pass: Callable[[PassRecord], None] | None = None,
        decoding: Decoding | None = None,
    ):
        problems = list(config.problems())
        if config.chunk_size is not None and config.chunk_size < page_size:
            problems.append(f"chunk_size is {config.chunk_size}; allowed: at least the page size, {page_size}")
        if longest_prompt(allocator.num_pages, page_size) < 1:
            pool = f"{allocator.num_pages} pages of {page_size} tokens"
            problems.append(f"num_pages: {pool} hold no prompt, which takes its tokens, one more and a page")
        if problems:
            raise ConfigError(problems)
        self._config = config
        self._cache = cache
        self._allocator = allocator
        self._page_size = page_size
        self._clock = clock
        self._on_pass = on_pass
        self._decoding = decoding
        self._pages = RequestPages(cache, allocator, page_size, low_priority_first=config.low_priority_first)
        threshold = config.preemption_threshold if config.priority_scheduling else None
        self._ranking = None if threshold is None else Ranking(threshold, config.low_priority_first)
        self._costs = CostModel()
        self._order = QueueOrder(
            config.policy if config.prefix_cache else without_cache(config.policy),
            cache,
            page_size,
            priorities=config.priority_scheduling,
            low_priority_first=config.low_priority_first,
            dedup_cached_tokens=config.dedup_cached_tokens,
            dedup_weighed=config.dedup_weighed,
            dedup_cost_tokens=config.dedup_cost_tokens,
            match_limit=config.prefix_match_queue_limit,
            age_credit=config.age_credit,
            costs=self._costs,
            seed=config.random_seed,
        )
        self._requests: dict[RoomKey, PrefillRequest] = {}  # every one that has not ended
        self._bootstrap: dict[RoomKey, PrefillRequest] = {}
        self._waiting: list[PrefillRequest] = []
        self._in_flight: dict[RoomKey, PrefillRequest] = {}
        self._passed: dict[RoomKey, int] = {}  # admitted past a blocked head: what they may come to hold, in tokens
        self._continuation: PrefillRequest | None = None
        self._forward: PrefillBatch | None = None
        self._mixed = 0  # decode rows that share the forward
        self._passes = 0
        self._submitted = 0
        self._computed_tokens = 0
        self._cached_tokens = 0
        self._host_hit_tokens = 0

    # ---- requests come and go ----

    def submit(self, task: PrefillTask) -> PrefillRequest:
        """Take a request in. Raises AlreadyExists for a live room, InvalidField for one that can never run here."""
        if task.key in self._requests:
            raise AlreadyExists(f"room {task.key} is being prefilled")
        self._check(task)
        config = self._config
        request = PrefillRequest(
            task=task,
            keys=task.page_keys if config.prefix_cache else (),
            sibling=sibling_key(task, config.dedup_shared_tokens),
            priority=task.priority if config.priority_scheduling else None,
            node=self._cache.root,
            times=Timeline(self._clock),
            arrival_tokens=self._computed_tokens,
        )
        target = config.ttft_target if task.ttft_target is None else task.ttft_target
        request.deadline = request.times.stamp(LifetimeEvent.ARRIVED) - task.waited + target
        self._requests[task.key] = self._bootstrap[task.key] = request
        self._submitted += 1
        return request

    def grant(self, key: RoomKey) -> PrefillRequest | None:
        """A decode node has set pages aside: let the request compete. None: no request of this room awaits a grant."""
        request = self._bootstrap.pop(key, None)
        if request is not None:
            request.state = RequestState.WAITING
            request.queue_time = request.times.stamp(LifetimeEvent.GRANTED)
            self._waiting.append(request)
        return request

    def get(self, key: RoomKey) -> PrefillRequest | None:
        """The request of a room, until it ends."""
        return self._requests.get(key)

    def abort(self, key: RoomKey) -> PrefillRequest | None:
        """End a request in any state; None when there is none. Its state tells what is left to do.

        ENDED: it held nothing, and is gone. Otherwise it was admitted: it computes no further chunk, and keeps its
        pages until `finish`, which the caller owes in any case.
        """
        request = self._requests.get(key)
        if request is None:
            return None
        request.aborted = True
        if request.state is RequestState.BOOTSTRAP:
            del self._bootstrap[key]
            self._end(request)
        elif request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._end(request)
        elif request is self._continuation and not self._in_forward(request):
            self._settle(request)
        return request

    def finish(self, key: RoomKey) -> PrefillRequest | None:
        """Every write of a room is terminal and none will follow: free what it holds. None: no such request.

        Owed once for each admitted request, after its last chunk or after it was aborted.
        """
        request = self._requests.get(key)
        if request is None:
            return None
        assert request.aborted or request.state is RequestState.IN_FLIGHT
        request.times.stamp(LifetimeEvent.LAST_WRITE)
        request.writes_terminal = True
        if request.state is RequestState.IN_FLIGHT:
            del self._in_flight[key]
            self._release(request)
        return request  # one in a forward, which still writes its pages, goes when that ends

    # ---- requests that decode here ----

    @property
    def in_flight(self) -> tuple[PrefillRequest, ...]:
        """Prefilled requests that have not ended, in the order of their last chunks."""
        return tuple(self._in_flight.values())

    @property
    def waiting(self) -> Sequence[PrefillRequest]:
        """The waiting queue, in its order."""
        return self._waiting

    @property
    def continuation(self) -> PrefillRequest | None:
        """The prompt that is partly computed, between two forwards."""
        return self._continuation

    def grow(self, request: PrefillRequest, tokens: int) -> bool:
        """Give a request in flight the pages of `tokens` tokens, evicting what is missing. False: memory is short."""
        return self._pages.grow(request, tokens)

    def store(self, request: PrefillRequest, token_ids: Sequence[int]) -> None:
        """Cache the whole pages of a request in flight. token_ids: all whose KV is in its pages."""
        if self._config.prefix_cache:
            request.keys = page_keys(token_ids, self._page_size, request.task.extra_key)
            request.computed = request.end = request.length = len(token_ids)
            self._pages.keep(request)

    def requeue(self, key: RoomKey, task: PrefillTask) -> None:
        """Let a request in flight, or the continuation, wait again, at the head. What it has computed stays cached.

        task: of the same room. That of one in flight ends with the last token generated, whose KV is not yet computed.
        """
        request = self._requests[key]
        assert self._forward is None
        assert not request.aborted
        assert task.key == key
        if request is self._continuation:
            self._continuation = None
        else:
            del self._in_flight[key]
            self.store(request, task.token_ids[:-1])
        self._pages.give_back(request)
        request.wait_again(task, task.page_keys if self._config.prefix_cache else ())
        self._passed.pop(key, None)
        self._waiting.insert(0, request)

    # ---- the pass ----

    def next_batch(self, mixed: int = 0, slots: int | None = None) -> PrefillBatch | None:
        """Decide about the next forward and allocate its pages. None when nothing can run now.

        Either way `take_copies` comes next.
        mixed: decode rows that share the forward. slots: requests that may be admitted; None: no limit. Either may
        change what is in flight, since requests may be preempted.
        """
        assert self._forward is None, "complete_forward or abandon_forward comes first"
        if not self._waiting and self._continuation is None:
            return None
        self._passes += 1
        lengths = len(self._bootstrap), len(self._waiting), len(self._in_flight)
        in_effect = self._order.sort(
            self._waiting,
            processed_tokens=self._computed_tokens,
            running_keys=self._routing_keys(),
            continuation=self._continuation,
        )
        self._touch_waiting()
        continues = self._continuation is not None
        attempts = self._admit(in_effect, mixed, slots)
        self._mixed = min(mixed, len(self._in_flight))  # some may have been preempted
        rows = self._build(attempts)
        if self._on_pass is not None:
            found = sum(row.start for row in rows if row.admitted)
            record = PassRecord(
                self._passes, self._clock(), self._config.policy, in_effect, *lengths,
                sum(row.end - row.start for row in rows), found, tuple(attempts), continues,
                self._order.deferred(self._waiting),
            )  # fmt: skip
            self._on_pass(record)
        if not rows:
            return None
        self._forward = PrefillBatch(rows)
        return self._forward

    def take_copies(self) -> TierCopies:
        """Copies between device and host pool that are owed since the last call, because of `grow` or `next_batch`.

        The caller executes them before it writes, sends or computes on any page.
        """
        return self._cache.take_copies()

    def complete_forward(self, batch: PrefillBatch, seconds: float | None = None) -> list[SendSpan]:
        """The forward of `batch` is done: cache its whole pages and name those that may be sent now.

        There is a span for each row that was not aborted, even when it names no page. Finished requests move to the
        in-flight queue. seconds: how long the forward took, if that is known.
        """
        assert batch is self._forward
        if seconds is not None:
            self._costs.observe(batch.tokens + self._mixed, batch.pairs, seconds)
        self._forward = None
        spans = []
        for row in batch.rows:
            request = row.request
            request.computed = row.end
            request.chunks += 1
            request.times.chunk_done(row.end, row.end - row.start)
            self._computed_tokens += row.end - row.start
            self._pages.keep(request)
            if not request.aborted:
                final = len(request.pages) if row.is_last else row.end // self._page_size
                spans.append(SendSpan(request, request.sent, tuple(request.pages[request.sent : final]), row.is_last))
                request.sent = final
            if row.is_last or request.aborted:
                self._settle(request)
        return spans

    def abandon_forward(self, batch: PrefillBatch) -> list[PrefillRequest]:
        """The forward of `batch` failed: what it computed is worth nothing. Its requests are aborted and returned."""
        assert batch is self._forward
        self._forward = None
        for row in batch.rows:
            row.request.aborted = True
            self._settle(row.request)
        return [row.request for row in batch.rows]

    def _admit(self, policy: Policy, mixed: int, slots: int | None) -> list[Attempt]:
        config, decoding, chunk = self._config, self._decoding, self._chunk(mixed)
        adder = Adder(
            self._cache,
            self._allocator,
            self._page_size,
            max_prefill_tokens=config.max_prefill_tokens,
            chunk_size=chunk,
            max_requests=config.max_batch_requests,
            decodes=decoding is not None,
            mixed=mixed,
            growth=sum(decoding.growth(request) for request in self._in_flight.values()) if decoding else 0.0,
        )
        admission = Admission(
            adder,
            self._allocator.num_pages * self._page_size,
            lookahead=config.lookahead,
            passed=self._passed,
            slots=slots,
            make_way=lambda request, short, slots: self._make_way(adder, request, short, slots),
        )
        waiting = self._order.admissible(self._waiting)
        limit = None if chunk is None else self._continuation_limit(policy, waiting, chunk - mixed)
        admission.run(self._continuation, limit, waiting)
        self._continuation = adder.continuation
        return admission.attempts

    def _chunk(self, mixed: int) -> int | None:
        """Tokens of this forward: as many as take the time it may take, after the history of whoever goes first."""
        config, page_size = self._config, self._page_size
        first = self._continuation or next(iter(self._waiting), None)
        if config.forward_target is None or config.chunk_size is None or not self._costs.measured or first is None:
            return config.chunk_size
        history = first.computed or first.matched
        chunk = self._costs.chunk_for(config.forward_target, history, page_size, config.chunk_size)
        return min(config.chunk_size, max(chunk, page_size + mixed))

    def _continuation_limit(self, policy: Policy, waiting: Sequence[PrefillRequest], budget: int) -> int | None:
        """So that the head of the queue fits beside it: the shorter ones, or those of much higher priority."""
        continuation = self._continuation
        if continuation is None:
            return None
        if policy is Policy.SHORTEST:
            return shortest_first_limit(waiting, continuation.uncached, budget, self._page_size)
        if self._ranking is None:
            return None
        memory = (self._allocator.available + self._cache.evictable) * self._page_size
        return self._ranking.reserved(waiting, continuation, budget, self._page_size, memory)

    def _make_way(self, adder: Adder, newcomer: PrefillRequest, short: float, slots: int) -> bool:
        """Preempt for a request of much higher priority. Only where requests decode: pages that are being sent stay."""
        if self._ranking is None or self._decoding is None:
            return False
        may_wait = self._decoding.may_wait
        running = [request for request in self._in_flight.values() if not request.aborted and may_wait(request)]
        node = newcomer.reusable(self._page_size)
        self._cache.lock(node)  # what it shares with a victim stays protected by it, and so is no gain
        victims = choose_victims(newcomer, running, self._ranking, short, self._gain, slots)
        self._cache.unlock(node)
        for victim in victims:
            adder.give_back(self._decoding.growth(victim))
            self.requeue(victim.key, self._decoding.preempt(victim))
        return bool(victims)

    def _gain(self, request: PrefillRequest) -> float:
        """Tokens of memory that a decoding request gives back when it waits again."""
        assert self._decoding is not None
        return self._decoding.growth(request) + self._pages.returns(request) * self._page_size

    def _build(self, attempts: Iterable[Attempt]) -> tuple[BatchRow, ...]:
        """Give what was admitted its pages."""
        granted = [attempt for attempt in attempts if attempt.extend]
        self._pages.take(granted)
        rows = []
        for attempt in granted:
            request = attempt.request
            if request.state is RequestState.WAITING:
                request.state = RequestState.RUNNING
                request.sent = request.node.depth
                request.cached_tokens = request.computed
                if request.times.first(LifetimeEvent.ADMITTED) is None:  # and not again what it had computed itself
                    self._cached_tokens += request.cached_tokens
                else:
                    request.times.stamp(LifetimeEvent.RESUMED)
                request.times.stamp(LifetimeEvent.ADMITTED)
                self._host_hit_tokens += attempt.loaded
            start, is_last = request.computed, request.end == request.length
            admitted = request.chunks == 0
            rows.append(BatchRow(request, start, request.end, is_last, tuple(request.pages), admitted))
        self._waiting = [request for request in self._waiting if request.state is RequestState.WAITING]
        return tuple(rows)

    def _touch_waiting(self) -> None:
        """Stamp the cached prefixes of all that wait: the head of the waiting queue last, since it runs first."""
        cache, page_size = self._cache, self._page_size
        for request in self._from_the_back():
            request.observe(cache.match(request.keys, request.node), page_size)
            cache.touch(request.node, request.keys)

    def _from_the_back(self) -> Iterator[PrefillRequest]:
        yield from reversed(self._bootstrap.values())
        yield from reversed(self._waiting)

    def _routing_keys(self) -> Counter[str] | None:
        if self._order.policy is not Policy.ROUTING_KEY:
            return None
        admitted = (*self._in_flight.values(), *([self._continuation] if self._continuation else []))
        return Counter(request.task.routing_key for request in admitted if request.task.routing_key)

    # ---- how they end ----

    def _settle(self, request: PrefillRequest) -> None:
        """No chunk is left to compute: in flight until every write is terminal."""
        if request is self._continuation:
            self._continuation = None
        if request.writes_terminal:
            self._release(request)
        else:
            request.state = RequestState.IN_FLIGHT
            self._in_flight[request.key] = request

    def _release(self, request: PrefillRequest) -> None:
        self._pages.give_back(request)
        self._passed.pop(request.key, None)
        self._end(request)

    def _end(self, request: PrefillRequest) -> None:
        request.state = RequestState.ENDED
        del self._requests[request.key]

    def _in_forward(self, request: PrefillRequest) -> bool:
        return self._forward is not None and any(row.request is request for row in self._forward.rows)

    def _check(self, task: PrefillTask) -> None:
        length = len(task.token_ids)
        most = longest_prompt(self._allocator.num_pages, self._page_size)
        if not 1 <= length <= most:
            limit = f"1 to {most} tokens, the room on this node"
            raise InvalidField("token_ids", length, limit)
        if self._decoding is not None:
            left, pages = task.stopping.max_new_tokens - task.first_index, self._allocator.num_pages
            refusal = never_fits_unified(length, left, pages, self._page_size, resumed=task.first_index > 0)
            if refusal is not None:
                raise refusal
        if len(task.page_keys) != length // self._page_size:
            limit = f"one for each whole page of {self._page_size} tokens: {length // self._page_size}"
            raise InvalidField("page_keys", len(task.page_keys), limit)
        if task.priority is not None and self._config.refuse_priority and not self._config.priority_scheduling:
            raise InvalidField("priority", task.priority, "none, since priority scheduling is off")

    # ---- what others may see ----

    def stats(self) -> SchedulerStats:
        cached = self._allocator.owned(CACHE)
        running = [r for r in self._requests.values() if r.state is RequestState.RUNNING]
        queued = (*self._bootstrap.values(), *self._waiting, *running)
        return SchedulerStats(
            bootstrap=len(self._bootstrap),
            waiting=len(self._waiting),
            running=len(running),
            in_flight=len(self._in_flight),
            queued_tokens=sum(request.uncached for request in queued),
            num_pages=self._allocator.num_pages,
            free=self._allocator.available,
            evictable=self._cache.evictable,
            protected=self._cache.protected,
            held=self._allocator.num_pages - self._allocator.available - cached,
            passes=self._passes,
            requests_total=self._submitted,
            computed_tokens_total=self._computed_tokens,
            cached_tokens_total=self._cached_tokens,
            host_pages=self._cache.host_pages,
            host_free=self._cache.host_free,
            host_hit_tokens_total=self._host_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Assert that pages, locks and queues account for each other."""
        self._allocator.check_integrity()
        locks = self._cache.check_integrity()
        by_state: dict[RequestState, list[PrefillRequest]] = {state: [] for state in RequestState}
        for request in self._requests.values():
            by_state[request.state].append(request)
            assert request.computed <= request.end <= request.length
        assert by_state[RequestState.BOOTSTRAP] == list(self._bootstrap.values())
        assert set(by_state[RequestState.WAITING]) == set(self._waiting)
        assert len(by_state[RequestState.WAITING]) == len(self._waiting), "a request waits twice"
        assert set(by_state[RequestState.IN_FLIGHT]) == set(self._in_flight.values())
        for request in by_state[RequestState.RUNNING]:
            assert request is self._continuation or self._in_forward(request), "a request is in no queue"
        admitted = by_state[RequestState.RUNNING] + by_state[RequestState.IN_FLIGHT]
        assert locks == len(admitted), "an admitted request holds exactly one lock, any other none"
        self._pages.check_integrity(admitted)
        stats = self.stats()
        assert stats.held == sum(len(request.private_pages) for request in admitted)
        assert stats.free + stats.evictable + stats.protected + stats.held == stats.num_pages
