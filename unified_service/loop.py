"""The unified engine: one thread that takes requests in, and in each turn computes prompts and decodes.

    Submit ─► scheduler.submit, grant ─► pass ─┐
    a page for everyone who decodes ───────────┴─► forward ─► sample ─► one Publish a link ─► finished rooms end

What is prefilled is the scheduler's decision. Decoding requests are its requests in flight; this file gives them their
pages, retracts when there are none, and says how much they are expected to grow.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from engine.core.clock import Clock, monotonic
from engine.core.errors import Overloaded
from engine.core.handoff import FailureCause, HandoffState
from engine.core.lifetime import LifetimeEvent
from engine.core.loop import Link, room_of
from engine.core.messages import (
    Abort,
    AdmitReport,
    Command,
    NodeStats,
    PrefillReport,
    RoomFailed,
    StepOutput,
    Submit,
)
from engine.core.metrics import Metrics
from engine.core.room_budget import longest_prompt
from engine.core.types import PrefillTask, RoomKey, TokenOutput
from engine.device.batch import Row
from engine.device.next_token import next_tokens
from engine.device.setup import NodeDevice
from prefill_service.adder import running_growth
from prefill_service.announce import announce_changes
from prefill_service.journal import PassLog
from prefill_service.preemption import Ranking
from prefill_service.prompt_engine import PromptEngine
from prefill_service.request import PrefillRequest
from prefill_service.scheduler import PrefillBatch
from unified_service.config import UnifiedConfig
from unified_service.new_token_ratio import NewTokenRatio
from unified_service.room import UnifiedRoom

__all__ = ["UnifiedEngine"]

log = logging.getLogger("kvrelay.unified")


class UnifiedEngine(PromptEngine[None]):
    """Owns the rooms of a unified node, and what they stand on."""

    def __init__(
        self,
        device: NodeDevice,
        config: UnifiedConfig,
        metrics: Metrics,
        clock: Clock = monotonic,
        pass_log: PassLog | None = None,
    ):
        super().__init__(
            "unified-engine", device, config.node, config.scheduler, metrics, clock, pass_log, decoding=self
        )
        self._config = config
        self._num_pages = device.pool.num_pages
        self._ratio = NewTokenRatio(config.unified.schedule_conservativeness)
        self._ranking = Ranking(0, config.scheduler.low_priority_first)
        self._rooms: dict[RoomKey, UnifiedRoom] = {}
        self._forward_of: list[UnifiedRoom] = []  # whose rows the turn in progress computes
        self._preempted: list[RoomKey] = []  # in the pass in progress
        self._batch: PrefillBatch | None = None  # that the scheduler awaits the forward of

    def warm_up(self) -> None:
        super().warm_up()
        self._try_out(Row([0], 0, [0], True))  # as in a decode step

    # ---- what comes in ----

    def link_lost(self, link: Link) -> None:
        for key in [key for key, room in self._rooms.items() if room.link is link]:
            self.abort(key, "its front door was lost")

    def handle(self, link: Link | None, item: Command | None) -> None:
        match item:
            case Submit(task):
                assert link is not None
                self._submit(task, link)
            case Abort(key, reason):
                if key in self._rooms:
                    self.abort(key, f"aborted: {reason}")
            case _:
                log.warning("not for a unified node", extra={"command": type(item).__name__})

    def _submit(self, task: PrefillTask, link: Link) -> None:
        if (request := self._take_on(task, link)) is not None:
            self._rooms[task.key] = UnifiedRoom(request, link)
            self._scheduler.grant(task.key)  # its pages are here: there is nothing to wait for
            self._passes.waits(task.key)

    def handling_failed(self, link: Link | None, item: Command | None, incident: str) -> None:
        reason, key = f"internal error, incident {incident}", room_of(item)
        if key in self._rooms:
            self.fail(key, HandoffState.QUEUED, reason, retriable=False)
        elif isinstance(item, Submit) and link is not None:
            link.report(RoomFailed(item.task.key, HandoffState.QUEUED.phase, reason, retriable=False))

    # ---- rooms end ----

    def link_of(self, key: RoomKey) -> Link | None:
        room = self._rooms.get(key)
        return None if room is None else room.link

    def abort(self, key: RoomKey, why: str) -> None:
        self.journal.failed(key, why)
        self._scheduler.abort(key)
        self._end(self._rooms[key])

    def _end(self, room: UnifiedRoom) -> None:
        """Forget a room, whatever it was doing. Its pages are free, or cached."""
        self._scheduler.finish(room.key)
        self.journal.ended(room.key)
        del self._rooms[room.key]

    # ---- what the scheduler asks ----

    def growth(self, request: PrefillRequest) -> float:
        return running_growth([self._rooms[request.key].growth], self._ratio.value)

    def may_wait(self, request: PrefillRequest) -> bool:
        return len(self._rooms[request.key].token_ids) <= longest_prompt(self._num_pages, self._page_size)

    def preempt(self, request: PrefillRequest) -> PrefillTask:
        log.info("preempted", extra={"room": str(request.key)})
        request.times.stamp(LifetimeEvent.PREEMPTED)
        self._preempted.append(request.key)
        return self._rooms[request.key].task(self._page_size)

    # ---- room for the next token ----

    def _make_room(self) -> list[UnifiedRoom]:
        """Give every decoding room the page its next token needs; retract until that works."""
        rooms = [self._rooms[request.key] for request in self._scheduler.in_flight]
        short = False
        for room in rooms:
            while room.decoding and not self._scheduler.grow(room.request, len(room.token_ids)):
                short = True
                self._give_way()
        kept = [room for room in rooms if room.decoding]
        if short and kept:
            self._ratio.retracted([room.growth for room in kept])
        return kept

    def _give_way(self) -> None:
        """Take the pages of the one who loses least. The last one that decodes is never retracted."""
        if (prompt := self._scheduler.continuation) is not None:
            self._retract(self._rooms[prompt.key], prompt.task)
            return
        rooms = [self._rooms[request.key] for request in self._scheduler.in_flight]
        victim = min(rooms, key=lambda room: (self._ranking.of(room.request), room.generated, -room.prompt))
        if len(rooms) == 1:
            reason = f"out of pages: this node has {self._num_pages} pages of {self._page_size} tokens"
            self.fail(victim.key, HandoffState.DECODING, reason, retriable=False, code=Overloaded.code)
        elif not self.may_wait(victim.request):
            # It would never be admitted again.
            reason, cause = "retracted: out of pages", FailureCause.RETRACTED
            self.fail(victim.key, HandoffState.DECODING, reason, retriable=True, cause=cause)
        else:
            self._retract(victim, victim.task(self._page_size))

    def _retract(self, room: UnifiedRoom, task: PrefillTask) -> None:
        log.warning("retracted", extra={"room": str(room.key), "generated": room.generated})
        room.request.times.stamp(LifetimeEvent.RETRACTED)
        self._scheduler.requeue(room.key, task)
        self._passes.waits(room.key)

    # ---- a turn ----

    def step(self) -> bool:
        decoding = self._make_room()
        mixed = len(decoding) if self._config.mixes else 0
        slots = self._config.unified.max_running - len(decoding)  # a prompt that is partly computed takes one, too
        self._batch = batch = self._scheduler.next_batch(mixed, slots)
        for key in self._preempted:
            self._passes.waits(key)
        self._preempted.clear()
        if batch is not None and not mixed:
            decoding = []
        decoding = [room for room in decoding if room.decoding]  # some may have been preempted
        prefilling = [self._rooms[row.request.key] for row in batch.rows] if batch else []
        self._forward_of = prefilling + decoding
        self._copier.execute(self._scheduler.take_copies())
        if not self._forward_of:
            return False
        self._say_admitted(prefilling)
        started = self.clock()
        rows = [self._row(row) for row in batch.rows] if batch else []
        logits = self._forward([*rows, *(room.row for room in decoding)])
        if batch is not None:
            self._batch = None
            self._scheduler.complete_forward(batch, self.clock() - started)
        answering = [room for room in self._forward_of if room.decoding]
        self._publish(answering, next_tokens(logits, [room.wanted for room in answering]))
        if decoding:
            self._ratio.decoded()
        self._measure(batch.tokens if batch else 0, len(decoding), self.clock() - started)
        announce_changes(self._cache, self.links)
        self._forward_of = []
        return True

    def step_failed(self, incident: str) -> None:
        rooms, self._forward_of = self._forward_of, []
        if self._batch is not None:
            self._scheduler.abandon_forward(self._batch)
            self._batch = None
        for room in rooms:
            phase = HandoffState.DECODING if room.generated > room.first_index else HandoffState.PREFILLING
            self.fail(room.key, phase, f"internal error, incident {incident}", retriable=False)

    def _say_admitted(self, prefilling: Sequence[UnifiedRoom]) -> None:
        """Of those whose first forward begins."""
        by_link: defaultdict[Link, list[AdmitReport]] = defaultdict(list)
        for room in prefilling:
            if not room.admitted:
                room.admitted = True
                by_link[room.link].append(AdmitReport(room.key, room.request.cached_tokens))
        for link, reports in by_link.items():
            link.publish(StepOutput(admitted=tuple(reports)))

    def _publish(self, rooms: Sequence[UnifiedRoom], drawn: Sequence[TokenOutput]) -> None:
        outputs: defaultdict[Link, tuple[list[TokenOutput], list[PrefillReport]]] = defaultdict(lambda: ([], []))
        for room, token in zip(rooms, drawn, strict=True):
            tokens, reports = outputs[room.link]
            tokens.append(token)
            if token.index == room.first_index:
                reports.append(self._report(room.request))
            if token.finish is not None:
                self._scheduler.store(room.request, room.token_ids)  # the KV of this last token was never computed
                self._end(room)
            else:
                room.advance(token.token_id)
        self._outputs += len(drawn)
        for link, (tokens, reports) in outputs.items():
            link.publish(StepOutput(tokens=tuple(tokens), prefilled=tuple(reports)))

    # ---- what others may see ----

    def collect_stats(self) -> NodeStats:
        stats = super().collect_stats()  # those in flight decode here
        return replace(stats, running=stats.running + stats.transferring, transferring=0)

    def check_integrity(self) -> None:
        self._check_books([room.request for room in self._rooms.values()])
        for room in self._rooms.values():
            if room.decoding:
                computed = len(room.token_ids) - 1
                assert len(room.request.pages) * self._page_size >= computed, "a token has no page"
