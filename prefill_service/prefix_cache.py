"""Cached pages of prompts, found by the chained key of a page (design: a page trie with a hash index).

    root ── page key a ── page key b ── page key c      one node per page; equal keys mean equal tokens from
                      └── page key d                    the very start, so an index finds any node directly

* Leaves alone are evicted, so the cached keys of a chain are a prefix of it: `match` is a binary search.
* With a host tier an evicted page moves to the host pool, and leaves for good from there. A leaf of the device pool is
  then a node without a child on the device, so the nodes of a chain on the device come first, those on the host
  after them: `resident` is a binary search, too. `load` brings the host part of a chain back.
* `lock` marks one node. Its ancestors cannot leave before it, and are counted as protected through `guarded`,
  the number of protected children; climbing stops at the first ancestor that was protected already.
* `touch` stamps one node. When a leaf leaves a pool, its parent inherits what the leaf knew (the later stamp, the
  uses, the greater priority), so an ancestor always ranks as if each use of a descendant had been its own.
* Stamps count touches, not seconds: engines fed the same calls evict the same pages.

Page ownership: a device page of a node belongs to `CACHE` in the allocator, whether locked or not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from engine.core.messages import CacheDelta
from engine.device.page_allocator import PageAllocator
from prefill_service.cache_node import Node
from prefill_service.eviction import Eviction, Leaves
from prefill_service.host_tier import HostTier, TierCopies

__all__ = ["CACHE", "Eviction", "Node", "PrefixCache"]

CACHE = "prefix-cache"  # owner of every cached page of the device pool


class PrefixCache:
    """Sizes are in pages. Keys passed in are a request's chain from its first page on.

    host: the pages of a host pool, for a host tier of that size; nobody else may take any.
    """

    def __init__(self, allocator: PageAllocator, eviction: Eviction = Eviction.LRU, host: PageAllocator | None = None):
        self._allocator = allocator
        self._leaves = Leaves(eviction)  # of the device pool
        self._host = None if host is None else HostTier(host, eviction)
        self._hosted = 0  # nodes in the host pool
        self._index: dict[bytes, Node] = {}
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
        """Device pages that `evict` can free now."""
        return len(self._index) - self._hosted - self._protected

    @property
    def protected(self) -> int:
        """Device pages at or above a lock."""
        return self._protected

    @property
    def host_pages(self) -> int:
        """Size of the host pool; 0: there is no host tier."""
        return 0 if self._host is None else self._host.num_pages

    @property
    def host_free(self) -> int:
        """Free pages of the host pool; the others hold cached pages."""
        return 0 if self._host is None else self._host.available

    def match(self, keys: Sequence[bytes], hint: Node | None = None) -> Node:
        """Deepest node of the chain that is cached in either pool; the root when none is. Changes nothing.

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

    def resident(self, node: Node, keys: Sequence[bytes]) -> Node:
        """Deepest node of the chain down to `node` that is on the device; `keys` are the chain's. O(log pages)."""
        if node.host < 0:
            return node
        low, high = 0, node.depth - 1
        while low < high:
            middle = (low + high) // 2
            if self._index[keys[middle]].host < 0:
                low = middle + 1
            else:
                high = middle
        return self._index[keys[low - 1]] if low else self.root

    def find(self, key: bytes) -> Node:
        """The node of a key known to be cached."""
        return self._index[key]

    def pages(self, node: Node) -> list[int]:
        """Device pages from the start of the chain down to `node`, which is on the device."""
        pages = []
        while node is not self.root:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    def keys(self) -> tuple[bytes, ...]:
        """All cached keys, parents first: what a node tells a front door that has just met it."""
        return tuple(self._index)

    def touch(self, node: Node, keys: Sequence[bytes] = ()) -> None:
        """Mark as used just now. `keys`, the chain of `node`, are needed where it may be on the host."""
        self._now += 1
        self._stamp(node)
        if node.host >= 0:  # those between the two inherit it when it leaves; those above, when they do
            self._stamp(self.resident(node, keys))

    def use(self, node: Node, priority: float = -math.inf) -> None:
        """Count one more request that reuses the chain down to `node`, which is on the device, and touch it."""
        node.uses += 1
        node.priority = max(node.priority, priority)
        self.touch(node)

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors until a matching unlock."""
        node.locks += 1
        if node.locks > 1 or node.guarded:
            return
        while True:
            self._protected += node.host < 0
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
        while True:
            self._protected -= node.host < 0
            if node.resident == 0 and node.evictable:
                self._offer(node)
            node = node.parent
            node.guarded -= 1
            if node.locks or node.guarded:
                return

    def exclusive(self, node: Node) -> int:
        """Pages that could be evicted if one lock of `node` were taken back."""
        if node.locks > 1 or node.guarded:
            return 0
        count = 0
        while True:
            count += 1
            node = node.parent
            if node.locks or node.guarded > 1:
                return count

    def insert(
        self, node: Node, keys: Sequence[bytes], pages: list[int], owner: Hashable, priority: float = -math.inf
    ) -> Node:
        """Cache the pages after `node`, which is on the device, as far as `keys` go; return the deepest node.

        pages[i] holds the KV of keys[i], and those from node.depth on belong to `owner`. A page whose key is cached
        on the device already is a duplicate: its place in `pages` is given the cached page, then the duplicate is
        freed. Where a key is on the host, the new page takes the place of the one there.
        """
        assert node.host < 0
        self._now += 1
        fresh, duplicates = [], []
        for i in range(node.depth, len(keys)):
            child = self._index.get(keys[i])
            if child is None:
                child = self._attach(node, keys[i], pages[i], priority)
                fresh.append(pages[i])
            elif child.host >= 0:
                assert self._host is not None
                self._host.drop(child.host)
                self._land(child, pages[i])
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
        if node.evictable:
            self._offer(node)
        return node

    def evict(self, count: int) -> int:
        """Free up to `count` device pages; return how many were freed: count, or all that are evictable."""
        freed: list[int] = []
        while len(freed) < count and (node := self._leaves.pop()) is not None:
            freed.append(node.page)
            if self._host is None or not self._make_room(self._host, node):
                self._detach(node)
            else:
                self._offload(self._host, node)
        self._allocator.free(freed, CACHE)
        return len(freed)

    def load(self, node: Node) -> None:
        """Bring the chain down to `node`, which is locked, back to the device. Its pages must be free there."""
        assert node.locks or node.guarded
        away = []
        while node.host >= 0:
            away.append(node)
            node = node.parent
        for node, page in zip(reversed(away), self._allocator.allocate(len(away), CACHE), strict=True):
            assert self._host is not None
            self._host.load(node.host, page)
            self._land(node, page)

    def take_copies(self) -> TierCopies:
        """Copies between the pools that are owed since the last call. Whoever runs the forwards executes them before
        any page is written, sent or computed on; see `prefill_service.host_tier`.
        """
        return TierCopies() if self._host is None else self._host.take_copies()

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
        resident = dict.fromkeys(children, 0)
        guarded = dict.fromkeys(children, 0)
        for node in sorted(nodes, key=lambda node: -node.depth):
            assert self._index[node.key] is node
            assert node.parent is self.root or self._index.get(node.parent.key) is node.parent, "parent left first"
            assert node.depth == node.parent.depth + 1
            assert node.born > node.parent.born
            assert (node.page < 0) == (node.host >= 0), "a node is in one pool"
            assert node.parent.host < 0 or node.host >= 0, "parent went to the host first"
            children[node.parent] += 1
            resident[node.parent] += node.host < 0
            guarded[node.parent] += bool(node.locks or guarded[node])
        for node in children:
            assert node.children == children[node]
            assert node.resident == resident[node]
            assert node.guarded == guarded[node]
        on_device = [node for node in nodes if node.host < 0]
        on_host = [node for node in nodes if node.host >= 0]
        assert self._hosted == len(on_host)
        assert self._protected == sum(1 for node in on_device if node.locks or node.guarded)
        self._leaves.check_integrity(on_device)
        pages = [node.page for node in on_device]
        assert len(set(pages)) == len(pages) == self._allocator.owned(CACHE)
        if self._host is not None:
            self._host.check_integrity(on_host)
        return sum(node.locks for node in children) - 1  # the root's own

    # ---- nodes come, change pools and go ----

    def _attach(self, parent: Node, key: bytes, page: int, priority: float) -> Node:
        self._born += 1
        node = Node(key, parent, page, self._born, priority, self._now)
        parent.children += 1
        parent.resident += 1
        self._index[key] = node
        self._changes.pop(key, None)  # to the end: a parent must not stand behind its child
        self._changes[key] = True
        return node

    def _detach(self, node: Node) -> None:
        """A leaf leaves for good. A device page is the caller's to free."""
        del self._index[node.key]
        node.cached = False
        self._changes[node.key] = False
        parent = node.parent
        parent.children -= 1
        if node.host < 0:
            assert node.children == 0
            parent.resident -= 1
        else:
            assert self._host is not None
            self._host.drop(node.host)
            self._hosted -= 1
        self._pass_up(node)

    def _make_room(self, host: HostTier, node: Node) -> bool:
        """See that the host pool has a free page for a leaf of the device; False: it is `node` that must leave."""
        assert not host.loading(node.page), "copies are taken before what they bring may leave again"
        if host.available:
            return True
        victim = host.leaves.pop()
        if victim is None:
            return False
        if node.children == 0 and host.leaves.rank(node) < host.leaves.rank(victim):
            host.leaves.offer(victim)
            return False
        self._detach(victim)
        return True

    def _offload(self, host: HostTier, node: Node) -> None:
        """A leaf of the device moves to the host. Its device page is the caller's to free."""
        node.host, node.page = host.offload(node.page), -1
        node.offered = None
        node.parent.resident -= 1
        self._hosted += 1
        if node.evictable:
            self._offer(node)
        self._pass_up(node)

    def _land(self, node: Node, page: int) -> None:
        """A node of the host comes back to the device, where its parent is."""
        node.host, node.page = -1, page
        node.offered = None
        node.parent.resident += 1
        self._hosted -= 1
        if node.locks or node.guarded:
            self._protected += 1

    def _pass_up(self, node: Node) -> None:
        """A leaf has left its pool: its parent inherits what it knew, and may be a leaf now."""
        parent = node.parent
        parent.uses += node.uses - node.passed
        node.passed = node.uses
        if node.stamp > parent.stamp:
            parent.stamp = node.stamp
        if node.priority > parent.priority:
            parent.priority = node.priority
        if parent.evictable:
            self._offer(parent)

    def _stamp(self, node: Node) -> None:
        node.stamp = self._now
        if self._leaves.sinks and node.evictable:
            self._offer(node)

    def _offer(self, node: Node) -> None:
        """Put an evictable leaf where eviction from its pool finds it."""
        if node.host < 0:
            self._leaves.offer(node)
        else:
            assert self._host is not None
            self._host.leaves.offer(node)
