"""Who gives way when pages run out on a decode node, as pure functions of who runs and what is free.

The least important where priorities count, then who has the fewest tokens, then who has the longest prompt. The last
one is never retracted: what arrives beside it, or is fenced, will end and leave its pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_service.config import DecodeOptions
from decode_service.room import DecodeRoom
from engine.core.priority import importance

__all__ = ["PARKED_AT_MOST_S", "needs_page", "victims"]

# A retracted request waits no longer than this for its pages to fit again: long enough for a few answers to end, and
# well within the minute without a token after which a front door takes a node to be hanging.
PARKED_AT_MOST_S = 10.0


def needs_page(room: DecodeRoom, page_size: int) -> bool:
    """Whether its next token begins a page."""
    return room.position >= len(room.pages) * page_size


def victims(running: Sequence[DecodeRoom], available: int, page_size: int, options: DecodeOptions) -> list[DecodeRoom]:
    """Those who give way, in this order, for each of the others to have a page for its next token.

    available: free pages. Where only one is left and there is none for it, that one stays.
    """
    staying, going = list(running), []
    needed = sum(needs_page(room, page_size) for room in staying)
    while needed > available and len(staying) > 1:
        victim = min(staying, key=lambda room: _loss(room, options))
        staying.remove(victim)
        going.append(victim)
        needed -= needs_page(victim, page_size)
        available += len(victim.pages)
    return going


def _loss(room: DecodeRoom, options: DecodeOptions) -> tuple[float, int, int]:
    """Least for the one to go first. By tokens over all attempts: else one that came back would always be the next."""
    rank = 0.0
    if options.priority_scheduling:
        rank = importance(room.reservation.priority, low_first=options.low_priority_first)
    return (rank, room.last_index, room.reservation.first_index - room.prompt)
