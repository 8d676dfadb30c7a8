"""The life of one attempt: a prefill node at arrival, a decode node as late as possible, an end that both hear of.

    start ─► Submit to a prefill node ─► wait in the bootstrap queue ─► Reserve at a decode node with room
          ─► Grant from it ─► Granted to the prefill node ─► tokens from both ─► close
    start ─► Submit to a unified node ─► count in the bootstrap queue until it is admitted there
          ─► all tokens from that node ─► close

Knows rooms and nodes, not clients: whether a request is tried again or ends is decided in `bootstrap.outcomes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from bootstrap.fences import Fences
from bootstrap.history import History
from bootstrap.pairs import Pairs
from bootstrap.queue import BootstrapQueue
from bootstrap.registry import Node, Registry
from bootstrap.requests import Attempt, LiveRequest, Phase
from bootstrap.routing import choose_decode, choose_prefill, uncached_tokens
from engine.core.clock import Clock
from engine.core.handoff import HandoffEvent, HandoffState, advance
from engine.core.messages import Abort, Grant, Granted, Reserve, Submit, WriterQuiesced
from engine.core.page_keys import page_keys
from engine.core.types import NodeIdentity, PrefillTask, Reservation, Role, RoomKey

__all__ = ["Attempts"]

log = logging.getLogger("kvrelay.bootstrap")


class Attempts:
    """All live attempts, and what ended ones have left to be settled."""

    def __init__(self, registry: Registry, clock: Clock):
        self.queue = BootstrapQueue()
        self.pairs = Pairs(clock)
        self.history = History(clock)
        self._registry = registry
        self._clock = clock
        self._live: dict[RoomKey, Attempt] = {}
        self._unplaced: list[Attempt] = []  # without a prefill node, because none served
        self._fences = Fences(registry, clock)
        # Round what is done for one request: `Outcomes.shielded`, where there are any.
        self.shielded: Callable[[LiveRequest], AbstractContextManager[None]] = lambda request: nullcontext()

    def find(self, key: RoomKey, node: Node) -> Attempt | None:
        """The live attempt of a room, if that node has a part in it."""
        attempt = self._live.get(key)
        return attempt if attempt is not None and node in attempt.nodes else None

    def of(self, node: Node) -> list[Attempt]:
        """Attempts that end when this node goes."""
        return [self._live[key] for key in node.rooms]

    def start(self, request: LiveRequest, since: float | None = None) -> Attempt:
        """Begin a request's next attempt; submit it to a prefill node, if one serves.

        since: when the wait for a decode node began, if that was earlier.
        """
        now = self._clock()
        attempt = Attempt(
            key=RoomKey.new(request.attempts),
            request=request,
            token_ids=(*request.ask.token_ids, *request.output),
            first_index=len(request.output),
            started=now,
            since=now if since is None else since,
        )
        request.attempt = attempt
        request.attempts += 1
        request.merge.restart()
        self._live[attempt.key] = attempt
        self.queue.push(attempt)
        self._place(attempt)
        return attempt

    def advance_queue(self) -> None:
        """Ask decode nodes for room, in order. A node that is too full for one is left alone by those behind it."""
        if self._unplaced and self._registry.serving(self._registry.roles[0]):
            unplaced, self._unplaced = self._unplaced, []
            for attempt in unplaced:
                with self.shielded(attempt.request):
                    self._place(attempt)
        free = [node for node in self._registry.serving(Role.DECODE) if not node.overdue]
        for attempt in self.queue.waiting():
            if not free:
                return
            with self.shielded(attempt.request):
                free = self._ask(attempt, free)

    def overdue(self, attempt: Attempt) -> None:
        """A decode node has not answered in time. It keeps the reservation until another has room, or it answers."""
        node = attempt.decode
        if node is not None and attempt.key in node.ungranted and attempt.key not in node.overdue:
            node.overdue.add(attempt.key)
            self.queue.overdue(attempt)

    def granted(self, attempt: Attempt, grant: Grant) -> bool:
        """A decode node set pages aside: tell the writer. False when the grant is late."""
        if attempt.state is not HandoffState.QUEUED or attempt.decode is None or attempt.prefill is None:
            return False
        self.move(attempt, HandoffEvent.GRANTED)
        self.queue.discard(attempt)
        node = attempt.decode
        node.ungranted.pop(attempt.key)
        node.overdue.discard(attempt.key)
        node.head_room = grant.head_room
        attempt.request.timing.add(Phase.GRANT_WAIT, attempt.since - attempt.asked)
        attempt.prefill.link.send(Granted(attempt.key, node.identity, grant.pages))
        return True

    def admitted(self, attempt: Attempt) -> bool:
        """Its prompt is being computed. False when no decode node has granted it pages."""
        if attempt.state is HandoffState.QUEUED and not attempt.unified:
            return False
        self.move(attempt, HandoffEvent.ADMITTED)
        self.queue.discard(attempt)
        return True

    def move(self, attempt: Attempt, event: HandoffEvent) -> None:
        """Advance a live attempt; its phase starts now if it is a new one."""
        state = advance(attempt.state, event)
        assert state is not None, "ended attempts are not found any more"
        if state is not attempt.state:
            attempt.state, attempt.since = state, self._clock()
        if state >= HandoffState.TRANSFERRING and attempt.prefill is not None:
            attempt.prefill.uncomputed.pop(attempt.key, None)

    def decoded(self, attempt: Attempt) -> None:
        """A token came of the node that writes the answer."""
        self.move(attempt, HandoffEvent.COMPLETED)
        attempt.since = self._clock()
        if attempt.decoding is None:
            attempt.decoding = attempt.since
            if attempt.prefill is not None and attempt.decode is not None and not attempt.unified:
                self.pairs.worked(attempt.prefill.identity, attempt.decode.identity)

    def release_prefill(self, attempt: Attempt) -> None:
        """The prefill node is gone after every page had arrived: the attempt goes on without it."""
        assert attempt.prefill is not None
        _forget(attempt.prefill, attempt.key)
        attempt.prefill, attempt.quiesced = None, True

    def quiesced(self, key: RoomKey, writer: Node) -> None:
        """The writer of a room is done with it: pass that on, however long ago the attempt ended."""
        attempt = self._live.get(key)
        if attempt is not None and attempt.prefill is writer:
            attempt.quiesced = True
            if attempt.decode is not None:
                attempt.decode.link.send(WriterQuiesced(key))
        else:
            self._fences.quiesced(key, writer)

    def fenced(self, key: RoomKey, writer: NodeIdentity, node: Node) -> None:
        """A decode node waits for a writer's last word. While the attempt lives, its end will see to that."""
        if key not in self._live:
            self._fences.reported(key, writer, node)

    def close(self, attempt: Attempt, event: HandoffEvent, abort: str | None) -> None:
        """End an attempt. With a reason to `abort`, its nodes are told; without, they have ended it themselves."""
        self.history.ended(attempt, abort or "finished")
        granted = attempt.state is not HandoffState.QUEUED
        if attempt.decoding is not None:
            attempt.request.timing.add(Phase.DECODE, attempt.since - attempt.decoding)
        elif attempt.decode is not None and attempt.key in attempt.decode.ungranted:
            attempt.request.timing.add(Phase.GRANT_WAIT, self._clock() - attempt.asked)
        state = advance(attempt.state, event)
        assert state is not None
        assert state.ended
        attempt.state = state
        del self._live[attempt.key]
        self.queue.discard(attempt)
        if attempt in self._unplaced:
            self._unplaced.remove(attempt)
        for node in attempt.nodes:
            _forget(node, attempt.key)
        if abort is None:
            return
        writer = None if attempt.quiesced else attempt.prefill
        if writer:
            self._fences.add(attempt.key, writer, attempt.decode if granted else None)
        for node in attempt.nodes:
            node.link.send(Abort(attempt.key, abort))
        if writer and attempt.decode and not granted:  # the writer never learned where to write
            attempt.decode.link.send(WriterQuiesced(attempt.key))

    def replaceable(self, attempt: Attempt, node: Node) -> bool:
        """Whether another node could take this one's part in the next attempt, and has not failed at it."""
        return any(other is not node for other in self._able(attempt, node.role))

    def tick(self) -> None:
        """What is due of attempts that have ended."""
        self._fences.remind()

    def node_left(self, node: Node) -> None:
        self.pairs.left(node.identity)
        self._fences.node_left(node)

    def check_integrity(self) -> None:
        self.queue.check_integrity()
        queued = {key for key, attempt in self._live.items() if attempt in self.queue}
        assert len(queued) == len(self.queue)
        for key, attempt in self._live.items():
            assert attempt.key == key
            assert attempt.request.attempt is attempt
            assert not attempt.state.ended
            assert (key in queued) == (attempt.state is HandoffState.QUEUED)
            for node in attempt.nodes:
                assert key in node.rooms
                assert self._registry.get(node.node_id) is node
        rooms = sum(len(node.rooms) for node in self._registry.nodes())
        assert rooms == sum(len(attempt.nodes) for attempt in self._live.values())
        self._fences.check_integrity()
        self.pairs.check_integrity(self._attached)
        assert not any(key in self._fences for key in self._live)

    def _place(self, attempt: Attempt) -> None:
        """Submit it now, or when a node serves that can take it."""
        if not self._submit(attempt):
            self._unplaced.append(attempt)

    def _ask(self, attempt: Attempt, free: list[Node]) -> list[Node]:
        """Ask one of the free decode nodes for room. Returns those that are free for the attempts behind this one."""
        if attempt.prefill is None:
            return free
        able = self._able(attempt, Role.DECODE)
        if able and not self._paired(attempt, able[0]):  # and so none of them, as others would come first
            writers = self._able(attempt, Role.PREFILL)
            if writers and self._paired(attempt, writers[0]):
                return self._ask(self._restart(attempt, attempt.prefill, "set aside with every decode node"), free)
        view = choose_decode([node.decode_view(attempt.size) for node in able if node in free])
        if view is None:
            return [node for node in free if node not in able]
        if attempt.decode is not None:
            return self._ask(self._restart(attempt, attempt.decode, "no grant in time"), free)
        self._reserve(attempt, attempt.prefill, self._registry.chosen(view.node_id))
        return free

    def _submit(self, attempt: Attempt) -> bool:
        """Choose a node that reads prompts and hand it this one. False when none can take it."""
        tokens = len(attempt.token_ids)
        nodes = self._able(attempt, self._registry.roles[0])
        if not nodes:
            return False
        ask, page_size = attempt.request.ask, nodes[0].registration.layout.page_size
        keys = page_keys(attempt.token_ids, page_size, ask.cache_salt)
        view = choose_prefill([node.prefill_view() for node in nodes], tokens, keys, page_size, ask.routing_key)
        assert view is not None
        node = self._registry.chosen(view.node_id)
        attempt.prefill = node
        node.rooms.add(attempt.key)
        node.uncomputed[attempt.key] = uncached_tokens(tokens, keys, page_size, view.cached)
        attempt.request.timing.prefill_node = node.node_id
        if node.role is Role.UNIFIED:
            self._bind(attempt, node)
            attempt.quiesced = True  # it writes to nobody
        node.link.send(
            Submit(
                PrefillTask(
                    request_id=ask.request_id,
                    key=attempt.key,
                    token_ids=attempt.token_ids,
                    first_index=attempt.first_index,
                    page_keys=keys,
                    sampling=ask.sampling,
                    stopping=ask.stopping,
                    priority=ask.priority,
                    routing_key=ask.routing_key,
                    extra_key=ask.cache_salt,
                    ttft_target=ask.ttft_target,
                    waited=self._clock() - attempt.request.arrived,
                )
            )
        )
        return True

    def _restart(self, attempt: Attempt, node: Node, why: str) -> Attempt:
        """Begin again in a new room: a grant of the old one, should it come yet, must not be taken for a new one.

        It will do without the node if it can, whatever ails that: not back and forth between two nodes.
        """
        request = attempt.request
        log.warning("begun again", extra={"request_id": request.ask.request_id, "node": node.node_id, "why": why})
        request.avoid.add(node.node_id)
        self.close(attempt, HandoffEvent.FAILED, why)
        return self.start(request, attempt.since)

    def _reserve(self, attempt: Attempt, writer: Node, node: Node) -> None:
        """Ask a decode node that has room."""
        ask = attempt.request.ask
        self._bind(attempt, node)
        node.rooms.add(attempt.key)
        node.ungranted[attempt.key] = attempt.size.taken(node.registration)
        node.link.send(
            Reserve(
                Reservation(
                    request_id=ask.request_id,
                    key=attempt.key,
                    prompt_tokens=len(attempt.token_ids),
                    first_index=attempt.first_index,
                    sampling=ask.sampling,
                    stopping=ask.stopping,
                    writer=writer.identity,
                    priority=ask.priority,
                    history=attempt.token_ids if ask.sampling.needs_history else (),
                )
            )
        )

    def _bind(self, attempt: Attempt, node: Node) -> None:
        """It is settled which node writes the answer: the attempt looks for none any more."""
        timing = attempt.request.timing
        attempt.decode, attempt.asked = node, self._clock()
        timing.decode_node = node.node_id
        timing.add(Phase.QUEUE, attempt.asked - attempt.started)
        self.queue.asked(attempt)

    def _able(self, attempt: Attempt, role: Role) -> list[Node]:
        """Serving nodes that could ever run it.

        Those set aside with every peer only when there are no others; then, those on which it failed before likewise.
        """
        nodes = self._fitting(attempt, role)
        nodes = [node for node in nodes if self._paired(attempt, node)] or nodes
        return [node for node in nodes if node.node_id not in attempt.request.avoid] or nodes

    def _fitting(self, attempt: Attempt, role: Role) -> list[Node]:
        return [node for node in self._registry.serving(role) if attempt.size.refusal(node.registration) is None]

    def _paired(self, attempt: Attempt, node: Node) -> bool:
        """Whether it is not set aside with the node that has, or some node that may have, the other part."""
        if not self.pairs:
            return True
        if node.role is Role.PREFILL:
            readers = self._fitting(attempt, Role.DECODE)
            return any(not self.pairs.set_aside(node.identity, reader.identity) for reader in readers)
        writer = attempt.prefill
        return writer is None or not self.pairs.set_aside(writer.identity, node.identity)

    def _attached(self, identity: NodeIdentity) -> bool:
        node = self._registry.get(identity.node_id)
        return node is not None and node.identity == identity


def _forget(node: Node, key: RoomKey) -> None:
    node.rooms.discard(key)
    node.uncomputed.pop(key, None)
    node.ungranted.pop(key, None)
    node.overdue.discard(key)
