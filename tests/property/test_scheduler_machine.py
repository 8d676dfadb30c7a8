"""The scheduler with a fake engine round it: requests come, are computed, sent, aborted and released in any order.

The fake engine keeps what each page holds, as the sequence of tokens whose KV it would be. So a page that is handed to
a second owner, evicted under a reader, remapped wrongly, or read before it is back from the host shows up as foreign
content, as it would in an answer.
"""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.clock import ManualClock
from engine.core.errors import InvalidField
from engine.core.page_keys import page_keys
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import PrefillTask, RoomKey, ceil_div
from engine.device.page_allocator import PageAllocator
from prefill_service.options import SchedulerConfig
from prefill_service.policy import Policy
from prefill_service.prefix_cache import Eviction, PrefixCache
from prefill_service.request import PrefillRequest, RequestState
from prefill_service.scheduler import PassRecord, PrefillBatch, Scheduler

PAGE = 2
Tokens = tuple[int, ...]

# Prompts share beginnings: a run of zeros, then a run of ones or twos, then tokens that few others have.
PROMPTS = st.builds(
    lambda stem, token, branch, tail: (0,) * stem + (token,) * branch + tail,
    st.sampled_from([0, 6, 7, 12]),
    st.integers(1, 2),
    st.sampled_from([0, 1, 4, 6]),
    st.lists(st.integers(3, 4), max_size=14).map(tuple),
)
CONFIGS = st.builds(
    SchedulerConfig,
    policy=st.sampled_from(Policy),
    chunk_size=st.sampled_from([None, 2, 5, 8, 16, 24]),
    max_prefill_tokens=st.sampled_from([16, 1000]),
    max_batch_requests=st.sampled_from([None, None, 2]),
    eviction=st.sampled_from(Eviction),
    dedup_shared_tokens=st.sampled_from([-1, 4, 6]),
    prefix_match_queue_limit=st.sampled_from([None, 2]),
    lookahead=st.sampled_from([0, 0, 1, 4]),
    dedup_weighed=st.sampled_from([False, False, True]),
    dedup_cost_tokens=st.sampled_from([0, 4]),
    forward_target=st.sampled_from([None, None, 0.08]),
).filter(lambda config: not list(config.problems()))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        config=CONFIGS,
        num_pages=st.integers(8, 40),
        host_pages=st.sampled_from([0, 0, 3, 10, 60]),
        cached=st.sampled_from([True, True, True, False]),
    )
    def start(self, config: SchedulerConfig, num_pages: int, host_pages: int, cached: bool) -> None:
        if not cached:
            config = SchedulerConfig(chunk_size=config.chunk_size, prefix_cache=False)
        self.config = config
        self.allocator = PageAllocator(num_pages)
        self.cache = PrefixCache(self.allocator, config.eviction, PageAllocator(host_pages) if host_pages else None)
        self.clock = ManualClock()
        self.records: list[PassRecord] = []
        self.scheduler = Scheduler(config, self.cache, self.allocator, PAGE, self.clock, self.records.append)
        self.live: dict[RoomKey, PrefillRequest] = {}
        self.batch: PrefillBatch | None = None
        self.content: dict[int, Tokens] = {}  # page -> the sequence up to its last token, as the engine left it
        self.host_content: dict[int, Tokens] = {}
        self.posted: dict[RoomKey, dict[int, Tokens]] = {}  # pages that writes may be reading
        self.sent: dict[RoomKey, int] = {}  # pages of a request named so far
        self.numbers = itertools.count()

    # ---- the engine ----

    def copy(self) -> None:
        """Execute the copies that are owed, one after another."""
        copies = self.scheduler.take_copies()
        for source, target in zip(copies.offloads.sources, copies.offloads.targets, strict=True):
            self.host_content[target] = self.content[source]
        for source, target in zip(copies.loads.sources, copies.loads.targets, strict=True):
            self.content[target] = self.host_content[source]

    def compute(self, batch: PrefillBatch) -> None:
        """Write what the forward writes. What it reads must be this very prompt's."""
        for row in batch.rows:
            tokens = row.request.task.token_ids
            assert 0 <= row.start < row.end <= len(tokens)
            assert row.start % PAGE == 0
            assert len(row.pages) == ceil_div(row.end, PAGE)
            for index in range(row.start // PAGE):
                assert self.content[row.pages[index]] == tokens[: (index + 1) * PAGE], "reads a foreign page"
        for row in batch.rows:
            for index in range(row.start // PAGE, len(row.pages)):
                self.content[row.pages[index]] = row.request.task.token_ids[: min((index + 1) * PAGE, row.end)]

    def post(self, request: PrefillRequest, first: int, pages: Tokens) -> None:
        """Name pages to the sender, each of them once and in order."""
        assert self.sent.get(request.key, 0) == first
        self.sent[request.key] = first + len(pages)
        for index, page in enumerate(pages, first):
            assert self.content[page] == request.task.token_ids[: (index + 1) * PAGE], "sends a foreign page"
            self.posted.setdefault(request.key, {})[page] = self.content[page]

    # ---- what may happen ----

    @rule(tokens=PROMPTS, granted=st.sampled_from([True, True, False]), priority=st.sampled_from([None, 0, 3]))
    def submit(self, tokens: Tokens, granted: bool, priority: int | None) -> None:
        number = next(self.numbers)
        task = PrefillTask(
            request_id=f"r{number}",
            key=RoomKey(number, 0),
            token_ids=tokens,
            first_index=0,
            page_keys=page_keys(tokens, PAGE),
            sampling=SamplingParams(),
            stopping=StoppingParams(4),
            priority=priority,
            routing_key="ab"[number % 2],
        )
        try:
            self.live[task.key] = self.scheduler.submit(task)
        except InvalidField:
            assert not tokens or len(tokens) + 1 + PAGE >= self.allocator.num_pages * PAGE
            return
        if granted:
            assert self.scheduler.grant(task.key) is self.live[task.key]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.live)))
        waits = self.live[key].state is RequestState.BOOTSTRAP
        assert (self.scheduler.grant(key) is not None) == waits

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.live)))
        request = self.scheduler.abort(key)
        assert request is self.live[key]
        self.forget_ended()

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self) -> None:
        self.clock.advance(1)
        self.batch = self.scheduler.next_batch()
        self.copy()
        if self.batch is None:
            return
        budget = self.config.chunk_size
        charges = sum(ceil_div(row.end - row.start, PAGE) * PAGE for row in self.batch.rows)
        assert budget is None or charges <= budget
        assert sum(not row.is_last for row in self.batch.rows) <= 1, "two continuations"
        assert self.config.max_batch_requests is None or len(self.batch.rows) <= self.config.max_batch_requests
        for row in self.batch.rows:
            assert row.is_last or row.end % PAGE == 0
            if row.admitted:
                self.post(row.request, 0, row.pages[: row.start // PAGE])
        self.compute(self.batch)

    @precondition(lambda self: self.batch is not None)
    @rule()
    def complete(self) -> None:
        assert self.batch is not None
        spans = self.scheduler.complete_forward(self.batch, 0.01 * (1 + self.batch.tokens))
        going_on = [row.request for row in self.batch.rows if not row.request.aborted]
        assert [span.request for span in spans] == going_on
        self.batch = None
        for span in spans:
            self.post(span.request, span.first, span.pages)
            if span.is_last:
                assert self.sent[span.request.key] == ceil_div(span.request.length, PAGE)
        self.forget_ended()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def fail(self) -> None:
        assert self.batch is not None
        failed = self.scheduler.abandon_forward(self.batch)
        assert failed == [row.request for row in self.batch.rows]
        for row in self.batch.rows:  # nobody knows what the failed forward has left in its pages
            for page in row.pages[row.start // PAGE :]:
                self.content[page] = (-1,)
        self.batch = None
        self.forget_ended()

    @precondition(lambda self: any(self.owes(request) for request in self.live.values()))
    @rule(data=st.data())
    def writes_done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([r.key for r in self.live.values() if self.owes(r)]))
        self.posted.pop(key, None)
        assert self.scheduler.finish(key) is self.live[key]
        self.forget_ended()

    def owes(self, request: PrefillRequest) -> bool:
        """Whether `finish` may be said of it now."""
        running = request.aborted and request.state is RequestState.RUNNING and not request.writes_terminal
        return running or request.state is RequestState.IN_FLIGHT

    def forget_ended(self) -> None:
        for key, request in list(self.live.items()):
            if request.state is RequestState.ENDED:
                assert self.scheduler.get(key) is None
                assert key not in self.posted, "pages were given back while writes read them"
                del self.live[key]

    # ---- what must always hold ----

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.scheduler.check_integrity()
        for pages in self.posted.values():
            assert all(self.content[page] == tokens for page, tokens in pages.items()), "overwritten while being read"
        cached = self.cache.keys()
        for key in cached:
            node = self.cache.find(key)
            tokens = self.content[node.page] if node.host < 0 else self.host_content[node.host]
            assert page_keys(tokens, PAGE)[-1] == key, "a cached page does not hold what its key says"

    @invariant()
    def refusals_hold_nothing(self) -> None:
        for record in self.records:
            for attempt in record.attempts:
                assert attempt.extend >= 0
                if attempt.extend == 0:
                    assert attempt.before == attempt.after
        self.records.clear()
        for request in self.live.values():
            if request.state in (RequestState.BOOTSTRAP, RequestState.WAITING):
                assert not request.pages
                assert request.end == 0

    def teardown(self) -> None:
        """Everybody is served in the end, and every page is then free or cached."""
        if not hasattr(self, "scheduler"):
            return
        if self.batch is not None:
            self.complete()
        for key in list(self.live):
            self.scheduler.grant(key)
        while self.live:
            before = len(self.live), sum(request.computed for request in self.live.values())
            for request in list(self.live.values()):
                if self.owes(request):
                    self.posted.pop(request.key, None)
                    self.scheduler.finish(request.key)
            self.forget_ended()
            self.schedule()
            if self.batch is not None:
                self.complete()
            after = len(self.live), sum(request.computed for request in self.live.values())
            assert before != after, "nothing is in flight, and yet nothing can run"
            self.everything_is_accounted_for()
        stats = self.scheduler.stats()
        assert (stats.held, stats.protected) == (0, 0)
        assert stats.free + stats.evictable == self.allocator.num_pages


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
