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
        # A room may be fenced after its writer's end was told. Grows by one entry a node restart.
        self._gone: set[NodeIdentity] = set()
        self.late = 0  # acknowledgements for rooms that are not fenced (any more)

    @property
    def fenced_pages(self) -> int:
        return sum(len(fence.pages) for fence in self._fences.values())

    @property
    def rooms(self) -> int:
        return len(self._fences)

    def __contains__(self, room: RoomKey) -> bool:
        return room in self._fences

    def fence(self, room: RoomKey, pages: Sequence[int], writer: NodeIdentity) -> list[int]:
        """Hold back the pages of an ended attempt. Returns them at once when its writer is gone already."""
        assert room not in self._fences, f"room {room} is fenced already"
        if writer in self._gone:
            return list(pages)
        self._fences[room] = _Fence(tuple(pages), writer)
        return []

    def quiesced(self, room: RoomKey) -> list[int]:
        """The writer of this room and epoch is quiet. Returns the freed pages; none for a room not fenced."""
        fence = self._fences.pop(room, None)
        if fence is None:
            self.late += 1
            return []
        return list(fence.pages)

    def writer_gone(self, writer: NodeIdentity) -> list[int]:
        """This incarnation has ended: its process no longer runs. Returns the freed pages."""
        self._gone.add(writer)
        rooms = [room for room, fence in self._fences.items() if fence.writer == writer]
        return [page for room in rooms for page in self._fences.pop(room).pages]

    def check_integrity(self) -> None:
        pages = [page for fence in self._fences.values() for page in fence.pages]
        assert len(pages) == len(set(pages)), "a page is fenced twice"
        assert not any(fence.writer in self._gone for fence in self._fences.values()), "fenced for a dead writer"
