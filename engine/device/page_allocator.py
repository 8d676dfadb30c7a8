"""Who owns which page: a free list, an owner per page, and counts. No memory, no torch, no policy.

    free --allocate--> owner A --move--> owner B --free--> free

An owner is any hashable value: a request's room, or the prefix cache. A page has at most one owner, always;
an operation on pages that are not the caller's is a bug in the caller and fails an assertion. Cost: O(1) a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from engine.core.errors import Overloaded

__all__ = ["OutOfPages", "PageAllocator"]


class OutOfPages(Overloaded):
    """More pages were asked for than are free. Callers check `available` first, so this is the last line."""

    reason = "OUT_OF_PAGES"


class PageAllocator:
    """Hands out page ids 0 to num_pages - 1, the most recently freed first."""

    def __init__(self, num_pages: int):
        assert num_pages > 0
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owner: list[Hashable] = [None] * num_pages  # None: free
        self._counts: Counter[Hashable] = Counter()

    @property
    def available(self) -> int:
        """Free pages."""
        return len(self._free)

    def owned(self, owner: Hashable) -> int:
        """Pages that belong to `owner`."""
        return self._counts[owner]

    def allocate(self, count: int, owner: Hashable) -> list[int]:
        """Take `count` pages for `owner`. Raises OutOfPages, and takes none, when fewer are free."""
        assert count >= 0
        assert owner is not None
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        keep = len(self._free) - count
        pages = self._free[keep:]
        del self._free[keep:]
        for page in pages:
            self._owner[page] = owner
        self._adjust(owner, count)
        return pages

    def free(self, pages: Sequence[int], owner: Hashable) -> None:
        """Give back pages of `owner`."""
        assert owner is not None
        self._assign(pages, owner, None)
        self._free.extend(pages)

    def move(self, pages: Sequence[int], from_owner: Hashable, to_owner: Hashable) -> None:
        """Hand pages over from one owner to another."""
        assert from_owner is not None
        assert to_owner is not None
        self._assign(pages, from_owner, to_owner)
        self._adjust(to_owner, len(pages))

    def check_integrity(self) -> None:
        """Every page is in the free list exactly once or has an owner; counts agree."""
        assert len(self._free) == len(set(self._free)), "a page is twice in the free list"
        assert all(self._owner[page] is None for page in self._free), "a free page has an owner"
        owned = Counter(owner for owner in self._owner if owner is not None)
        assert owned == self._counts, "owner counts are off"
        assert owned.total() + len(self._free) == self.num_pages, "a page is lost"

    def _assign(self, pages: Sequence[int], old: Hashable, new: Hashable) -> None:
        for page in pages:
            owner = self._owner[page]
            # `is` first: comparing equal dataclasses is ten times slower, and this runs once a page.
            assert owner is old or owner == old, f"page {page} is {owner}'s, not {old}'s"
            self._owner[page] = new
        self._adjust(old, -len(pages))

    def _adjust(self, owner: Hashable, change: int) -> None:
        if count := self._counts[owner] + change:
            self._counts[owner] = count
        else:
            self._counts.pop(owner, None)  # rooms come and go: keep no zeros
