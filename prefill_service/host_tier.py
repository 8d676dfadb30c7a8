"""The second tier of the prefix cache: pages in host memory that left the device pool, and the copies that are owed.

    device page ── evicted: offload ──► host page ── last in the order ──► gone
                ◄── matched: load ─────

The books change at once, the bytes later: whoever runs the forwards takes the copies with `take_copies` and executes
them, offloads first, before it writes, sends or computes on any page. Until then a host page that a load reads from
is not free, and so no offload of the same batch writes to it. A host page that an offload writes to may be freed and
taken again before that: the later offload then replaces the earlier.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.device.page_allocator import PageAllocator
from prefill_service.cache_node import Node
from prefill_service.eviction import Eviction, Leaves

__all__ = ["HOST", "CopyList", "HostTier", "TierCopies"]

HOST = "host-tier"  # owner of every page of the host pool that is not free


@dataclass(frozen=True, slots=True)
class CopyList:
    """Page sources[i] of one pool goes to page targets[i] of the other. No target is there twice."""

    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, slots=True)
class TierCopies:
    """To be executed in this order: a load may read what an offload has written."""

    offloads: CopyList = CopyList()  # device pages to host pages
    loads: CopyList = CopyList()  # host pages to device pages


class HostTier:
    """Owns the pages of the host pool. Which node is where is the cache's to know."""

    def __init__(self, allocator: PageAllocator, eviction: Eviction):
        self.leaves = Leaves(eviction)
        self._allocator = allocator
        self._offloads: dict[int, int] = {}  # host page -> device page
        self._loads: dict[int, int] = {}  # device page -> host page

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def available(self) -> int:
        """Free pages."""
        return self._allocator.available

    def offload(self, page: int) -> int:
        """Have the content of a device page copied to a free host page, which is returned."""
        (host,) = self._allocator.allocate(1, HOST)
        self._offloads[host] = page
        return host

    def load(self, host: int, page: int) -> None:
        """Have the content of a host page copied to a device page; then the host page is free."""
        assert page not in self._loads
        self._loads[page] = host

    def drop(self, host: int) -> None:
        """Free a host page: nobody wants its content any more."""
        self._offloads.pop(host, None)
        self._allocator.free((host,), HOST)

    def loading(self, page: int) -> bool:
        """Whether a copy to this device page is still owed."""
        return page in self._loads

    def take_copies(self) -> TierCopies:
        """The copies owed since the last call; who takes them executes them."""
        offloads, self._offloads = self._offloads, {}
        loads, self._loads = self._loads, {}
        self._allocator.free(tuple(loads.values()), HOST)
        return TierCopies(
            CopyList(tuple(offloads.values()), tuple(offloads)), CopyList(tuple(loads.values()), tuple(loads))
        )

    def check_integrity(self, nodes: Collection[Node]) -> None:
        """Every page of the pool is free, or of one of `nodes`, or about to be read for the last time."""
        self._allocator.check_integrity()
        taken = [node.host for node in nodes] + list(self._loads.values())
        assert len(set(taken)) == len(taken) == self._allocator.owned(HOST)
        assert self.available + len(taken) == self.num_pages
        assert set(self._offloads) <= set(taken), "an offload goes to a free page"
        self.leaves.check_integrity(nodes)
