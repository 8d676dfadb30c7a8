"""The states of one attempt at a hand-off, and the one table of transitions; all services name phases by it.

    QUEUED -> RESERVED -> PREFILLING -> TRANSFERRING -> DECODING -> FINISHED
       \\_________\\___________\\_____________\\____________\\-> FAILED | CANCELLED

An attempt only moves forward. Prefill and decode node report over different streams, so either one's message may
come first: an event takes the attempt to its state unless it is already there or beyond. Ended is ended: whatever
comes later is late, is dropped and counted by the caller, and never brings the room back.
"""

from __future__ import annotations

import enum

__all__ = ["FailureCause", "HandoffEvent", "HandoffState", "advance"]


class HandoffState(enum.IntEnum):
    """In the order an attempt passes through them."""

    QUEUED = 0  # in the bootstrap queue
    RESERVED = 1  # the decode node granted pages
    PREFILLING = 2  # admitted on the prefill node
    TRANSFERRING = 3  # the last chunk is computed and sent
    DECODING = 4  # every page arrived
    FINISHED = 5
    FAILED = 6
    CANCELLED = 7

    @property
    def ended(self) -> bool:
        return self >= HandoffState.FINISHED

    @property
    def phase(self) -> str:
        """Name for people and statuses."""
        return self.name.lower()


class HandoffEvent(enum.Enum):
    GRANTED = HandoffState.RESERVED
    ADMITTED = HandoffState.PREFILLING
    PREFILLED = HandoffState.TRANSFERRING
    COMPLETED = HandoffState.DECODING
    FINISHED = HandoffState.FINISHED
    FAILED = HandoffState.FAILED
    CANCELLED = HandoffState.CANCELLED


class FailureCause(enum.StrEnum):
    """Why a node gave up a room, as far as it decides what is done about it."""

    FAULT = "fault"  # of one of its nodes, or of what is between them
    RETRACTED = "retracted"  # a full node had to choose: nobody's
    PEER_LEFT = "peer_left"  # the other node of the room was lost


def advance(state: HandoffState, event: HandoffEvent) -> HandoffState | None:
    """State after `event`, or None when the event is late and must be dropped."""
    if state.ended:
        return None
    return max(state, event.value)
