"""The prefill engine: one thread that takes commands in, runs passes, and hands finished pages to the sender.

    Submit ─► scheduler.submit ─┐           ┌─► sender.open, cached pages go out
    Granted ─► scheduler.grant ─┴─► pass ───┤
                                            ├─► forward ─► sample (last chunks) ─► token 0 to the front door
                                            └─► scheduler.complete_forward ─► finished pages to the sender
    WritesDone, Quiesced ─► scheduler.finish ─► pages free or cached

What is decided is the scheduler's; when and where bytes move is the sender's. This file only carries.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from engine.core.clock import Clock, monotonic
from engine.core.handoff import FailureCause, HandoffState
from engine.core.handoff_note import HandoffNote
from engine.core.loop import Link, room_of
from engine.core.messages import (
    Abort,
    AdmitReport,
    Command,
    Granted,
    NodeStats,
    PeerJoined,
    PeerLeft,
    PrefillReport,
    RelayReport,
    RoomFailed,
    RoomQuiesced,
    StepOutput,
    Submit,
)
from engine.core.metrics import Metrics, NodeMetric
from engine.core.types import NodeIdentity, PrefillTask, RoomKey, TokenOutput
from engine.device.next_token import Wanted, next_tokens
from engine.device.page_checksum import page_checksums
from engine.device.sampler import TokenHistory
from engine.device.setup import NodeDevice
from prefill_service.announce import announce_changes
from prefill_service.config import PrefillConfig
from prefill_service.journal import PassLog
from prefill_service.prompt_engine import PromptEngine
from prefill_service.ranks import DELAY_PAUSE_S, Ranks, Seat, describe
from prefill_service.request import PrefillRequest
from prefill_service.scheduler import BatchRow, PrefillBatch, SendSpan
from transfer.agent import TransferAgent
from transfer.sender import PageSender, Quiesced, SenderEvent, Sent, WriteFailed, WritesDone

__all__ = ["PrefillEngine"]

log = logging.getLogger("kvrelay.prefill")


@dataclass(slots=True)
class _Room:
    """Where an attempt came from and where its pages go."""

    request: PrefillRequest
    link: Link
    grant: Granted | None = None
    opened: bool = False  # known to the sender: only its Quiesced or WritesDone ends the room
    over: bool = False  # aborted or failed: nothing more is computed, sent or reported
    asked: set[Link] = field(default_factory=set)  # for its end, and for word of it: the link it came over may be gone


class PrefillEngine(PromptEngine[SenderEvent]):
    """Owns the rooms of a prefill node, and what they stand on."""

    def __init__(
        self,
        device: NodeDevice,
        config: PrefillConfig,
        agent: TransferAgent,
        metrics: Metrics,
        clock: Clock = monotonic,
        pass_log: PassLog | None = None,
        ranks: Ranks | None = None,
    ):
        """ranks: of this one and the other engines of the process, if there are any."""
        super().__init__("prefill-engine", device, config.node, config.scheduler, metrics, clock, pass_log)
        self._agent = agent
        self._sender = PageSender(
            agent,
            self._take_event,
            window_bytes=config.node.inflight_bytes,
            write_timeout_s=config.node.write_timeout,
            checksums=partial(page_checksums, device.pool.data) if config.kv_checksum else None,
            clock=clock,
        )
        self._rooms: dict[RoomKey, _Room] = {}
        self._batch: PrefillBatch | None = None  # of the pass in progress
        self._computing = False  # between next_batch and complete_forward
        self._seat = None if ranks is None else ranks.join(self.wake)
        self._low_watermark = config.ranks.delay_low_watermark
        self._largest_batch = 0  # in requests
        self._relayed_bytes = 0

    def start(self) -> None:
        self._sender.start()
        super().start()

    def stop(self) -> None:
        if self._seat is not None:
            self._seat.leave()  # first: the turn in progress may take long
        super().stop()
        self._sender.close()

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            if self._seat is not None:
                self._seat.leave()

    def _take_event(self, event: SenderEvent) -> None:
        """Called on the transfer thread. Progress of a room is nothing to wake the engine for."""
        if not isinstance(event, Sent):
            self.post(None, event)

    # ---- what comes in ----

    def link_lost(self, link: Link) -> None:
        for key in [key for key, room in self._rooms.items() if room.link is link]:
            self.abort(key, "its front door was lost")

    def handle(self, link: Link | None, item: Command | SenderEvent) -> None:
        match item:
            case Submit(task):
                assert link is not None
                if (request := self._take_on(task, link)) is not None:
                    self._rooms[task.key] = _Room(request, link)
            case Granted(key):
                if (room := self._rooms.get(key)) is not None:
                    self._granted(room, item)
            case Abort(key, reason):
                assert link is not None
                if (room := self._rooms.get(key)) is None:  # ended, or never here: either way nothing is being written
                    link.report(RoomQuiesced(key))
                else:
                    room.asked.add(link)
                    self.abort(key, f"aborted: {reason}")
            case PeerJoined(peer):
                self._agent.add_peer(peer.identity, peer.agent_metadata, peer.memory)
            case PeerLeft(identity):
                self._peer_left(identity)
            case WritesDone(key, written, seconds):
                self._relayed_bytes += written
                self.metrics.observe(NodeMetric.RELAY_SECONDS, seconds)
                room = self._end(key)
                room.link.publish(StepOutput(relayed=(RelayReport(key, written, seconds),)))
                self._say_quiet(room)
            case Quiesced(key):
                self._say_quiet(self._end(key))
            case WriteFailed(key, reason):
                self.fail(key, HandoffState.TRANSFERRING, reason, retriable=True)
            case _:
                log.warning("not for a prefill node", extra={"command": type(item).__name__})

    def handling_failed(self, link: Link | None, item: Command | SenderEvent, incident: str) -> None:
        reason = f"internal error, incident {incident}"
        match item:
            case Submit(task) if task.key not in self._rooms and link is not None:
                link.report(RoomFailed(task.key, HandoffState.QUEUED.phase, reason, retriable=False))
            case WritesDone(key) | Quiesced(key):  # the sender says so once: the room must end all the same
                if key in self._rooms:
                    self._end(key)
                for other in self.links:
                    other.report(RoomQuiesced(key))
            case Abort(key) if key not in self._rooms and link is not None:
                link.report(RoomQuiesced(key))
            case _ if (room := room_of(item)) is not None:
                self.fail(room, HandoffState.PREFILLING, reason, retriable=False)

    def _granted(self, room: _Room, granted: Granted) -> None:
        """A decode node's pages, as it says: too few would fail the pass, and with it all others' rooms."""
        key, needed = granted.key, self._device.layout.pages_for(len(room.request.task.token_ids))
        if len(granted.pages) != needed:
            reason = f"{len(granted.pages)} pages were granted on {granted.peer.node_id}, {needed} are needed"
            self.fail(key, HandoffState.QUEUED, reason, retriable=True)
        elif self._scheduler.grant(key) is not None:
            room.grant = granted
            self._passes.waits(key)

    def link_of(self, key: RoomKey) -> Link | None:
        room = self._rooms.get(key)
        return None if room is None or room.over else room.link

    def abort(self, key: RoomKey, why: str) -> None:
        """Compute and post nothing more for a room. It ends at once, or when the sender says that it is quiet."""
        self.journal.failed(key, why)
        room = self._rooms[key]
        room.over = True
        self._scheduler.abort(key)
        if room.opened:
            self._sender.cancel(key)
        else:
            self._scheduler.finish(key)  # of one that was admitted in a pass that failed before it was opened
            self._forget(key).link.report(RoomQuiesced(key))

    def _peer_left(self, identity: NodeIdentity) -> None:
        for key, room in list(self._rooms.items()):
            if room.grant is not None and room.grant.peer == identity:
                reason = f"decode node {identity.node_id} left"
                self.fail(key, HandoffState.TRANSFERRING, reason, retriable=True, cause=FailureCause.PEER_LEFT)
        self._agent.remove_peer(identity)

    def _end(self, key: RoomKey) -> _Room:
        """The sender is done with a room: its pages may go."""
        self._scheduler.finish(key)
        return self._forget(key)

    def _say_quiet(self, room: _Room) -> None:
        for link in {room.link, *room.asked}:
            link.report(RoomQuiesced(room.request.key))

    def _forget(self, key: RoomKey) -> _Room:
        self.journal.ended(key)
        return self._rooms.pop(key)

    # ---- a pass ----

    def step(self) -> bool:
        if self._sender.failure is not None:
            raise RuntimeError("the transfer thread has ended") from self._sender.failure
        if self._seat is not None and self._held_back(self._seat):
            return False
        self._batch = batch = self._scheduler.next_batch()
        self._computing = batch is not None
        self._copier.execute(self._scheduler.take_copies())
        if batch is None:
            if self._seat is not None:
                self._seat.rest()
            return False
        self._largest_batch = max(self._largest_batch, len(batch.rows))
        self._open([row for row in batch.rows if row.admitted])
        started = self.clock()
        logits = self._forward([self._row(row) for row in batch.rows])
        drawn = next_tokens(logits, [self._wanted(row.request.task) for row in batch.rows if row.is_last])
        tokens = {token.key: token for token in drawn}
        forward_end_ns = time.time_ns()
        seconds = self.clock() - started
        self._measure(batch.tokens, 0, seconds)
        spans = self._scheduler.complete_forward(batch, seconds)
        self._computing = False
        self._publish(drawn)
        for span in spans:
            self._send(span, tokens.get(span.request.key), forward_end_ns)
        announce_changes(self._cache, self.links)
        self._batch = None
        return True

    def _held_back(self, seat: Seat) -> bool:
        """Whether this pass prefills nothing, since ranks are to prefill together. A continuation always goes on."""
        row = describe(self._scheduler, self._low_watermark, self._largest_batch, self.clock())
        if not row.prefillable:
            seat.rest()
            return False
        decision = seat.negotiate(row)
        if decision is None:
            return True  # woken when the others are there, too
        if decision.allow or self._scheduler.continuation is not None:
            return False
        self._pause_s = DELAY_PAUSE_S
        return True

    def step_failed(self, incident: str) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if self._computing:
            self._computing = False
            self._scheduler.abandon_forward(batch)
        for row in batch.rows:
            reason = f"internal error, incident {incident}"
            self.fail(row.request.key, HandoffState.PREFILLING, reason, retriable=False)

    def _open(self, rows: list[BatchRow]) -> None:
        """Name new rooms to the sender and let their cached pages go out before anything is computed."""
        by_link: defaultdict[Link, list[AdmitReport]] = defaultdict(list)
        for row in rows:
            request = row.request
            room = self._rooms[request.key]
            assert room.grant is not None
            self._sender.open(request.key, room.grant.peer, room.grant.pages, room.link.lease_valid)
            room.opened = True
            if cached := row.start // self._page_size:
                self._sender.send(request.key, 0, row.pages[:cached])
            by_link[room.link].append(AdmitReport(request.key, request.cached_tokens))
        for link, reports in by_link.items():
            link.publish(StepOutput(admitted=tuple(reports)))

    def _send(self, span: SendSpan, token: TokenOutput | None, forward_end_ns: int) -> None:
        request, note = span.request, None
        if span.is_last:
            assert token is not None
            note = HandoffNote(
                token.token_id, token.index, token.logprob, request.cached_tokens, forward_end_ns
            ).encode()
        if span.pages or note is not None:
            self._sender.send(request.key, span.first, span.pages, last=note)

    @staticmethod
    def _wanted(task: PrefillTask) -> Wanted:
        history = TokenHistory(task.token_ids, task.first_index) if task.sampling.needs_history else None
        return Wanted(task.key, task.first_index, task.sampling, task.stopping, history)

    def _publish(self, tokens: Iterable[TokenOutput]) -> None:
        """Token 0 goes to the front door by itself, ahead of the last pages."""
        by_link: defaultdict[Link, list[tuple[TokenOutput, PrefillReport]]] = defaultdict(list)
        for token in tokens:
            room = self._rooms[token.key]
            by_link[room.link].append((token, self._report(room.request)))
            self._outputs += 1
        for link, made in by_link.items():
            made_tokens, reports = zip(*made, strict=True)
            link.publish(StepOutput(tokens=made_tokens, prefilled=reports))

    # ---- what others may see ----

    def collect_stats(self) -> NodeStats:
        return replace(super().collect_stats(), relayed_bytes_total=self._relayed_bytes)

    def check_integrity(self) -> None:
        self._check_books([room.request for room in self._rooms.values()])
