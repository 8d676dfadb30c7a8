"""Which cached page leaves first.

`Leaves` is a heap of the evictable leaves of one pool by rank. Ranks may have grown since a leaf was put in; it is then
put back at its new rank when met, so touching stays O(1) and evicting costs O(log n) a page.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable

from prefill_service.cache_node import Entry, Node, Rank

__all__ = ["Eviction", "Leaves"]

_SLACK = 64  # entries that are worth no clearing out


class Eviction(enum.StrEnum):
    """Which leaf leaves first."""

    LRU = "lru"  # least recently used
    LFU = "lfu"  # least often used, then least recently
    FIFO = "fifo"  # first cached
    MRU = "mru"  # most recently used
    PRIORITY = "priority"  # least priority of any request that used it, then least recently


_RANKS: dict[Eviction, Callable[[Node], Rank]] = {
    Eviction.LRU: lambda node: (node.stamp, 0),
    Eviction.LFU: lambda node: (node.uses, node.stamp),
    Eviction.FIFO: lambda node: (node.born, 0),
    Eviction.MRU: lambda node: (-node.stamp, 0),
    Eviction.PRIORITY: lambda node: (node.priority, node.stamp),
}


class Leaves:
    """The evictable leaves of one pool, in the order in which they leave."""

    def __init__(self, eviction: Eviction):
        self.rank = _RANKS[eviction]
        # Touching lowers a rank only here, so only here must a touched leaf be offered anew.
        self.sinks = eviction is Eviction.MRU
        self._heap: list[Entry] = []
        self._limit = _SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Put an evictable leaf where `pop` finds it."""
        if node.offered is not None and not self.sinks:
            return  # its entry stands at a rank no greater than the true one
        if len(self._heap) > self._limit:  # replaced entries pile up
            self._heap = [entry for entry in self._heap if entry[2].offered is entry]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _SLACK
        node.offered = (self.rank(node), node.born, node)
        heapq.heappush(self._heap, node.offered)

    def pop(self) -> Node | None:
        """Take out the leaf that leaves first; None: there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            rank, _, node = entry
            if node.offered is not entry:
                continue  # replaced by a later offer, or it has changed pools
            node.offered = None
            if not node.evictable:
                continue  # offered again when it becomes an evictable leaf
            if self.rank(node) > rank:
                self.offer(node)
                continue
            return node
        return None

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """Of `nodes`, all of this pool, `pop` finds each that is evictable."""
        entries = {id(entry) for entry in self._heap}
        assert all(id(node.offered) in entries for node in nodes if node.evictable), "a leaf is not evictable"
