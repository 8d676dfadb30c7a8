"""Cached pages of prompts, found by the chained key of a page (design: a page trie with a hash index).

    root ── page key a ── page key b ── page key c      one node per page; equal keys mean equal tokens from
                      └── page key d                    the very start, so an index finds any node directly

* Leaves alone are evicted, so the cached keys of a chain are a prefix of it: `match` is a binary search.
* `lock` marks one node. Its ancestors cannot leave before it, and are counted as protected through `guarded`,
  the number of protected children; climbing stops at the first ancestor that was protected already.
* `touch` stamps one node. When a leaf leaves, its parent inherits what the leaf knew (the later stamp, the uses,
  the greater priority), so an ancestor always ranks as if each use of a descendant had been its own.
* Stamps count touches, not seconds: engines fed the same calls evict the same pages.

Page ownership: a page of a node belongs to `CACHE` in the allocator, whether locked or not.

Eviction order (`Eviction`): a heap of leaves by rank. Ranks may have grown since a leaf was put in; it is then put back
at its new rank when met, so touching stays O(1) and evicting costs O(log n) a page.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Hashable, Sequence

from engine.core.messages import CacheDelta
from engine.device.page_allocator import PageAllocator

__all__ = ["CACHE", "Eviction", "Node", "PrefixCache"]

CACHE = "prefix-cache"  # owner of every cached page

_Rank = tuple[float, float]


class Eviction(enum.StrEnum):
    """Which leaf leaves first."""

    LRU = "lru"  # least recently used
    LFU = "lfu"  # least often used, then least recently
    FIFO = "fifo"  # first cached
    MRU = "mru"  # most recently used
    PRIORITY = "priority"  # least priority of any request that used it, then least recently


class Node:
    """One cached page. Read it freely; only the cache writes it."""

    __slots__ = (
        "born",
        "cached",
        "children",
        "depth",
        "guarded",
        "key",
        "locks",
        "offered",
        "page",
        "parent",
        "priority",
        "stamp",
        "uses",
    )

    def __init__(self, key: bytes, parent: Node | None, page: int, born: int, priority: float, stamp: int):
        self.key: bytes = key
        self.parent: Node = self if parent is None else parent
        self.page: int = page
        self.cached: bool = True  # until it is evicted
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages from the first down to this one
        self.born: int = born  # sequence number of its insertion
        self.priority: float = priority
        self.stamp: int = stamp
        self.uses: int = 0
        self.children: int = 0
        self.guarded: int = 0  # children that are protected
        self.locks: int = 0
        self.offered: _Rank | None = None  # rank of its valid heap entry


_RANKS: dict[Eviction, Callable[[Node], _Rank]] = {
    Eviction.LRU: lambda node: (node.stamp, 0),
    Eviction.LFU: lambda node: (node.uses, node.stamp),
    Eviction.FIFO: lambda node: (node.born, 0),
    Eviction.MRU: lambda node: (-node.stamp, 0),
    Eviction.PRIORITY: lambda node: (node.priority, node.stamp),
}


class PrefixCache:
    """Sizes are in pages. Keys passed in are a request's chain from its first page on."""

    def __init__(self, allocator: PageAllocator, eviction: Eviction = Eviction.LRU):
        self._allocator = allocator
        self._rank = _RANKS[eviction]
        # Touching lowers a rank only here, so only here must a touched leaf be offered anew.
        self._sinks = eviction is Eviction.MRU
        self._index: dict[bytes, Node] = {}
        self._heap: list[tuple[_Rank, int, Node]] = []
        self._changes: dict[bytes, bool] = {}  # key -> present
        self._protected = 0
        self._now = 0
        self._born = 0
        # The empty prefix is its own parent and locked for ever, so no climb goes past it and it never leaves.
        self.root = Node(b"", None, -1, 0, -math.inf, 0)
        self.root.locks = 1

    def __len__(self) -> int:
        return len(self._index)

    @property
    def evictable(self) -> int:
        """Pages that `evict` can free now."""
        return len(self._index) - self._protected

    @property
    def protected(self) -> int:
        """Pages at or above a lock."""
        return self._protected

    def match(self, keys: Sequence[bytes], hint: Node | None = None) -> Node:
        """Deepest node of the chain that is cached; the root when none is. Changes nothing.

        O(log pages) look-ups. One is enough when `hint`, an earlier answer for the same keys, still holds.
        """
        index = self._index
        low, high = 0, len(keys)
        if hint is not None and hint.cached:
            low = hint.depth
            if low == high or keys[low] not in index:
                return hint
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in index:
                low = middle + 1
            else:
                high = middle
        return index[keys[low - 1]] if low else self.root

    def find(self, key: bytes) -> Node:
        """The node of a key known to be cached."""
        return self._index[key]

    def pages(self, node: Node) -> list[int]:
        """Page ids from the start of the chain down to `node`."""
        pages = []
        while node is not self.root:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    def keys(self) -> tuple[bytes, ...]:
        """All cached keys, parents first: what a node tells a front door that has just met it."""
        return tuple(self._index)

    def touch(self, node: Node) -> None:
        """Mark as used just now."""
        self._now += 1
        node.stamp = self._now
        if self._sinks and node.children == 0 and node.locks == 0:
            self._offer(node)

    def use(self, node: Node) -> None:
        """Count one more request that reuses the chain down to `node`, and touch it."""
        node.uses += 1
        self.touch(node)

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors until a matching unlock."""
        node.locks += 1
        if node.locks > 1 or node.guarded:
            return
        while True:
            self._protected += 1
            node = node.parent
            node.guarded += 1
            if node.locks or node.guarded > 1:  # the root counts as locked
                return

    def unlock(self, node: Node) -> None:
        """Take one lock back."""
        assert node.locks > (node is self.root), "unlocked more often than locked"
        node.locks -= 1
        if node.locks or node.guarded:
            return
        if node.children == 0:
            self._offer(node)
        while True:
            self._protected -= 1
            node = node.parent
            node.guarded -= 1
            if node.locks or node.guarded:
                return

    def insert(
        self, node: Node, keys: Sequence[bytes], pages: list[int], owner: Hashable, priority: float = -math.inf
    ) -> Node:
        """Cache the pages after `node` of a chain, as far as `keys` go; return the deepest node.

        pages[i] holds the KV of keys[i], and those from node.depth on belong to `owner`. A page whose key is cached
        already is a duplicate: its place in `pages` is given the cached page, then the duplicate is freed.
        """
        self._now += 1
        fresh, duplicates = [], []
        for i in range(node.depth, len(keys)):
            child = self._index.get(keys[i])
            if child is None:
                child = self._attach(node, keys[i], pages[i], priority)
                fresh.append(pages[i])
            else:
                duplicates.append(pages[i])
                pages[i] = child.page
            node = child
        self._allocator.move(fresh, owner, CACHE)
        self._allocator.free(duplicates, owner)
        if priority > node.priority:
            node.priority = priority
        node.stamp = self._now
        if node.children == 0 and node.locks == 0:
            self._offer(node)
        return node

    def evict(self, count: int) -> int:
        """Free up to `count` pages; return how many were freed: count, or all that are evictable."""
        freed: list[int] = []
        heap = self._heap
        while len(freed) < count and heap:
            rank, _, node = heapq.heappop(heap)
            if node.offered != rank:
                continue  # replaced by a later offer
            node.offered = None
            if node.children or node.locks:
                continue  # offered again when it becomes an evictable leaf
            if self._rank(node) > rank:
                self._offer(node)
                continue
            freed.append(node.page)
            self._detach(node)
        self._allocator.free(freed, CACHE)
        return len(freed)

    def drain_changes(self) -> CacheDelta:
        """Keys that came and went since the last call; a key that did both counts by what it did last."""
        changes, self._changes = self._changes, {}
        return CacheDelta(
            tuple(key for key, present in changes.items() if present),
            tuple(key for key, present in changes.items() if not present),
        )

    def check_integrity(self) -> int:
        """Recount everything from the nodes alone; return the number of locks held."""
        nodes = list(self._index.values())
        children = dict.fromkeys([self.root, *nodes], 0)
        guarded = dict.fromkeys(children, 0)
        for node in sorted(nodes, key=lambda node: -node.depth):
            assert self._index[node.key] is node
            assert node.parent is self.root or self._index.get(node.parent.key) is node.parent, "parent left first"
            assert node.depth == node.parent.depth + 1
            assert node.born > node.parent.born
            children[node.parent] += 1
            guarded[node.parent] += bool(node.locks or guarded[node])
        for node in children:
            assert node.children == children[node]
            assert node.guarded == guarded[node]
        protected = sum(1 for node in nodes if node.locks or node.guarded)
        assert protected == self._protected
        entries = {(rank, node.born) for rank, _, node in self._heap}
        for node in nodes:
            if not node.children and not node.locks:
                assert (node.offered, node.born) in entries, "a leaf is not evictable"
        pages = [node.page for node in nodes]
        assert len(set(pages)) == len(pages) == self._allocator.owned(CACHE)
        return sum(node.locks for node in children) - 1  # the root's own

    def _attach(self, parent: Node, key: bytes, page: int, priority: float) -> Node:
        self._born += 1
        node = Node(key, parent, page, self._born, priority, self._now)
        parent.children += 1
        self._index[key] = node
        self._changes.pop(key, None)  # to the end: a parent must not stand behind its child
        self._changes[key] = True
        return node

    def _detach(self, node: Node) -> None:
        del self._index[node.key]
        node.cached = False
        self._changes[node.key] = False
        parent = node.parent
        parent.children -= 1
        parent.uses += node.uses
        if node.stamp > parent.stamp:
            parent.stamp = node.stamp
        if node.priority > parent.priority:
            parent.priority = node.priority
        if parent.children == 0 and parent.locks == 0:
            self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Put an evictable leaf where `evict` finds it."""
        if node.offered is not None and not self._sinks:
            return  # its entry stands at a rank no greater than the true one
        if len(self._heap) > 2 * len(self._index) + 64:  # replaced entries pile up only when ranks sink
            self._heap = [entry for entry in self._heap if entry[2].offered == entry[0]]
            heapq.heapify(self._heap)
        node.offered = self._rank(node)
        heapq.heappush(self._heap, (node.offered, node.born, node))
