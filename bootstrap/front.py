"""The front door's decisions: what each message from a client, a node or the clock leads to.

Synchronous, on one thread, with an injected clock. Commands leave through the nodes' links, tokens through the
live request that `submit` returned. It decides when a request is tried again and when it ends, and how.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from bootstrap.attempts import Attempts
from bootstrap.config import BootstrapConfig
from bootstrap.records import record_end
from bootstrap.registry import Link, Node, Registry
from bootstrap.requests import Ask, Attempt, LiveRequest
from engine.core.clock import Clock, monotonic
from engine.core.errors import (
    AlreadyExists,
    DeadlineExceeded,
    KVRelayError,
    NotFound,
    Overloaded,
    Refused,
    Unavailable,
)
from engine.core.handoff import HandoffEvent, HandoffState
from engine.core.messages import (
    CacheDelta,
    Drain,
    Drained,
    Grant,
    Heartbeat,
    Inspection,
    NodeStats,
    Registration,
    Report,
    RoomFailed,
    RoomQuiesced,
    StepOutput,
)
from engine.core.metrics import FrontDoorMetric, Metrics
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey, TokenOutput

__all__ = ["FrontDoor"]

log = logging.getLogger("kvrelay.bootstrap")

RETRACTED = "retracted"  # starts the reason of a room that a full decode node gave up: no fault, it only waits again

# The nodes that are to blame when a phase takes too long.
_SUSPECTS = {
    HandoffState.RESERVED: (Role.PREFILL,),
    HandoffState.PREFILLING: (Role.PREFILL,),
    HandoffState.TRANSFERRING: (Role.PREFILL, Role.DECODE),
    HandoffState.DECODING: (Role.DECODE,),
}


class FrontDoor:
    """Requests by id and the nodes that serve them. `changed` is called when a node joins, leaves, serves or drains."""

    def __init__(
        self,
        config: BootstrapConfig,
        registry: Registry,
        metrics: Metrics,
        clock: Clock = monotonic,
        changed: Callable[[], None] = lambda: None,
    ):
        self.registry = registry
        self.attempts = Attempts(registry, clock)
        self.requests: dict[str, LiveRequest] = {}
        self.inspected: Callable[[Inspection], None] = lambda inspection: None
        self.draining = False  # set at shutdown: nothing new is taken in
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._changed = changed
        self._arrivals = 0
        self._ticked = clock()
        self._limits = {
            HandoffState.QUEUED: config.queue_timeout,
            HandoffState.RESERVED: config.prefill_timeout,
            HandoffState.PREFILLING: config.prefill_timeout,
            HandoffState.TRANSFERRING: config.transfer_timeout,
            HandoffState.DECODING: config.token_timeout,
        }

    @property
    def ready(self) -> bool:
        """A request that came now could be served."""
        return not self.draining and all(self.registry.serving(role) for role in Role)

    # ---- clients ----

    def submit(self, ask: Ask, wake: Callable[[], None]) -> LiveRequest:
        """Take a request in. `wake` is called whenever there is something to take, or the request has ended.

        Raises AlreadyExists, Overloaded, Unavailable, or InvalidField for what no attached node could ever run.
        """
        if self.draining:
            raise Unavailable("this front door is shutting down", reason="DRAINING", phase="queued", retry_after=1.0)
        if ask.request_id in self.requests:
            raise AlreadyExists(f"request {ask.request_id!r} is live", request_id=ask.request_id)
        if len(self.attempts.queue) >= self._config.max_queue:
            raise Overloaded(
                f"{len(self.attempts.queue)} requests wait for a decode node already",
                reason="QUEUE_FULL",
                phase="queued",
                retry_after=self._config.heartbeat_seconds,
            )
        refusal = self.registry.refusal(len(ask.token_ids), ask.stopping.max_new_tokens)
        if refusal is not None:
            raise refusal
        missing = self.registry.missing(self._config.heartbeat_seconds)
        if missing:
            raise self._no_node(missing[0], None)
        self._arrivals += 1
        sign = 1 if self._config.low_priority_first else -1
        order = (ask.priority is None, sign * (ask.priority or 0), self._arrivals)
        request = LiveRequest(ask, order, self._clock(), wake)
        self.requests[ask.request_id] = request
        self.attempts.start(request)
        self.attempts.advance_queue()
        return request

    def abort(self, request_id: str) -> None:
        """A client asks for the end of a request, by id. Raises NotFound."""
        request = self.requests.get(request_id)
        if request is None:
            raise NotFound(f"no live request {request_id[:128]!r}", request_id=request_id[:128])
        self.stop(request, FinishReason.ABORT, "aborted by the client")

    def stop(self, request: LiveRequest, finish: FinishReason, why: str) -> None:
        """End a request early: its client has gone, or has all it wanted. Fine for one that has ended."""
        if not request.ended:
            self._end(request, HandoffEvent.CANCELLED, why, finish=finish)

    def fail_all(self, error: Callable[[], KVRelayError]) -> None:
        """End every live request with an error."""
        for request in tuple(self.requests.values()):
            self._fail(request, error())

    # ---- nodes ----

    def join(self, registration: Registration, link: Link) -> Node:
        """Take a node in. Raises Refused when it does not fit; replaces one with the same id."""
        self.registry.check(registration)
        old = self.registry.get(registration.identity.node_id)
        if old is not None:
            self.leave(old, "replaced by a new session")
            # Of two processes with one id the older must not come back; one process may attach again.
            kind = Unavailable if old.identity == registration.identity else Refused
            old.link.close(kind(f"replaced by a new session of {registration.identity}", reason="NODE_REPLACED"))
        node = self.registry.add(registration, link)
        log.info("node joined", extra={"node": str(node.identity), "role": node.role})
        self._changed()
        return node

    def leave(self, node: Node, why: str) -> None:
        """A node's session ended: its attempts go elsewhere. Fine for a node that has left already."""
        if self.registry.get(node.node_id) is not node:
            return
        self.registry.remove(node)
        retries = []
        for attempt in self.attempts.of(node):
            if self._outlives(attempt, node):
                self.attempts.release_prefill(attempt)
                continue
            error = Unavailable(
                f"{node.role} node {node.node_id} was lost while {attempt.state.phase}: {why}",
                reason="NODE_LOST",
                phase=attempt.state.phase,
                node=node.node_id,
            )
            self.attempts.close(attempt, HandoffEvent.FAILED, str(error))
            retries.append((attempt.request, error))
        self.attempts.node_left(node)
        self.registry.announce_left(node)
        self._metrics.set_node(node.node_id, node.role, None)
        log.info("node left", extra={"node": str(node.identity), "role": node.role, "why": why})
        for request, error in sorted(retries, key=lambda pair: pair[0].order):
            self._retry(request, error)
        self.attempts.advance_queue()
        self._changed()

    def drain_node(self, node_id: str, deadline_s: float) -> None:
        """Ask a node to finish what it has and leave. Raises NotFound."""
        node = self.registry.get(node_id)
        if node is None:
            raise NotFound(f"no node {node_id[:128]!r} is attached", node=node_id[:128])
        self.registry.ask_drain(node)
        node.link.send(Drain(deadline_s))
        log.info("node asked to drain", extra={"node": str(node.identity), "role": node.role})
        self._changed()

    def on_report(self, node: Node, report: Report) -> None:
        """What a node says on its session."""
        node.heard = self._clock()
        match report:
            case Heartbeat(stats):
                self._counted(node, stats)
            case Grant(key):
                attempt = self._find(key, node, "grant")
                if attempt is not None and not self.attempts.granted(attempt, report):
                    self._late("grant")
            case RoomFailed(key):
                attempt = self._find(key, node, "room_failed")
                if attempt is not None:
                    self._room_failed(attempt, node, report)
            case RoomQuiesced(key):
                self.attempts.quiesced(key, node)
            case CacheDelta():
                node.apply(report)
            case Inspection():
                self._counted(node, report.stats)
                self.inspected(report)
            case Drained():
                log.info("node drained", extra={"node": str(node.identity), "role": node.role})
        self.attempts.advance_queue()

    def on_output(self, node: Node, step: StepOutput) -> None:
        """What a node made in one engine step."""
        for prefilled in step.prefilled:
            attempt = self._find(prefilled.key, node, "prefill_report")
            if attempt is not None:
                request, timing = attempt.request, attempt.request.timing
                timing.prefill_wait += prefilled.prefill_wait
                timing.prefill += prefilled.prefill
                if attempt.first_index == 0:
                    request.cached_tokens = prefilled.cached_tokens
        for relayed in step.relayed:
            attempt = self.attempts.find(relayed.key, node)
            if attempt is not None:  # that of a short answer may well come after its end, and is not late for that
                attempt.request.timing.relayed_bytes += relayed.bytes
                attempt.request.timing.relay += relayed.seconds
        for decoded in step.decoded:
            attempt = self._find(decoded.key, node, "decode_report")
            if attempt is not None:
                attempt.request.timing.handoff += decoded.handoff
                attempt.request.timing.decode += decoded.decode
        for token in step.tokens:
            attempt = self._find(token.key, node, "token")
            if attempt is not None:
                self._token(attempt, node, token)
        self.attempts.advance_queue()

    # ---- the clock ----

    def tick(self) -> None:
        """Everything that is due: leases, deadlines, pools without a node. To be called every fraction of a second."""
        now = self._clock()
        if now - self._ticked > self._config.lease_seconds / 2:
            # This process was held up, and what nodes said meanwhile is still unread: that is not their silence.
            for node in self.registry.nodes():
                node.heard = now
        self._ticked = now
        for node in self.registry.silent(self._config.lease_seconds):
            self.leave(node, f"silent for {self._config.lease_seconds:g} s")
            node.link.close(Unavailable("lease expired: no message for too long", reason="LEASE_EXPIRED"))
        missing = self.registry.missing(self._config.heartbeat_seconds)
        for request in tuple(self.requests.values()):
            attempt = request.attempt
            assert attempt is not None
            if request.ask.deadline is not None and now >= request.ask.deadline:
                self._fail(request, _too_slow("the client's deadline passed", attempt, "CLIENT_DEADLINE"))
            elif now - attempt.since >= self._limits[attempt.state]:
                self._timed_out(attempt)
            elif attempt.state is HandoffState.QUEUED and (lacking := [r for r in missing if _lacks(attempt, r)]):
                self._fail(request, self._no_node(lacking[0], request.failure))
        self.attempts.advance_queue()
        self._metrics.set(FrontDoorMetric.LIVE, len(self.requests))
        self._metrics.set(FrontDoorMetric.QUEUED, len(self.attempts.queue))

    def check_integrity(self) -> None:
        self.registry.check_integrity()
        self.attempts.check_integrity()
        for request_id, request in self.requests.items():
            assert request.ask.request_id == request_id
            assert not request.ended
            assert request.attempt is not None
            assert not request.attempt.state.ended

    # ---- consequences ----

    def _counted(self, node: Node, stats: NodeStats) -> None:
        self._metrics.set_node(node.node_id, node.role, stats)
        if self.registry.update(node, stats):
            event = "node serves" if node.serving else "node ceased to serve"
            log.info(event, extra={"node": str(node.identity), "role": node.role})
            self._changed()

    def _token(self, attempt: Attempt, node: Node, token: TokenOutput) -> None:
        if attempt.state is HandoffState.QUEUED:
            self._late("token")  # of a room that was never granted: that node is wrong
            return
        request = attempt.request
        if node is attempt.decode:
            self.attempts.move(attempt, HandoffEvent.COMPLETED)
            attempt.since = self._clock()
        else:
            self.attempts.move(attempt, HandoffEvent.PREFILLED)
        for ready in request.merge.add(token):
            if ready.index == 0:
                request.timing.first_token = self._clock() - request.arrived
            request.give(ready)
            if ready.finish is not None:
                # Of an end at the prefill node's own token, the decode node learns with the last page, if ever.
                early = ready.index == attempt.first_index
                self._end(request, HandoffEvent.FINISHED, "finished" if early else None, finish=ready.finish)
                return
        request.wake()

    def _room_failed(self, attempt: Attempt, node: Node, failed: RoomFailed) -> None:
        where = f"{node.role} node {node.node_id} failed while {failed.phase}: {failed.reason}"
        kind = Unavailable if failed.retriable else KVRelayError
        error = kind(where, reason="ROOM_FAILED", phase=failed.phase, node=node.node_id)
        if not failed.retriable:
            self._fail(attempt.request, error)
        elif failed.reason.startswith(RETRACTED):
            self.attempts.close(attempt, HandoffEvent.FAILED, str(error))
            self.attempts.start(attempt.request)
        else:
            # Either side may be the cause of what one of them reports.
            self._try_elsewhere(attempt, error, [part for part in (attempt.prefill, attempt.decode) if part])

    def _timed_out(self, attempt: Attempt) -> None:
        limit = self._limits[attempt.state]
        error = _too_slow(f"nothing for {limit:g} s", attempt, "PHASE_TIMEOUT")
        if attempt.state is HandoffState.QUEUED:
            error.retry_after = self._config.heartbeat_seconds
            self._fail(attempt.request, error)
        else:
            parts = (attempt.prefill, attempt.decode)
            suspects = _SUSPECTS[attempt.state]
            self._try_elsewhere(attempt, error, [part for part in parts if part is not None and part.role in suspects])

    def _try_elsewhere(self, attempt: Attempt, error: KVRelayError, suspects: Iterable[Node]) -> None:
        attempt.request.avoid.update(node.node_id for node in suspects)
        self.attempts.close(attempt, HandoffEvent.FAILED, str(error))
        self._retry(attempt.request, error)

    def _retry(self, request: LiveRequest, error: KVRelayError) -> None:
        """The last attempt is closed: begin another, or give up."""
        log.warning(
            "attempt failed",
            extra={"request_id": request.ask.request_id, "attempt": request.attempts, "error": str(error)},
        )
        request.failure = error
        request.failures += 1
        if request.failures >= self._config.max_attempts:
            self._settle(request, error=error)
            return
        self._metrics.count(FrontDoorMetric.RETRIES, 1, error.metadata["phase"])
        self.attempts.start(request)

    def _fail(self, request: LiveRequest, error: KVRelayError) -> None:
        self._end(request, HandoffEvent.FAILED, str(error), error=error)

    def _end(
        self,
        request: LiveRequest,
        event: HandoffEvent,
        abort: str | None,
        finish: FinishReason | None = None,
        error: KVRelayError | None = None,
    ) -> None:
        assert request.attempt is not None
        self.attempts.close(request.attempt, event, abort)
        self._settle(request, finish, error)

    def _settle(
        self, request: LiveRequest, finish: FinishReason | None = None, error: KVRelayError | None = None
    ) -> None:
        """The end of a request whose last attempt is closed."""
        del self.requests[request.ask.request_id]
        request.finish, request.error = finish, error
        request.timing.total = self._clock() - request.arrived
        record_end(request, self._metrics)
        request.wake()

    def _find(self, key: RoomKey, node: Node, kind: str) -> Attempt | None:
        """The attempt a message is about; None, counted, when it has ended or never was that node's."""
        attempt = self.attempts.find(key, node)
        if attempt is None:
            self._late(kind)
        return attempt

    def _late(self, kind: str) -> None:
        self._metrics.count(FrontDoorMetric.LATE, 1, kind)

    def _outlives(self, attempt: Attempt, node: Node) -> bool:
        """Whether an attempt needs its prefill node no more: every page has arrived, and its token is here."""
        arrived = attempt.state is HandoffState.DECODING and attempt.request.merge.next_index > attempt.first_index
        return arrived and node is attempt.prefill

    def _no_node(self, role: Role, failure: KVRelayError | None) -> Unavailable:
        phase = failure.metadata["phase"] if failure else HandoffState.QUEUED.phase
        because = f"; before that: {failure}" if failure else ""
        return Unavailable(
            f"no {role} node serves{because}",
            reason=f"NO_{role.upper()}_NODE",
            phase=phase,
            retry_after=self._config.heartbeat_seconds,
        )


def _lacks(attempt: Attempt, role: Role) -> bool:
    return (attempt.prefill if role is Role.PREFILL else attempt.decode) is None


def _too_slow(what: str, attempt: Attempt, reason: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{what} while {attempt.state.phase}", reason=reason, phase=attempt.state.phase)
