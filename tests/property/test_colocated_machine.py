"""The scheduler of a node that prefills and decodes, with a fake engine round it that keeps what each page holds.

Requests come, are computed in chunks, decode a token a step beside the chunks of others, and are preempted, retracted
and aborted. The answer of each is a function of its prompt, so a page that changed hands under a reader shows up.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

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
from prefill_service.scheduler import PassRecord, Scheduler

PAGE = 2
MAX_RUNNING = 4
Tokens = tuple[int, ...]

PROMPTS = st.builds(
    lambda stem, tail: (0,) * stem + tail,
    st.sampled_from([0, 5, 8]),
    st.lists(st.integers(1, 3), min_size=1, max_size=16).map(tuple),
)
PRIORITIES = st.sampled_from([None, 0, 5, 20])


def answer(tokens: Tokens) -> int:
    """The token after these."""
    return 100 + hash(tokens) % 50


@dataclass(eq=False)
class Live:
    request: PrefillRequest
    prompt: Tokens
    tokens: Tokens  # prompt and answer so far


class ColocatedMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(10, 30),
        policy=st.sampled_from([Policy.FCFS, Policy.LPM, Policy.SHORTEST]),
        priorities=st.booleans(),
        chunk=st.sampled_from([None, 4, 10]),
        mixed=st.booleans(),
        eviction=st.sampled_from(Eviction),
        lookahead=st.sampled_from([0, 3]),
        ratio=st.sampled_from([0.0, 0.1, 0.5]),
        cached=st.booleans(),
    )
    def start(
        self,
        num_pages: int,
        policy: Policy,
        priorities: bool,
        chunk: int | None,
        mixed: bool,
        eviction: Eviction,
        lookahead: int,
        ratio: float,
        cached: bool,
    ) -> None:
        config = SchedulerConfig(
            policy=Policy.FCFS if priorities or not cached else policy,
            priority_scheduling=priorities,
            preemption_threshold=4,
            chunk_size=chunk,
            eviction=eviction,
            lookahead=lookahead,
            prefix_cache=cached,
        )
        self.config, self.ratio, self.mixed = config, ratio, mixed and chunk is not None
        self.allocator = PageAllocator(num_pages)
        self.cache = PrefixCache(self.allocator, eviction)
        self.records: list[PassRecord] = []
        self.scheduler = Scheduler(
            config, self.cache, self.allocator, PAGE, ManualClock(), self.records.append, decoding=self
        )
        self.live: dict[RoomKey, Live] = {}
        self.content: dict[int, Tokens] = {}
        self.numbers = itertools.count()
        self.preempted: list[PrefillRequest] = []

    # ---- what the scheduler asks ----

    def growth(self, request: PrefillRequest) -> float:
        return (request.max_new - len(self.out(request))) * self.ratio

    def may_wait(self, request: PrefillRequest) -> bool:
        return len(self.live[request.key].tokens) <= (self.allocator.num_pages - 1) * PAGE - 2

    def preempt(self, request: PrefillRequest) -> PrefillTask:
        self.preempted.append(request)
        return self.again(request)

    def out(self, request: PrefillRequest) -> Tokens:
        live = self.live[request.key]
        return live.tokens[len(live.prompt) :]

    def again(self, request: PrefillRequest) -> PrefillTask:
        tokens = self.live[request.key].tokens
        return replace(
            request.task, token_ids=tokens, first_index=len(self.out(request)), page_keys=page_keys(tokens, PAGE)
        )

    # ---- what may happen ----

    @rule(tokens=PROMPTS, priority=PRIORITIES, new=st.integers(1, 24))
    def submit(self, tokens: Tokens, priority: int | None, new: int) -> None:
        if ceil_div(len(tokens) + new, PAGE) * PAGE + PAGE >= self.allocator.num_pages * PAGE:
            return  # the front door refuses what could never end here
        number = next(self.numbers)
        task = PrefillTask(
            request_id=f"r{number}",
            key=RoomKey(number, 0),
            token_ids=tokens,
            first_index=0,
            page_keys=page_keys(tokens, PAGE),
            sampling=SamplingParams(),
            stopping=StoppingParams(new),
            priority=priority,
        )
        try:
            request = self.scheduler.submit(task)
        except InvalidField:
            return
        self.scheduler.grant(task.key)
        self.live[task.key] = Live(request, tokens, tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.live)))
        self.scheduler.abort(key)
        if self.live[key].request.state is not RequestState.ENDED:
            self.scheduler.finish(key)
        del self.live[key]

    @rule()
    def step(self) -> None:
        self.make_room()
        running = self.scheduler.in_flight
        slots = MAX_RUNNING - len(running)
        batch = self.scheduler.next_batch(len(running) if self.mixed else 0, slots)
        self.check_preempted(running)
        decoding = self.scheduler.in_flight if self.mixed or batch is None else ()
        if batch is not None:
            assert self.config.chunk_size is None or batch.tokens <= self.config.chunk_size
            for row in batch.rows:
                tokens = row.request.task.token_ids
                for index in range(row.start // PAGE):
                    assert self.content[row.pages[index]] == tokens[: (index + 1) * PAGE], "reads a foreign page"
                for index in range(row.start // PAGE, len(row.pages)):
                    self.content[row.pages[index]] = tokens[: min((index + 1) * PAGE, row.end)]
        for request in decoding:
            self.decode(request)
        if batch is not None:
            self.scheduler.complete_forward(batch)
            for row in batch.rows:
                if row.is_last:
                    self.advance(row.request)
        for request in decoding:
            self.advance(request)

    def make_room(self) -> None:
        running = sorted(self.scheduler.in_flight, key=lambda r: (len(self.out(r)), -r.length))
        for request in self.scheduler.in_flight:
            while request in running and not self.scheduler.grow(request, len(self.live[request.key].tokens)):
                if (prompt := self.scheduler.continuation) is not None:  # partly computed: it loses least
                    self.scheduler.requeue(prompt.key, prompt.task)
                    continue
                victim = running.pop(0)
                assert running or victim is not request, "one alone always fits"
                self.scheduler.requeue(victim.key, self.again(victim))

    def check_preempted(self, running: tuple[PrefillRequest, ...]) -> None:
        attempts = self.records.pop().attempts if self.records else ()
        best = max((r.request.priority for r in attempts if r.request.priority is not None), default=-99)
        for request in self.preempted:
            assert self.config.priority_scheduling
            assert request in running
            assert request.priority is None or best - request.priority > 4
        self.preempted.clear()

    def decode(self, request: PrefillRequest) -> None:
        """The KV of its newest token is computed: all before it is read."""
        tokens = self.live[request.key].tokens
        for index in range((len(tokens) - 1) // PAGE):
            assert self.content[request.pages[index]] == tokens[: (index + 1) * PAGE], "reads a foreign page"
        last = (len(tokens) - 1) // PAGE
        assert self.content.get(request.pages[last], ())[: len(tokens) - 1] == tokens[:-1] or len(tokens) % PAGE == 1
        self.content[request.pages[last]] = tokens

    def advance(self, request: PrefillRequest) -> None:
        live = self.live[request.key]
        live.tokens += (answer(live.tokens),)
        if len(self.out(request)) >= request.max_new:
            self.scheduler.store(request, live.tokens[:-1])
            self.scheduler.finish(request.key)
            del self.live[request.key]

    # ---- what must always hold ----

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.scheduler.check_integrity()
        cached = self.cache.keys()
        for key in cached:
            assert page_keys(self.content[self.cache.find(key).page], PAGE)[-1] == key
        assert len(self.scheduler.in_flight) <= MAX_RUNNING

    def teardown(self) -> None:
        """Everybody ends, and every page is then free or cached."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self.step()
            self.everything_is_accounted_for()
        assert not self.live, "somebody never ends"
        stats = self.scheduler.stats()
        assert (stats.held, stats.protected) == (0, 0)


TestColocated = ColocatedMachine.TestCase
TestColocated.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
