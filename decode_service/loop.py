"""The decode engine: one thread that admits reservations, waits for their pages, and runs decode steps.

    Reserve ─► prealloc queue ─► admit ─► pages, receiver.expect, Grant
    RoomComplete (receiver) ─► running, unless token 0 already ended it
    step: a page for everyone ─► forward ─► sample ─► one Publish a link ─► finished rooms free their pages
             └─ not enough ─► retracted: pages to the host ─► admit ─► pages, running
                                  └─ no room there, or too long there ─► RoomFailed: through a prefill node again

Which reservation is admitted is `admission`'s decision, who gives way that of `retraction`; this file carries it out.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from decode_service.admission import Candidate, DecodeState, admit
from decode_service.config import DecodeConfig
from decode_service.holdings import candidates, decode_state
from decode_service.parking import Parking
from decode_service.retraction import PARKED_AT_MOST_S, needs_page, victims
from decode_service.room import DecodeRoom, RoomState
from engine.core.clock import Clock, monotonic
from engine.core.errors import AlreadyExists, InvalidField, KVRelayError, Overloaded, Unavailable
from engine.core.handoff import FailureCause, HandoffState
from engine.core.handoff_note import HandoffNote
from engine.core.lifetime import LifetimeEvent, Timeline
from engine.core.loop import EngineLoop, Link, room_of
from engine.core.messages import (
    Abort,
    Command,
    DecodeReport,
    Grant,
    Heartbeat,
    NodeStats,
    PeerJoined,
    PeerLeft,
    Reserve,
    RoomFailed,
    RoomFenced,
    StepOutput,
    WriterQuiesced,
)
from engine.core.metrics import Metrics, NodeMetric
from engine.core.room_checks import check_room
from engine.core.sampling import finish_reason
from engine.core.types import NodeIdentity, Reservation, RoomKey, TokenOutput
from engine.device.batch import Row, build_batch
from engine.device.next_token import next_tokens
from engine.device.page_allocator import PageAllocator
from engine.device.page_checksum import page_checksums
from engine.device.sampler import TokenHistory
from engine.device.setup import NodeDevice
from transfer.agent import TransferAgent
from transfer.fencing import FenceTable
from transfer.receiver import (
    PageReceiver,
    ReceiverEvent,
    RoomBroken,
    RoomComplete,
    RoomProgress,
    Settled,
    WriterGone,
)

__all__ = ["DecodeEngine"]

log = logging.getLogger("kvrelay.decode")

FENCED = "fenced"  # owner of pages whose room ended while a write may still land
RATE_WEIGHT = 0.1  # of the newest step in the measured rate
REMIND_S = 5.0  # after which a word that has not come is taken for lost


class DecodeEngine(EngineLoop[ReceiverEvent]):
    """Owns rooms, page allocator and fence of a decode node."""

    def __init__(
        self,
        device: NodeDevice,
        config: DecodeConfig,
        agent: TransferAgent,
        metrics: Metrics,
        clock: Clock = monotonic,
    ):
        super().__init__("decode-engine", metrics, config.node.stall_timeout, clock)
        self._device = device
        self._page_size = device.layout.page_size
        self._options = config.decode
        self._agent = agent
        checksums = partial(page_checksums, device.pool.data)
        self._receiver = PageReceiver(agent, self._take_event, checksums, clock=clock)
        self._allocator = PageAllocator(device.pool.num_pages)
        self._parking = Parking(device.pool, device.host_pool)
        self._fence = FenceTable()
        self._rooms: dict[RoomKey, DecodeRoom] = {}  # in order of arrival
        self._rate = 0.0  # tokens a second
        self._reminded = clock()
        self._requests = self._outputs = self._relayed_bytes = 0
        self._room_changed = False  # head-room did: tell the front door without waiting for the next heartbeat

    def start(self) -> None:
        self._receiver.start()
        super().start()

    def stop(self) -> None:
        super().stop()
        self._receiver.close()

    def warm_up(self) -> None:
        logits = self._forward([Row([0], 0, [0], True)])
        assert logits.isfinite().all(), "the canary's logits are not finite"

    # ---- what comes in ----

    def _take_event(self, event: ReceiverEvent) -> None:
        """Called on the receiver thread. Progress of a room is nothing to wake the engine for."""
        if not isinstance(event, RoomProgress):
            self.post(None, event)

    def link_up(self, link: Link) -> None:
        """Ask once more for acknowledgements that an earlier session may have lost."""
        self._ask_writers(link)

    def link_lost(self, link: Link) -> None:
        for key in [key for key, room in self._rooms.items() if room.link is link]:
            self.abort(key, "its front door was lost")
        for other in self.links:  # the lost one will pass no acknowledgement on
            self._ask_writers(other)
        for writer in {writer for _, writer in self._fence.waiting()}:
            self._receiver.await_gone(writer)  # a writer's death needs no bootstrap to be seen

    def _ask_writers(self, link: Link, only: NodeIdentity | None = None) -> None:
        for key, writer in self._fence.waiting():
            if only is None or writer == only:
                link.report(RoomFenced(key, writer))

    def handle(self, link: Link | None, item: Command | ReceiverEvent) -> None:
        match item:
            case Reserve(reservation):
                assert link is not None
                self._take_on(reservation, link)
            case Abort(key, reason):
                if key in self._rooms:
                    self.abort(key, f"aborted: {reason}")
            case WriterQuiesced(key):
                if (room := self._rooms.get(key)) is not None:
                    room.quiet_since = self.clock()
                elif key in self._fence:
                    self._receiver.settle(key)
            case Settled(ticket):
                assert isinstance(ticket, RoomKey)
                self._unfence(self._fence.quiesced(ticket))
            case PeerJoined(peer):  # writers find us by themselves; this is to learn when one has gone
                for other in self._peers:  # the agent lets go of an older incarnation, which may still be writing
                    if other.node_id == peer.identity.node_id and other != peer.identity:
                        self._receiver.await_gone(other)
                self._agent.add_peer(peer.identity, peer.agent_metadata, peer.memory)
                assert link is not None
                self._ask_writers(link, peer.identity)
            case PeerLeft(identity):
                self._writer_left(identity)
            case WriterGone(identity):
                self._unfence(self._fence.writer_gone(identity))
            case RoomComplete():
                self._arrived(item)
            case RoomBroken(key, reason, corrupt_pages):
                self.metrics.count(NodeMetric.CORRUPT_PAGES, corrupt_pages)
                self.fail(key, HandoffState.TRANSFERRING, reason, retriable=True)
            case _:
                log.warning("not for a decode node", extra={"command": type(item).__name__})

    def _take_on(self, reservation: Reservation, link: Link) -> None:
        """Queue a reservation, unless it can only do harm here: then the front door is told."""
        try:
            self._check(reservation)
        except KVRelayError as error:
            phase = HandoffState.QUEUED.phase
            retriable = isinstance(error, Unavailable)
            link.report(RoomFailed(reservation.key, phase, str(error), retriable, code=error.code))
            return
        self._requests += 1
        new = self._rooms[reservation.key] = DecodeRoom(reservation, link, Timeline(self.clock))
        new.times.stamp(LifetimeEvent.ARRIVED)
        self.journal.arrived(reservation.request_id, new.key, new.prompt, new.times)

    def _check(self, one: Reservation) -> None:
        if one.key in self._rooms or one.key in self._fence:
            raise AlreadyExists(f"room {one.key} has pages here")
        if one.writer in self._peers and not self._agent.knows(one.writer):
            # Taking it in has failed. Should it die while pages wait for it, they would wait for ever.
            raise Unavailable(f"there is no connection with prefill node {one.writer.node_id}")
        if one.sampling.needs_history and not one.history:
            raise InvalidField("history", 0, "every token so far, as a penalty needs them")
        vocab_size = self._device.model.vocab_size
        check_room(one.prompt_tokens, one.first_index, one.sampling, one.stopping, one.history, vocab_size)

    def handling_failed(self, link: Link | None, item: Command | ReceiverEvent, incident: str) -> None:
        key, reason = room_of(item), f"internal error, incident {incident}"
        if key in self._rooms:
            self.fail(key, HandoffState.TRANSFERRING, reason, retriable=False)
        elif isinstance(item, Reserve) and link is not None:
            link.report(RoomFailed(item.reservation.key, HandoffState.QUEUED.phase, reason, retriable=False))
        elif isinstance(item, WriterQuiesced | Settled):  # of fenced pages: let it be said again, or they stay there
            for other in self.links:
                self._ask_writers(other)
        elif isinstance(item, PeerLeft):
            self._receiver.await_gone(item.identity)
        elif isinstance(item, WriterGone):
            self._receiver.await_gone(item.peer)

    def _arrived(self, event: RoomComplete) -> None:
        room = self._rooms.get(event.room)
        if room is None or room.state is not RoomState.ARRIVING:
            self.metrics.count(NodeMetric.LATE, 1, "room_complete")
            return
        note = HandoffNote.decode(event.last)
        room.state = RoomState.RUNNING
        room.times.stamp(LifetimeEvent.COMPLETE)
        self._relayed_bytes += len(room.pages) * self._device.pool.page_bytes
        reservation = room.reservation
        room.last_token, room.last_index = note.token_id, note.index
        if reservation.sampling.needs_history:
            room.history = TokenHistory(reservation.history, reservation.first_index)
            room.history.append(note.token_id)
        room.forward_end = note.forward_end_ns / 1e9
        if finish_reason(reservation.stopping, note.index, note.token_id) is not None:
            self._end(room)  # the front door has this token, with the same verdict, from the prefill node

    def _writer_left(self, identity: NodeIdentity) -> None:
        for room in list(self._rooms.values()):
            if room.reservation.writer == identity and room.state in (RoomState.QUEUED, RoomState.ARRIVING):
                reason, cause = f"prefill node {identity.node_id} left", FailureCause.PEER_LEFT
                self.fail(room.key, HandoffState.TRANSFERRING, reason, retriable=True, cause=cause)
        if any(writer == identity for _, writer in self._fence.waiting()):
            # The end of its session does not prove that it writes no more: these pages wait for WriterGone.
            self._receiver.await_gone(identity)
        else:
            self._agent.remove_peer(identity)

    # ---- rooms end ----

    def link_of(self, key: RoomKey) -> Link | None:
        room = self._rooms.get(key)
        return None if room is None else room.link

    def abort(self, key: RoomKey, why: str) -> None:
        self.journal.failed(key, why)
        self._end(self._rooms[key])

    def _end(self, room: DecodeRoom) -> None:
        """Forget a room. Pages that a write may still reach are fenced, all others are free at once."""
        del self._rooms[room.key]
        self.journal.ended(room.key)
        if room.state is RoomState.ARRIVING:
            self._receiver.forget(room.key)
            self._allocator.move(room.pages, room.key, FENCED)
            self._fence.fence(room.key, room.pages, room.reservation.writer)
            if room.quiet_since is not None:
                self._receiver.settle(room.key)
        else:
            self._allocator.free(room.pages, room.key)
            self._parking.drop(room.key)
        self._room_changed = True

    def _unfence(self, pages: list[int]) -> None:
        self._allocator.free(pages, FENCED)
        self._room_changed = self._room_changed or bool(pages)

    # ---- a pass ----

    def _state(self, queue: Sequence[Candidate[RoomKey]] = ()) -> DecodeState[RoomKey]:
        usable = self._allocator.num_pages - self._allocator.owned(FENCED)
        return decode_state(self._rooms.values(), usable, self._page_size, self._options, queue)

    def _admit(self) -> list[DecodeRoom]:
        """Bring back and grant what fits. Returns those that are back, who have a page for their next token."""
        queued = self._in(RoomState.QUEUED)
        if not queued and not self._in(RoomState.RETRACTED):
            return []
        decision = admit(self._state(candidates(queued)))
        resumed = [self._rooms[key] for key in decision.resumed]
        for room in resumed:
            self._resume(room)
        for key in decision.still_retracted:
            since = self._rooms[key].times.last(LifetimeEvent.RETRACTED)
            assert since is not None
            if self.clock() - since >= PARKED_AT_MOST_S:
                self._send_back(self._rooms[key], f"retracted: no room again for {PARKED_AT_MOST_S:g} s")
        for key in decision.admitted:
            room = self._rooms[key]
            room.pages.extend(self._allocator.allocate(self._device.layout.pages_for(room.prompt), key))
            room.state = RoomState.ARRIVING
            room.times.stamp(LifetimeEvent.GRANTED)
            self._receiver.expect(key, room.pages)
            room.link.report(Grant(key, tuple(room.pages), self._head_room()))
        self._stats = self.collect_stats()  # a heartbeat during the step that follows must not tell of room given away
        return resumed

    def _resume(self, room: DecodeRoom) -> None:
        room.pages.extend(self._allocator.allocate(self._device.layout.pages_for(room.position + 1), room.key))
        room.state = RoomState.RUNNING  # so that a copy that fails fails the room
        self._parking.bring_back(room.key, room.pages)
        room.times.stamp(LifetimeEvent.RESUMED)
        self._room_changed = True

    def _head_room(self) -> int:
        """Tokens that admission would still grant to one more request: none while any is retracted."""
        return max(0, admit(self._state()).budget)

    def _remind(self) -> None:
        """Where a word must have been lost: ask writers again, and give up rooms for which no page comes any more."""
        now = self.clock()
        if now - self._reminded < REMIND_S:
            return
        self._reminded = now
        for link in self.links:
            self._ask_writers(link)
        for room in [*self._in(RoomState.QUEUED), *self._in(RoomState.ARRIVING)]:
            if room.quiet_since is not None and now - room.quiet_since >= REMIND_S:
                self.fail(room.key, HandoffState.TRANSFERRING, "its writer is done, not all pages came", retriable=True)

    def step(self) -> bool:
        if self._receiver.failure is not None:
            raise RuntimeError("the receiver thread has ended") from self._receiver.failure
        self._remind()
        running = self._in(RoomState.RUNNING)
        resumed = self._admit()
        running = [*self._make_room(running), *resumed]
        if running:
            self._decode(running)
        if self._room_changed:
            self._room_changed = False
            self._stats = self.collect_stats()
            for link in self.links:
                link.report(Heartbeat(self.stats()))
        return bool(running)

    def _make_room(self, running: list[DecodeRoom]) -> list[DecodeRoom]:
        """Give each of these the page its next token needs, retracting others of them; returns those that stay.

        Who has just come back is not among them: it has its page, and makes a token before it gives way again.
        """
        for victim in victims(running, self._allocator.available, self._page_size, self._options):
            self._retract(victim)
            running.remove(victim)
        needy = [room for room in running if needs_page(room, self._page_size)]
        if len(needy) > self._allocator.available:
            return self._last_one_needs(needy[0])
        for room in needy:
            room.pages.extend(self._allocator.allocate(1, room.key))
        return running

    def _retract(self, room: DecodeRoom) -> None:
        if not self._parking.park(room.key, room.pages):
            self._send_back(room, "retracted: out of pages")
            return
        self.metrics.count(NodeMetric.RETRACTED, 1, "host")
        log.warning("retracted", extra={"room": str(room.key), "generated": room.generated})
        self._allocator.free(room.pages, room.key)
        del room.pages[:]
        room.state = RoomState.RETRACTED
        room.times.stamp(LifetimeEvent.RETRACTED)
        self._room_changed = True

    def _send_back(self, room: DecodeRoom, reason: str) -> None:
        """Have the front door take it through a prefill node again."""
        self.metrics.count(NodeMetric.RETRACTED, 1, "prefill")
        self.fail(room.key, HandoffState.DECODING, reason, retriable=True, cause=FailureCause.RETRACTED)

    def _last_one_needs(self, room: DecodeRoom) -> list[DecodeRoom]:
        """Nobody else runs and no page is free: pages that arrive or are fenced will come back, unless it needs all."""
        if len(room.pages) == self._allocator.num_pages:
            limit = f"{self._allocator.num_pages} pages of {self._page_size} tokens"
            reason = f"out of pages: this node has {limit}"
            self.fail(room.key, HandoffState.DECODING, reason, retriable=False, code=Overloaded.code)
        return []

    def _decode(self, running: list[DecodeRoom]) -> None:
        started = self.clock()
        new = [room for room in running if room.times.first(LifetimeEvent.FIRST_STEP) is None]
        for room in new:
            room.times.stamp(LifetimeEvent.FIRST_STEP)
        handoff = {room.key: time.time() - room.forward_end for room in new}
        for seconds in handoff.values():
            self.metrics.observe(NodeMetric.HANDOFF_SECONDS, seconds)
        logits = self._forward([Row([room.last_token], room.position, room.pages, True) for room in running])
        drawn = next_tokens(logits, [room.wanted for room in running])
        outputs: defaultdict[Link, tuple[list[TokenOutput], list[DecodeReport]]] = defaultdict(lambda: ([], []))
        for room, token in zip(running, drawn, strict=True):
            tokens, reports = outputs[room.link]
            tokens.append(token)
            room.advance(token.token_id)
            if room.key in handoff:
                reports.append(DecodeReport(room.key, handoff[room.key]))
            if token.finish is not None:
                self._end(room)
        for link, (tokens, reports) in outputs.items():
            link.publish(StepOutput(tokens=tuple(tokens), decoded=tuple(reports)))
        self._measure(len(running), self.clock() - started)

    def step_failed(self, incident: str) -> None:
        for room in self._in(RoomState.RUNNING):
            self.fail(room.key, HandoffState.DECODING, f"internal error, incident {incident}", retriable=False)

    def _forward(self, rows: list[Row]) -> Tensor:
        return self._device.runner.forward(build_batch(rows, self._page_size, self._device.pool.device))

    def _measure(self, tokens: int, seconds: float) -> None:
        self._outputs += tokens
        rate = tokens / max(seconds, 1e-9)
        self._rate += (rate - self._rate) * (RATE_WEIGHT if self._rate else 1.0)
        self.metrics.observe(NodeMetric.STEP_SECONDS, seconds)
        self.metrics.observe(NodeMetric.STEP_TOKENS, tokens)

    def _in(self, state: RoomState) -> list[DecodeRoom]:
        return [room for room in self._rooms.values() if room.state is state]

    # ---- what others may see ----

    def collect_stats(self) -> NodeStats:
        allocator = self._allocator
        free, fenced = allocator.available, allocator.owned(FENCED)
        return NodeStats(
            pages_total=allocator.num_pages,
            pages_free=free,
            pages_held=allocator.num_pages - free - fenced,
            pages_fenced=fenced,
            ungranted=len(self._in(RoomState.QUEUED)),
            running=len(self._in(RoomState.RUNNING)),
            transferring=len(self._in(RoomState.ARRIVING)),
            retracted=len(self._in(RoomState.RETRACTED)),
            tokens_per_second=self._rate,
            head_room=self._head_room(),
            requests_total=self._requests,
            output_tokens_total=self._outputs,
            retractable=sum(room.prompt + room.generated for room in self._in(RoomState.RUNNING)),
            relayed_bytes_total=self._relayed_bytes,
            host_pages_total=self._parking.num_pages,
            host_pages_free=self._parking.available,
        )

    def check_integrity(self) -> None:
        self._allocator.check_integrity()
        self._device.pool.check_integrity()
        self._fence.check_integrity()
        self._parking.check_integrity([room.key for room in self._in(RoomState.RETRACTED)])
        assert self._fence.fenced_pages == self._allocator.owned(FENCED), "the fence and its pages disagree"
        assert self.journal.live == self._rooms.keys(), "the journal knows other rooms"
        held = 0
        for key, room in self._rooms.items():
            assert room.key == key
            assert len(room.pages) == self._allocator.owned(key), f"{key} does not own its pages"
            on_device = room.state in (RoomState.ARRIVING, RoomState.RUNNING)
            assert bool(room.pages) == on_device, f"{key} is {room.state}"
            held += len(room.pages)
        free = self._allocator.available + self._allocator.owned(FENCED)
        assert held + free == self._allocator.num_pages, "pages belong to no room"
