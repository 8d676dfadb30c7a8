"""The front door's decisions: what each message from a client, a node or the clock leads to.

Synchronous, on one thread, with an injected clock. Commands leave through the nodes' links, tokens through the
live request that `submit` returned. When a request is tried again, and when it ends, is `bootstrap.outcomes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

from bootstrap.attempts import Attempts
from bootstrap.config import BootstrapConfig
from bootstrap.failures import no_node, node_lost
from bootstrap.outcomes import Outcomes
from bootstrap.records import record_end
from bootstrap.registry import Link, Node, Registry
from bootstrap.requests import Ask, Attempt, LiveRequest, Phase
from engine.core.clock import Clock, monotonic
from engine.core.errors import AlreadyExists, KVRelayError, NotFound, Overloaded, Refused, Unavailable
from engine.core.handoff import HandoffEvent, HandoffState
from engine.core.messages import (
    AdmitReport,
    CacheDelta,
    DecodeReport,
    Drain,
    Drained,
    Explanation,
    Grant,
    Heartbeat,
    Inspection,
    NodeStats,
    PrefillReport,
    Registration,
    RelayReport,
    Report,
    RoomFailed,
    RoomFenced,
    RoomQuiesced,
    StepOutput,
)
from engine.core.metrics import FrontDoorMetric, Metrics
from engine.core.sampling import FinishReason
from engine.core.types import RoomKey, TokenOutput

__all__ = ["FrontDoor"]

log = logging.getLogger("kvrelay.bootstrap")

DEADLINE_SLACK_S = 0.1  # a call ends by its deadline at the client first, and so does its part here

RoomReport = Grant | RoomFailed | RoomQuiesced | RoomFenced
Output = AdmitReport | PrefillReport | RelayReport | DecodeReport | TokenOutput
_OUTPUT = {  # kinds of late messages
    AdmitReport: "admit_report",
    PrefillReport: "prefill_report",
    DecodeReport: "decode_report",
    TokenOutput: "token",
}


class FrontDoor:
    """Requests by client and id, and the nodes that serve them.

    `changed` is called when a node joins, leaves, serves or drains.
    """

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
        self._outcomes = Outcomes(config, registry, self.attempts, metrics, clock)
        self.requests = self._outcomes.requests
        self.answered: Callable[[Inspection | Explanation], None] = lambda answer: None
        self.draining = False  # set at shutdown: nothing new is taken in
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._changed = changed
        self._arrivals = 0
        self._ticked = clock()

    @property
    def ready(self) -> bool:
        """A request that came now could be served."""
        return not self.draining and all(self.registry.serving(role) for role in self.registry.roles)

    # ---- clients ----

    def submit(self, ask: Ask, wake: Callable[[], None], finish: FinishReason | None = None) -> LiveRequest:
        """Take a request in. `wake` is called whenever there is something to take, or the request has ended.

        finish: why the tokens that it resumes from have ended its answer, if they have. Then it has ended, too.
        Raises AlreadyExists, Overloaded, Unavailable, or InvalidField for what no attached node could ever run.
        """
        if self.draining:
            raise Unavailable("this front door is shutting down", reason="DRAINING", phase="queued", retry_after=1.0)
        if ask.owned_id in self.requests:
            raise AlreadyExists(f"request {ask.request_id!r} is live", request_id=ask.request_id)
        if finish is not None:
            request = LiveRequest(ask, (False, 0, 0), self._clock(), wake, finish=finish)
            record_end(request, self._metrics)
            return request
        if len(self.attempts.queue) >= self._config.max_queue:
            raise Overloaded(
                f"{len(self.attempts.queue)} requests wait already",
                reason="QUEUE_FULL",
                phase="queued",
                retry_after=self._config.heartbeat_seconds,
            )
        refusal = self.registry.refusal(ask.size)
        if refusal is not None:
            raise refusal
        missing = self.registry.missing(self._config.heartbeat_seconds)
        if missing:
            raise no_node(missing[0], None, self._config.heartbeat_seconds)
        self._arrivals += 1
        sign = 1 if self._config.low_priority_first else -1
        order = (ask.priority is None, sign * (ask.priority or 0), self._arrivals)
        request = LiveRequest(ask, order, self._clock(), wake)
        self.requests[ask.owned_id] = request
        with self._outcomes.shielded(request):
            self.attempts.start(request)
        self.attempts.advance_queue()
        return request

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """For all that comes before a request is taken in."""
        try:
            yield
        except KVRelayError as error:
            self._metrics.count(FrontDoorMetric.REFUSED, 1, error.reason)
            raise

    def abort(self, request_id: str, client: str | None = None, *, of_others: bool = False) -> None:
        """A client asks for the end of its request, by id. With `of_others`, and if it has none of that id itself, for
        that of every other client's. Raises NotFound.
        """
        own = self.requests.get((client, request_id))
        found = [own] if own else [one for one in self.of_id(request_id) if of_others]
        if not found:
            raise NotFound(f"no live request {request_id[:128]!r}", request_id=request_id[:128])
        for request in found:
            self.stop(request, FinishReason.ABORT, "aborted by the client")

    def of_id(self, request_id: str) -> list[LiveRequest]:
        """Live requests of that id, of all clients."""
        return [one for one in self.requests.values() if one.ask.request_id == request_id]

    def stop(self, request: LiveRequest, finish: FinishReason, why: str) -> None:
        """End a request early: its client has gone, or has all it wanted. Fine for one that has ended."""
        if not request.ended:
            self._outcomes.end(request, HandoffEvent.CANCELLED, why, finish=finish)

    def client_gone(self, request: LiveRequest) -> None:
        """Its call has ended: the client left, or its deadline passed. Fine for a request that has ended, too."""
        deadline = request.ask.deadline
        if request.ended:
            return
        if deadline is not None and self._clock() >= deadline - DEADLINE_SLACK_S:
            self._outcomes.deadline_passed(request)
        else:
            self.stop(request, FinishReason.ABORT, "the client has gone")

    def fail_all(self, error: Callable[[], KVRelayError]) -> None:
        """End every live request with an error."""
        for request in tuple(self.requests.values()):
            with self._outcomes.shielded(request):
                self._outcomes.fail(request, error())

    # ---- nodes ----

    def join(self, registration: Registration, link: Link) -> Node:
        """Take a node in. Raises Refused when it does not fit; replaces one with the same id."""
        self.registry.check(registration)
        old = self.registry.get(registration.identity.node_id)
        if old is not None:
            self.leave(old, "replaced by a new session")
            # Of two processes with one id the older must not come back; one process may attach again.
            kind = Unavailable if old.identity == registration.identity else Refused
            if kind is Refused:
                self.registry.replaced(old.identity)
            old.link.close(kind(f"replaced by a new session of {registration.identity}", reason="NODE_REPLACED"))
        node = self.registry.add(registration, link)
        incarnation = node.identity.incarnation
        log.info("node joined", extra={"node": node.node_id, "pool": node.role, "incarnation": incarnation})
        self._changed()
        return node

    def leave(self, node: Node, why: str) -> None:
        """A node's session ended: its attempts go elsewhere. Fine for a node that has left already."""
        if self.registry.get(node.node_id) is not node:
            return
        self.registry.remove(node)
        lost = []
        for attempt in self.attempts.of(node):
            if self._outlives(attempt, node):
                self.attempts.release_prefill(attempt)
                continue
            error = node_lost(node, attempt.state, why)
            with self._outcomes.shielded(attempt.request):
                self.attempts.close(attempt, HandoffEvent.FAILED, str(error))
                lost.append((attempt, error))
        self.attempts.node_left(node)
        self._outcomes.node_left()
        self.registry.announce_left(node)
        self._metrics.set_node(node.node_id, node.role, None)
        log.info("node left", extra={"node": node.node_id, "pool": node.role, "why": why})
        others = bool(self.registry.serving(node.role))
        for attempt, error in sorted(lost, key=lambda pair: pair[0].request.order):
            with self._outcomes.shielded(attempt.request):
                self._outcomes.retry(attempt, error, lost=others)
        self.attempts.advance_queue()
        self._changed()

    def drain_node(self, node_id: str, deadline_s: float) -> None:
        """Ask a node to finish what it has and leave. Raises NotFound."""
        node = self.registry.get(node_id)
        if node is None:
            raise NotFound(f"no node {node_id[:128]!r} is attached", node=node_id[:128])
        self.registry.ask_drain(node)
        node.link.send(Drain(deadline_s))
        log.info("node asked to drain", extra={"node": node.node_id, "pool": node.role})
        self._changed()

    def on_report(self, node: Node, report: Report) -> None:
        """What a node says on its session. Nothing, once it has left. Raises InvalidField for what ends the session."""
        if self.registry.get(node.node_id) is not node:
            return
        node.heard = self._clock()
        attempt = self.attempts.find(report.key, node) if isinstance(report, RoomReport) else None
        with self._outcomes.shielded(attempt.request) if attempt is not None else nullcontext():
            self._report(node, report, attempt)
        self.attempts.advance_queue()

    def _report(self, node: Node, report: Report, attempt: Attempt | None) -> None:
        """attempt: the live one that the report is about, if it is about one."""
        match report:
            case Heartbeat(stats):
                self._counted(node, stats)
            case Grant():
                if attempt is None or not self.attempts.granted(attempt, report):
                    self._late("grant")
            case RoomFailed():
                if attempt is None:
                    self._late("room_failed")
                else:
                    self._outcomes.room_failed(attempt, node, report)
            case RoomQuiesced(key):
                self.attempts.quiesced(key, node)
            case RoomFenced(key, writer):
                self.attempts.fenced(key, writer, node)
            case CacheDelta():
                node.apply(report)
            case Inspection():
                self._counted(node, report.stats)
                self.answered(report)
            case Explanation():
                self.answered(report)
            case Drained():
                log.info("node drained", extra={"node": node.node_id, "pool": node.role})

    def on_output(self, node: Node, step: StepOutput) -> None:
        """What a node made in one engine step. Nothing, once it has left."""
        if self.registry.get(node.node_id) is not node:
            return
        items: tuple[Output, ...]
        items = (*step.admitted, *step.prefilled, *step.relayed, *step.decoded, *step.tokens)
        for item in items:
            attempt = self.attempts.find(item.key, node)
            if attempt is not None:
                with self._outcomes.shielded(attempt.request):
                    self._output(attempt, node, item)
            elif not isinstance(item, RelayReport):  # that of a short answer may well come after its end
                self._late(_OUTPUT[type(item)])
        self.attempts.advance_queue()

    def not_taken(self, node: Node, keys: Iterable[RoomKey], raised: Exception) -> None:
        """A message of a node could not be taken in: that ends the requests which it was about."""
        log.error("message not taken in", extra={"node": node.node_id}, exc_info=raised)
        for key in keys:
            attempt = self.attempts.find(key, node)
            if attempt is not None:
                self._outcomes.broke(attempt.request, raised)

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
        self.attempts.pairs.tick()
        self._outcomes.tick(now)
        self.attempts.tick()
        self.attempts.advance_queue()
        self._metrics.set(FrontDoorMetric.LIVE, len(self.requests))
        self._metrics.set(FrontDoorMetric.QUEUED, len(self.attempts.queue))
        self._metrics.set(FrontDoorMetric.SET_ASIDE, len(self.attempts.pairs))

    def check_integrity(self) -> None:
        self.registry.check_integrity()
        self.attempts.check_integrity()
        self._outcomes.check_integrity()

    # ---- consequences ----

    def _counted(self, node: Node, stats: NodeStats) -> None:
        self._metrics.set_node(node.node_id, node.role, stats)
        if self.registry.update(node, stats):
            event = "node serves" if node.serving else "node ceased to serve"
            log.info(event, extra={"node": node.node_id, "pool": node.role})
            self._changed()

    def _output(self, attempt: Attempt, node: Node, item: Output) -> None:
        timing = attempt.request.timing
        match item:
            case AdmitReport(_, cached_tokens):
                self._admitted(attempt, cached_tokens)
            case PrefillReport():
                timing.add(Phase.PREFILL_WAIT, item.prefill_wait)
                timing.add(Phase.PREFILL, item.prefill)
            case RelayReport():
                timing.relayed_bytes += item.bytes
                timing.relay += item.seconds
            case DecodeReport():
                timing.add(Phase.HANDOFF, item.handoff)
            case TokenOutput():
                self._token(attempt, node, item)

    def _admitted(self, attempt: Attempt, cached_tokens: int) -> None:
        if not self.attempts.admitted(attempt):
            self._late("admit_report")  # of a room that was never granted: that node is wrong
            return
        if attempt.request.cached_tokens is None:
            # What it resumes from may have been cached, too, but is no part of the prompt.
            attempt.request.cached_tokens = min(cached_tokens, len(attempt.request.ask.token_ids))
            attempt.request.wake()

    def _token(self, attempt: Attempt, node: Node, token: TokenOutput) -> None:
        # A unified node says with its first token, too, that it has begun.
        if attempt.state is HandoffState.QUEUED and not self.attempts.admitted(attempt):
            self._late("token")  # as above
            return
        request = attempt.request
        if token.index >= request.ask.stopping.max_new_tokens:
            self._late("token")  # of an answer that nobody asked for
            return
        if node is attempt.decode:
            self.attempts.decoded(attempt)
        else:
            self.attempts.move(attempt, HandoffEvent.PREFILLED)
        for ready in request.merge.add(token):
            if request.made == 0:
                request.timing.first_token = self._clock() - request.arrived
            request.give(ready)
            if ready.finish is not None:
                # Of an end at the prefill node's own token, the decode node learns with the last page, if ever.
                early = ready.index == attempt.first_index and not attempt.unified
                self._outcomes.end(request, HandoffEvent.FINISHED, "finished" if early else None, finish=ready.finish)
                return
        request.wake()

    def _late(self, kind: str) -> None:
        self._metrics.count(FrontDoorMetric.LATE, 1, kind)

    def _outlives(self, attempt: Attempt, node: Node) -> bool:
        """Whether an attempt needs its prefill node no more: every page has arrived, and its token is here."""
        arrived = attempt.state is HandoffState.DECODING and attempt.request.merge.next_index > attempt.first_index
        return arrived and node is not attempt.decode
