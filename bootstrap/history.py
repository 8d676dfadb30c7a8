"""What the front door remembers of attempts, so that people can ask afterwards why one ended, and on which nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from bootstrap.registry import Node
from bootstrap.requests import Attempt
from engine.core.clock import Clock
from engine.core.journal import ENDED_KEPT, OUTCOME_KEPT
from engine.core.types import RoomKey

__all__ = ["AttemptRecord", "History"]


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt, live or ended. Plain values, so that nothing keeps the request and its prompt in memory."""

    key: RoomKey
    request: int  # number of the request, by arrival: an id may be that of several
    prefill_node: str  # empty: none was chosen, or it was gone before the end and not missed
    decode_node: str  # empty: none was asked
    first_index: int  # tokens of the answer that were there when it began
    started: float  # on the front door's clock
    seconds: float  # from then to its end, or until now
    phase: str  # the present one, or the last before the end
    outcome: str  # empty: it has not ended


class History:
    """The last ENDED_KEPT attempts that ended, of all requests."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._ended: deque[tuple[str, AttemptRecord]] = deque(maxlen=ENDED_KEPT)

    def ended(self, attempt: Attempt, why: str) -> None:
        """An attempt is about to end. `why`: in a sentence, or "finished"."""
        self._ended.append((attempt.request.ask.request_id, self._record(attempt, why[:OUTCOME_KEPT])))

    def explain(self, request_id: str, live: Iterable[Attempt]) -> tuple[AttemptRecord, ...]:
        """What is known of each attempt at requests of that id, oldest first. `live`: those that have not ended."""
        ended = [record for of, record in self._ended if of == request_id]
        return (*ended, *(self._record(attempt, "") for attempt in live))

    def _record(self, attempt: Attempt, outcome: str) -> AttemptRecord:
        return AttemptRecord(
            key=attempt.key,
            request=attempt.request.order[-1],
            prefill_node=_name(attempt.prefill),
            decode_node=_name(attempt.decode),
            first_index=attempt.first_index,
            started=attempt.started,
            seconds=self._clock() - attempt.started,
            phase=attempt.state.phase,
            outcome=outcome,
        )


def _name(node: Node | None) -> str:
    return "" if node is None else node.node_id
