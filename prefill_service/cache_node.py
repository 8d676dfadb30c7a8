"""One cached page of the prefix cache's trie."""

from __future__ import annotations

__all__ = ["Entry", "Node", "Rank"]

Rank = tuple[float, float]
Entry = tuple[Rank, int, "Node"]  # (rank, born, node): a place in an eviction order


class Node:
    """One cached page. Read it freely; only the cache writes it."""

    __slots__ = (
        "born",
        "cached",
        "children",
        "depth",
        "guarded",
        "host",
        "key",
        "locks",
        "offered",
        "page",
        "parent",
        "passed",
        "priority",
        "resident",
        "stamp",
        "uses",
    )

    def __init__(self, key: bytes, parent: Node | None, page: int, born: int, priority: float, stamp: int):
        self.key: bytes = key
        self.parent: Node = self if parent is None else parent
        self.page: int = page  # in the device pool; -1 while it is in the host pool
        self.host: int = -1  # in the host pool; -1 while it is in the device pool
        self.cached: bool = True  # until it has left both
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages from the first down to this one
        self.born: int = born  # sequence number of its insertion
        self.priority: float = priority
        self.stamp: int = stamp
        self.uses: int = 0
        self.passed: int = 0  # uses that its parent has inherited already
        self.children: int = 0
        self.resident: int = 0  # children in the device pool
        self.guarded: int = 0  # children that are protected
        self.locks: int = 0
        self.offered: Entry | None = None  # its valid place in the order of the pool that it is in

    @property
    def evictable(self) -> bool:
        """Whether its page can leave the pool that it is in: nothing needs it, and no child in that pool."""
        return not (self.locks or self.guarded or (self.resident if self.host < 0 else self.children))
