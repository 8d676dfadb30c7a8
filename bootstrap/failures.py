"""How attempts fail: the error for each cause, and how often a request may be tried again."""

from __future__ import annotations

from bootstrap.registry import Node
from bootstrap.requests import Attempt
from engine.core.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidField,
    InvalidRequest,
    KVRelayError,
    NotFound,
    Overloaded,
    Refused,
    Unavailable,
)
from engine.core.handoff import HandoffState
from engine.core.messages import RoomFailed
from engine.core.types import Role

__all__ = ["given_up", "no_node", "node_lost", "outgrown", "room_failed", "too_slow"]

MAX_REASON = 1024  # characters of what a node says
MOST_LOSSES = 16  # nodes that one request may lose: it may be what takes them down

_PHASES = frozenset(state.phase for state in HandoffState)
_BY_CODE: dict[str, type[KVRelayError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        NotFound,
        AlreadyExists,
        Refused,
        Overloaded,
        DeadlineExceeded,
        Cancelled,
        Unavailable,
    )
}


def given_up(attempt: Attempt, max_attempts: int, *, lost: bool) -> bool:
    """Count a failed attempt; True when its request must not be tried again.

    lost: because a node left while others of its role serve. That says little of the request, and is bounded apart.
    An attempt that made a token has brought the request nearer to its end, which bounds it well enough.
    """
    request = attempt.request
    if lost:
        request.losses += 1
    elif len(request.output) == attempt.first_index:
        request.failures += 1
    return request.failures >= max_attempts or request.losses >= MOST_LOSSES


def node_lost(node: Node, state: HandoffState, why: str) -> Unavailable:
    return Unavailable(
        f"{node.role} node {node.node_id} was lost while {state.phase}: {why}",
        reason="NODE_LOST",
        phase=state.phase,
        node=node.node_id,
    )


def room_failed(node: Node, failed: RoomFailed) -> KVRelayError:
    """What a node reported: UNAVAILABLE as long as others may do better, else the status that it names."""
    kind = Unavailable if failed.retriable else _BY_CODE.get(failed.code, KVRelayError)
    phase = failed.phase if failed.phase in _PHASES else "unknown"  # it becomes a label of a metric
    where = f"{node.role} node {node.node_id} failed while {phase}: {failed.reason[:MAX_REASON]}"
    return kind(where, reason="ROOM_FAILED", phase=phase, node=node.node_id)


def too_slow(what: str, state: HandoffState, reason: str, retry_after: float | None = None) -> DeadlineExceeded:
    return DeadlineExceeded(f"{what} while {state.phase}", reason=reason, phase=state.phase, retry_after=retry_after)


def no_node(role: Role, failure: KVRelayError | None, retry_after: float) -> Unavailable:
    """`failure`: why the request needs one at all, if it had one."""
    return Unavailable(
        f"no {role} node serves{_because(failure)}",
        reason=f"NO_{role.upper()}_NODE",
        phase=_phase(failure),
        retry_after=retry_after,
    )


def outgrown(refusal: InvalidField, failure: KVRelayError | None) -> Overloaded:
    """It has been taken in, and no node that is attached now could ever go on with it."""
    message = f"no attached node has room to go on: {refusal}{_because(failure)}"
    error = Overloaded(message, reason="NO_ROOM_TO_GO_ON", phase=_phase(failure))
    error.metadata |= refusal.metadata
    return error


def _because(failure: KVRelayError | None) -> str:
    return f"; before that: {failure}" if failure else ""


def _phase(failure: KVRelayError | None) -> str:
    return failure.metadata["phase"] if failure else HandoffState.QUEUED.phase
