"""When a live request is tried again, and when it ends and how: after what a node said, or what the clock says."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from bootstrap.attempts import Attempts
from bootstrap.config import BootstrapConfig
from bootstrap.failures import given_up, no_node, outgrown, room_failed, too_slow
from bootstrap.records import record_end
from bootstrap.registry import Node, Registry
from bootstrap.requests import Attempt, LiveRequest
from engine.core.clock import Clock
from engine.core.errors import KVRelayError, OurMistake
from engine.core.handoff import FailureCause, HandoffEvent, HandoffState
from engine.core.messages import RoomFailed
from engine.core.metrics import FrontDoorMetric, Metrics
from engine.core.sampling import FinishReason
from engine.core.types import Role

__all__ = ["Outcomes"]

log = logging.getLogger("kvrelay.bootstrap")

# Who is to blame when a phase takes too long: the node that reads the prompt, and the one that writes the answer.
_SUSPECTS = {
    HandoffState.RESERVED: (True, False),
    HandoffState.PREFILLING: (True, False),
    HandoffState.DECODING: (False, True),
}


class Outcomes:
    """Live requests by client and id. None is here that has ended, and each has a live attempt."""

    def __init__(self, config: BootstrapConfig, registry: Registry, attempts: Attempts, metrics: Metrics, clock: Clock):
        self.requests: dict[tuple[str | None, str], LiveRequest] = {}  # by `Ask.owned_id`
        self._config = config
        self._registry = registry
        self._attempts = attempts
        self._metrics = metrics
        self._clock = clock
        attempts.shielded = self.shielded
        self._fit_due: float | None = None  # when to look for queued requests that no attached node could run
        self._limits = {
            HandoffState.QUEUED: config.queue_timeout,
            HandoffState.RESERVED: config.prefill_timeout,
            HandoffState.PREFILLING: config.prefill_timeout,
            HandoffState.TRANSFERRING: config.transfer_timeout,
            HandoffState.DECODING: config.token_timeout,
        }

    def end(
        self,
        request: LiveRequest,
        event: HandoffEvent,
        abort: str | None,
        finish: FinishReason | None = None,
        error: KVRelayError | None = None,
    ) -> None:
        """Close the attempt, as `Attempts.close` does, and the request with it."""
        assert request.attempt is not None
        try:
            self._attempts.close(request.attempt, event, abort)
        finally:
            self._settle(request, finish, error)

    def fail(self, request: LiveRequest, error: KVRelayError) -> None:
        self.end(request, HandoffEvent.FAILED, str(error), error=error)

    def deadline_passed(self, request: LiveRequest) -> None:
        """The client's own."""
        self.fail(request, too_slow("the client's deadline passed", request.state, "CLIENT_DEADLINE"))

    @contextmanager
    def shielded(self, request: LiveRequest) -> Iterator[None]:
        """For what is done for one request: what raises in here ends this one, and is raised no further."""
        try:
            yield
        except Exception as raised:
            self.broke(request, raised)

    def broke(self, request: LiveRequest, raised: Exception) -> None:
        """What had to be done for a request raised, which is our mistake: it ends this request and no other."""
        error = OurMistake()
        extra = {"request_id": request.ask.request_id, **error.metadata}
        log.error("request broke", extra=extra, exc_info=raised)
        if request.ended:
            return
        try:
            if request.attempt is not None and not request.attempt.state.ended:
                self._attempts.close(request.attempt, HandoffEvent.FAILED, str(error))
        except Exception:  # its books are closed first: what it failed at is to tell a node
            log.exception("nodes not told", extra=extra)
        self._settle(request, error=error)

    def room_failed(self, attempt: Attempt, node: Node, failed: RoomFailed) -> None:
        error = room_failed(node, failed)
        if not failed.retriable:
            self.fail(attempt.request, error)
        elif failed.cause is FailureCause.RETRACTED:
            self._try_elsewhere(attempt, error, ())
        elif failed.cause is FailureCause.FAULT and failed.phase == HandoffState.TRANSFERRING.phase:
            self._transfer_failed(attempt, error)
        else:  # either side may be the cause of what one of them reports
            self._try_elsewhere(attempt, error, (attempt.prefill, attempt.decode))

    def retry(self, attempt: Attempt, error: KVRelayError, *, lost: bool = False) -> None:
        """An attempt is closed: begin another, or give up. `lost`: with its node, while others serve."""
        request = attempt.request
        log.warning(
            "attempt failed",
            extra={"request_id": request.ask.request_id, "attempt": request.attempts, "error": str(error)},
        )
        request.failure = error
        if given_up(attempt, self._config.max_attempts, lost=lost):
            self._settle(request, error=error)
            return
        self._metrics.count(FrontDoorMetric.RETRIES, 1, error.metadata["phase"])
        self._attempts.start(request)
        if self._fit_due is None:
            self._fit_due = self._clock()

    def node_left(self) -> None:
        """Requests may fit no node any more; but this one may be about to come back."""
        self._fit_due = self._clock() + self._config.heartbeat_seconds

    def tick(self, now: float) -> None:
        missing = self._registry.missing(self._config.heartbeat_seconds)
        for request in tuple(self.requests.values()):
            with self.shielded(request):
                self._tick(request, now, missing)
        if self._fit_due is not None and now >= self._fit_due:
            self._fit_due = None
            self._end_outgrown()

    def check_integrity(self) -> None:
        for owned_id, request in self.requests.items():
            assert request.ask.owned_id == owned_id
            assert not request.ended
            assert request.attempt is not None
            assert not request.attempt.state.ended

    def _tick(self, request: LiveRequest, now: float, missing: list[Role]) -> None:
        attempt = request.attempt
        assert attempt is not None
        state = attempt.state
        if request.ask.deadline is not None and now >= request.ask.deadline:
            self.deadline_passed(request)
        elif now - attempt.since >= self._limits[state]:
            self._timed_out(attempt)
        elif state is HandoffState.QUEUED:
            lacking = [role for role in missing if _lacks(attempt, role)]
            if lacking:
                self.fail(request, no_node(lacking[0], request.failure, self._config.heartbeat_seconds))
            elif attempt.decode is not None and now - attempt.asked >= self._config.grant_timeout:
                self._attempts.overdue(attempt)

    def _timed_out(self, attempt: Attempt) -> None:
        state = attempt.state
        what = f"nothing for {self._limits[state]:g} s"
        if state is HandoffState.QUEUED:
            self.fail(attempt.request, too_slow(what, state, "PHASE_TIMEOUT", self._config.heartbeat_seconds))
        elif state is HandoffState.TRANSFERRING:
            self._transfer_failed(attempt, too_slow(what, state, "PHASE_TIMEOUT"))
        else:
            parts = zip((attempt.prefill, attempt.decode), _SUSPECTS[state], strict=True)
            suspects = [part for part, suspected in parts if suspected]
            self._try_elsewhere(attempt, too_slow(what, state, "PHASE_TIMEOUT"), suspects)

    def _transfer_failed(self, attempt: Attempt, error: KVRelayError) -> None:
        """What failed is between two nodes, both of which may be well: change one of them if that can be.

        The decode node, since the other one has the prompt cached; but the prefill node if it failed with another.
        """
        prefill, decode, doubted = attempt.prefill, attempt.decode, attempt.request.doubted
        if prefill is None or decode is None or attempt.unified:
            self._try_elsewhere(attempt, error, (prefill, decode))
            return
        self._attempts.pairs.failed(prefill.identity, decode.identity, attempt.since)
        again = prefill.node_id in doubted and decode.node_id not in doubted
        order = (prefill, decode) if again else (decode, prefill)
        doubted.update((prefill.node_id, decode.node_id))
        changed = next((node for node in order if self._attempts.replaceable(attempt, node)), None)
        self._try_elsewhere(attempt, error, (changed,))

    def _end_outgrown(self) -> None:
        """Fail queued requests that no attached node could run, however idle."""
        for request in tuple(self.requests.values()):
            attempt = request.attempt
            assert attempt is not None
            if attempt.state is not HandoffState.QUEUED:
                continue
            with self.shielded(request):
                refusal = self._registry.refusal(attempt.size)
                if refusal is not None:
                    self.fail(request, outgrown(refusal, request.failure))

    def _try_elsewhere(self, attempt: Attempt, error: KVRelayError, suspects: Iterable[Node | None]) -> None:
        attempt.request.avoid.update(node.node_id for node in suspects if node is not None)
        self._attempts.close(attempt, HandoffEvent.FAILED, str(error))
        self.retry(attempt, error)

    def _settle(
        self, request: LiveRequest, finish: FinishReason | None = None, error: KVRelayError | None = None
    ) -> None:
        """The end of a request whose last attempt is closed."""
        del self.requests[request.ask.owned_id]
        request.finish, request.error = finish, error
        request.timing.total = self._clock() - request.arrived
        request.wake()
        record_end(request, self._metrics)


def _lacks(attempt: Attempt, role: Role) -> bool:
    return (attempt.decode if role is Role.DECODE else attempt.prefill) is None
