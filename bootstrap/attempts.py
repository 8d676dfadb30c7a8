"""The life of one attempt: a prefill node at arrival, a decode node as late as possible, an end that both hear of.

    start ─► Submit to a prefill node ─► wait in the bootstrap queue ─► Reserve at a decode node with room
          ─► Grant from it ─► Granted to the prefill node ─► tokens from both ─► close

Knows rooms and nodes, not clients: whether a request is tried again or ends is decided in `bootstrap.front`.
"""

from __future__ import annotations

from collections.abc import Sequence

from bootstrap.queue import BootstrapQueue
from bootstrap.registry import Node, Registry
from bootstrap.requests import Attempt, LiveRequest
from bootstrap.routing import choose_decode, choose_prefill, uncached_tokens
from engine.core.clock import Clock
from engine.core.handoff import HandoffEvent, HandoffState, advance
from engine.core.messages import Abort, Grant, Granted, Reserve, Submit, WriterQuiesced
from engine.core.page_keys import page_keys
from engine.core.room_budget import decode_room
from engine.core.types import PrefillTask, Reservation, Role, RoomKey

__all__ = ["Attempts"]


class Attempts:
    """All live attempts, and the rooms of ended ones whose writer may still be writing."""

    def __init__(self, registry: Registry, clock: Clock):
        self.queue = BootstrapQueue()
        self._registry = registry
        self._clock = clock
        self._live: dict[RoomKey, Attempt] = {}
        self._unplaced: list[Attempt] = []  # without a prefill node, because none served
        self._unquiesced: dict[RoomKey, tuple[Node, Node]] = {}  # writer, and the node it may be writing to

    def find(self, key: RoomKey, node: Node) -> Attempt | None:
        """The live attempt of a room, if that node has a part in it."""
        attempt = self._live.get(key)
        return attempt if attempt is not None and node in (attempt.prefill, attempt.decode) else None

    def of(self, node: Node) -> list[Attempt]:
        """Attempts that end when this node goes."""
        return [self._live[key] for key in node.rooms]

    def start(self, request: LiveRequest) -> None:
        """Begin a request's next attempt; submit it to a prefill node, if one serves."""
        now = self._clock()
        attempt = Attempt(
            key=RoomKey.new(request.attempts),
            request=request,
            token_ids=(*request.ask.token_ids, *request.output),
            first_index=len(request.output),
            started=now,
            since=now,
        )
        request.attempt = attempt
        request.attempts += 1
        request.merge.restart()
        self._live[attempt.key] = attempt
        self.queue.push(attempt)
        if not self._submit(attempt):
            self._unplaced.append(attempt)

    def advance_queue(self) -> None:
        """Ask decode nodes for room, in order, up to the first attempt that finds none."""
        if self._unplaced and self._registry.serving(Role.PREFILL):
            self._unplaced = [attempt for attempt in self._unplaced if not self._submit(attempt)]
        for attempt in self.queue.waiting():
            if attempt.prefill is not None and not self._reserve(attempt, attempt.prefill):
                return

    def granted(self, attempt: Attempt, grant: Grant) -> bool:
        """A decode node set pages aside: tell the writer. False when the grant is late."""
        if attempt.state is not HandoffState.QUEUED or attempt.decode is None or attempt.prefill is None:
            return False
        self.move(attempt, HandoffEvent.GRANTED)
        self.queue.discard(attempt)
        node = attempt.decode
        node.ungranted.pop(attempt.key)
        node.head_room = grant.head_room
        attempt.request.timing.grant_wait += attempt.since - attempt.asked
        attempt.prefill.link.send(Granted(attempt.key, node.identity, grant.pages))
        return True

    def move(self, attempt: Attempt, event: HandoffEvent) -> None:
        """Advance a live attempt; its phase starts now if it is a new one."""
        state = advance(attempt.state, event)
        assert state is not None, "ended attempts are not found any more"
        if state is not attempt.state:
            attempt.state, attempt.since = state, self._clock()
        if state >= HandoffState.TRANSFERRING and attempt.prefill is not None:
            attempt.prefill.uncomputed.pop(attempt.key, None)

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
        elif key in self._unquiesced and self._unquiesced[key][0] is writer:
            self._unquiesced.pop(key)[1].link.send(WriterQuiesced(key))

    def close(self, attempt: Attempt, event: HandoffEvent, abort: str | None) -> None:
        """End an attempt. With a reason to `abort`, both nodes are told; without, they have ended it themselves."""
        granted = attempt.state is not HandoffState.QUEUED
        state = advance(attempt.state, event)
        assert state is not None
        assert state.ended
        attempt.state = state
        del self._live[attempt.key]
        self.queue.discard(attempt)
        if attempt in self._unplaced:
            self._unplaced.remove(attempt)
        for node in (attempt.prefill, attempt.decode):
            if node is not None:
                _forget(node, attempt.key)
                if abort is not None:
                    node.link.send(Abort(attempt.key, abort))
        if abort is not None and attempt.prefill and attempt.decode and not attempt.quiesced:
            if granted:
                self._unquiesced[attempt.key] = (attempt.prefill, attempt.decode)
            else:  # the writer never learned where to write
                attempt.decode.link.send(WriterQuiesced(attempt.key))

    def node_left(self, node: Node) -> None:
        """Nobody waits any more for a writer that is gone, or to tell a node that is gone."""
        self._unquiesced = {key: pair for key, pair in self._unquiesced.items() if node not in pair}

    def check_integrity(self) -> None:
        self.queue.check_integrity()
        queued = {key for key, attempt in self._live.items() if attempt in self.queue}
        assert len(queued) == len(self.queue)
        for key, attempt in self._live.items():
            assert attempt.key == key
            assert attempt.request.attempt is attempt
            assert not attempt.state.ended
            assert (key in queued) == (attempt.state is HandoffState.QUEUED)
            for node in (attempt.prefill, attempt.decode):
                assert node is None or (key in node.rooms and self._registry.get(node.node_id) is node)
        assert sum(len(node.rooms) for node in self._registry.nodes()) == sum(
            (attempt.prefill is not None) + (attempt.decode is not None) for attempt in self._live.values()
        )
        for key, nodes in self._unquiesced.items():
            assert key not in self._live
            assert all(self._registry.get(node.node_id) is node for node in nodes)

    def _submit(self, attempt: Attempt) -> bool:
        """Choose a prefill node and hand it the prompt. False when none can take it."""
        tokens = len(attempt.token_ids)
        nodes = self._able(attempt, Role.PREFILL)
        if not nodes:
            return False
        ask, page_size = attempt.request.ask, nodes[0].registration.layout.page_size
        keys = page_keys(attempt.token_ids, page_size, ask.cache_salt)
        view = choose_prefill([node.prefill_view() for node in nodes], tokens, keys, page_size, ask.routing_key)
        assert view is not None
        node = self._registry.chosen(view.node_id)
        node.rooms.add(attempt.key)
        node.uncomputed[attempt.key] = uncached_tokens(tokens, keys, page_size, view.cached)
        attempt.prefill = node
        attempt.request.timing.prefill_node = node.node_id
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
                )
            )
        )
        return True

    def _reserve(self, attempt: Attempt, writer: Node) -> bool:
        """Ask the decode node with most head-room. False while none has room."""
        nodes = self._able(attempt, Role.DECODE)
        tokens = max((self._room(attempt, node) for node in nodes), default=0)
        view = choose_decode([node.decode_view() for node in nodes], tokens)
        if view is None:
            return False
        ask, node = attempt.request.ask, self._registry.chosen(view.node_id)
        attempt.decode, attempt.asked = node, self._clock()
        attempt.request.timing.decode_node = node.node_id
        attempt.request.timing.queue += attempt.asked - attempt.started
        node.rooms.add(attempt.key)
        node.ungranted[attempt.key] = self._room(attempt, node)
        self.queue.asked(attempt)
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
        return True

    def _able(self, attempt: Attempt, role: Role) -> Sequence[Node]:
        """Serving nodes that could ever run it; those on which it failed before only when there are no others."""
        nodes = [
            node
            for node in self._registry.serving(role)
            if node.refusal(len(attempt.token_ids), attempt.new_tokens) is None
        ]
        return [node for node in nodes if node.node_id not in attempt.request.avoid] or nodes

    @staticmethod
    def _room(attempt: Attempt, node: Node) -> int:
        """Tokens that admission on a decode node takes for it, before any is generated."""
        page_size = node.registration.layout.page_size
        return decode_room(len(attempt.token_ids), 0, page_size) + node.registration.reserved_decode_tokens


def _forget(node: Node, key: RoomKey) -> None:
    node.rooms.discard(key)
    node.uncomputed.pop(key, None)
    node.ungranted.pop(key, None)
