"""Pages of ended attempts that a write may still reach. Pure bookkeeping; nothing here counts time.

Pages stay fenced until their writer has said that it is quiet for that room and epoch (no write posted and not
terminal, none to come), or until the writer itself is proven gone. A room key is one attempt, so it has one writer.

Neither proof covers bytes that were already on the way when a connection broke: they can lie in a socket buffer of
this very node and land when its transfer thread next looks. Call `PageReceiver.settle` between proof and table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.types import NodeIdentity, RoomKey

__all__ = ["FenceTable"]


@dataclass(frozen=True, slots=True)
class _Fence:
    pages: tuple[int, ...]
    writer: NodeIdentity


class FenceTable:
    """Freed pages are returned once, by the call that frees them, in the order they were given."""

    def __init__(self) -> None:
        self._fences: dict[RoomKey, _Fence] = {}
        self.late = 0  # acknowledgements for rooms that are not fenced (any more)

    @property
    def fenced_pages(self) -> int:
        return sum(len(fence.pages) for fence in self._fences.values())

    @property
    def rooms(self) -> int:
        return len(self._fences)

    def __contains__(self, room: RoomKey) -> bool:
        return room in self._fences

    def fence(self, room: RoomKey, pages: Sequence[int], writer: NodeIdentity) -> None:
        """Hold back the pages of an ended attempt. Frees nothing: a writer gone before this must be told gone again."""
        assert room not in self._fences, f"room {room} is fenced already"
        self._fences[room] = _Fence(tuple(pages), writer)

    def waiting(self) -> list[tuple[RoomKey, NodeIdentity]]:
        """Every fenced room and the writer it waits for."""
        return [(room, fence.writer) for room, fence in self._fences.items()]

    def quiesced(self, room: RoomKey) -> list[int]:
        """The writer of this room and epoch is quiet. Returns the freed pages; none for a room not fenced."""
        fence = self._fences.pop(room, None)
        if fence is None:
            self.late += 1
            return []
        return list(fence.pages)

    def writer_gone(self, writer: NodeIdentity) -> list[int]:
        """This writer is proven to write nothing more in any room fenced so far. Returns the freed pages.

        Not remembered: a node that was cut off for a while comes back as the same incarnation.
        """
        rooms = [room for room, fence in self._fences.items() if fence.writer == writer]
        return [page for room in rooms for page in self._fences.pop(room).pages]

    def check_integrity(self) -> None:
        pages = [page for fence in self._fences.values() for page in fence.pages]
        assert len(pages) == len(set(pages)), "a page is fenced twice"
