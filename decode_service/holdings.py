"""The rooms of a decode node as admission sees them: who holds what, and who wants some."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from decode_service.admission import Candidate, DecodeState, Holder
from decode_service.config import DecodeOptions
from decode_service.room import DecodeRoom, RoomState
from engine.core.types import RoomKey

__all__ = ["candidates", "decode_state"]


def decode_state(
    rooms: Collection[DecodeRoom],
    pages: int,
    page_size: int,
    options: DecodeOptions,
    queue: Sequence[Candidate[RoomKey]] = (),
) -> DecodeState[RoomKey]:
    """rooms: in order of arrival. pages: of the pool, less those fenced, which are nobody's and not there to give."""

    def holders(state: RoomState, coming: int = 0) -> list[Holder[RoomKey]]:
        found = (room for room in rooms if room.state is state)
        return [Holder(room.key, room.prompt, room.max_new, room.generated + coming) for room in found]

    return DecodeState(
        page_size=page_size,
        capacity=pages * page_size,
        reserved=options.reserved_decode_tokens,
        rows=options.max_running,
        metadata_slots=options.max_running,  # ours ride on the last notice: no slots to run out of
        queue=queue,
        running=holders(RoomState.RUNNING),
        transfer=holders(RoomState.ARRIVING),
        # With the page that the next token may need: else it would have to give way again before it has come.
        retracted=holders(RoomState.RETRACTED, coming=1),
        priorities=options.priority_scheduling,
        low_priority_first=options.low_priority_first,
    )


def candidates(queued: Collection[DecodeRoom]) -> list[Candidate[RoomKey]]:
    """All of them ready: nodes that write find this one by themselves, and what was aborted is not here any more."""
    return [
        Candidate(
            room.key,
            room.prompt,
            room.max_new,
            priority=room.reservation.priority,
            resumed=room.reservation.first_index > 0,
        )
        for room in queued
    ]
