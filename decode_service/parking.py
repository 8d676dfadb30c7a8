"""The host buffer of a decode node: where the pages of retracted requests are until they fit on the device again.

    device pages ──park──► host pages ──bring_back──► other device pages
                               └──────drop─────────► gone

Bounded: what does not fit is refused, and the request is computed again elsewhere. Each call copies before it returns,
so the caller may free what was copied at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.core.types import RoomKey
from engine.device.kv_pool import KVPool
from engine.device.page_allocator import PageAllocator
from engine.device.page_copy import copy_pages

__all__ = ["Parking"]


class Parking:
    """Owns the pages of the host pool. host: None where there is no buffer, so that nothing ever fits."""

    def __init__(self, device: KVPool, host: KVPool | None):
        self._device = device
        self._host = host
        self._allocator = None if host is None else PageAllocator(host.num_pages)
        self._pages: dict[RoomKey, list[int]] = {}

    @property
    def num_pages(self) -> int:
        return 0 if self._allocator is None else self._allocator.num_pages

    @property
    def available(self) -> int:
        """Free pages."""
        return 0 if self._allocator is None else self._allocator.available

    def park(self, key: RoomKey, pages: Sequence[int]) -> bool:
        """Copy a room's device pages to the host. False, with nothing done, when they do not fit.

        Raises RuntimeError when a device fails. The room has host pages also then, until they are dropped.
        """
        assert key not in self._pages
        if self._host is None or self._allocator is None or len(pages) > self._allocator.available:
            return False
        self._pages[key] = self._allocator.allocate(len(pages), key)
        copy_pages(self._device, pages, self._host, self._pages[key])
        return True

    def bring_back(self, key: RoomKey, pages: Sequence[int]) -> None:
        """Copy a parked room's content to the first of these device pages; its host pages are free then.

        Raises RuntimeError when a device fails. The room has its host pages still, until they are dropped.
        """
        assert self._host is not None
        parked = self._pages[key]
        copy_pages(self._host, parked, self._device, pages[: len(parked)])
        self.drop(key)

    def drop(self, key: RoomKey) -> None:
        """Free the host pages of a room, if it has any."""
        if pages := self._pages.pop(key, None):
            assert self._allocator is not None
            self._allocator.free(pages, key)

    def check_integrity(self, parked: Collection[RoomKey]) -> None:
        """Exactly the rooms of `parked` have pages, and every other page is free."""
        assert self._pages.keys() == set(parked), "other rooms are parked than there should be"
        if self._allocator is not None:
            self._allocator.check_integrity()
            for key, pages in self._pages.items():
                assert len(pages) == self._allocator.owned(key) > 0, f"{key} does not own its host pages"
            held = sum(map(len, self._pages.values()))
            assert held + self._allocator.available == self._allocator.num_pages, "host pages belong to no room"
