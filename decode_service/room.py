"""One request as a decode node keeps it. The engine loop is its only writer.

    QUEUED ──admitted: pages allocated──► ARRIVING ──every notice here──► RUNNING ──finished──► ENDED
       │                                      │               out of pages │  ▲ they fit again    ▲
       │                                      │                            ▼  │                   │
       │                                      │                         RETRACTED                 │
       └────────────── abort ─────────────────┴────────── failed, aborted ─────┴──────────────────┘

Pages: ARRIVING and RUNNING own `pages` under `key` in the allocator. When a room ends in ARRIVING a write may still
land, so its pages go to the fence first and become free from there. RETRACTED owns pages of the host pool instead, with
the content that `pages` had; all else that it needs to go on stays here.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from engine.core.lifetime import Timeline
from engine.core.loop import Link
from engine.core.types import Reservation, RoomKey
from engine.device.next_token import Wanted
from engine.device.sampler import TokenHistory

__all__ = ["DecodeRoom", "RoomState"]


class RoomState(enum.StrEnum):
    QUEUED = "queued"
    ARRIVING = "arriving"
    RUNNING = "running"
    RETRACTED = "retracted"


@dataclass(slots=True, eq=False)
class DecodeRoom:
    reservation: Reservation
    link: Link
    times: Timeline
    state: RoomState = RoomState.QUEUED
    pages: array[int] = field(default_factory=lambda: array("i"))  # an array is read into a batch at memory speed
    quiet_since: float | None = None  # clock time at which its writer was heard to be done with this room
    # From here on: known once the pages are here.
    last_token: int = -1  # the newest token, whose KV is not yet computed
    last_index: int = -1  # its index in the answer
    history: TokenHistory | None = None
    forward_end: float = 0.0  # wall clock of the prefill node when the last chunk's forward returned, in seconds

    @property
    def key(self) -> RoomKey:
        return self.reservation.key

    @property
    def prompt(self) -> int:
        """Tokens whose KV came from the prefill node."""
        return self.reservation.prompt_tokens

    @property
    def generated(self) -> int:
        """Tokens of this attempt's answer so far, token 0 of the attempt included."""
        return max(0, self.last_index - self.reservation.first_index + 1)

    @property
    def max_new(self) -> int:
        """Tokens this attempt may generate."""
        return self.reservation.stopping.max_new_tokens - self.reservation.first_index

    @property
    def position(self) -> int:
        """Where the newest token goes: tokens whose KV is in the pages."""
        return self.prompt + self.generated - 1

    @property
    def wanted(self) -> Wanted:
        """The next token."""
        reservation = self.reservation
        return Wanted(self.key, self.last_index + 1, reservation.sampling, reservation.stopping, self.history)

    def advance(self, token_id: int) -> None:
        """That was it."""
        self.last_token = token_id
        self.last_index += 1
        if self.history is not None:
            self.history.append(token_id)
