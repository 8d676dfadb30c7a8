"""The pages of admitted requests: the one place where they change hands between pool, cache and request.

    take: load host pages, evict, allocate ─► (forward) ─► keep: whole pages go to the cache, the lock follows
                                                       └─► give_back: private pages are free, the lock is gone

Whether there is memory for it is decided before, by the adder: here nothing is refused but `grow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.priority import importance
from engine.core.types import ceil_div
from engine.device.page_allocator import PageAllocator
from prefill_service.adder import Attempt
from prefill_service.prefix_cache import PrefixCache
from prefill_service.request import PrefillRequest, RequestState

__all__ = ["RequestPages"]


class RequestPages:
    """low_priority_first: smaller priorities are worth more when eviction is by priority."""

    def __init__(self, cache: PrefixCache, allocator: PageAllocator, page_size: int, *, low_priority_first: bool):
        self._cache = cache
        self._allocator = allocator
        self._page_size = page_size
        self._low_priority_first = low_priority_first

    def take(self, granted: Sequence[Attempt]) -> None:
        """Give requests the pages up to their `end`; those that still wait, their cached pages first."""
        page_size = self._page_size
        new = [attempt.request for attempt in granted if attempt.request.state is RequestState.WAITING]
        covered = [a.request.node.depth if a.request in new else len(a.request.pages) for a in granted]
        missing = [ceil_div(a.request.end, page_size) - count for a, count in zip(granted, covered, strict=True)]
        loaded = sum(attempt.loaded for attempt in granted) // page_size
        self._cache.evict(max(0, loaded + sum(missing) - self._allocator.available))
        for request in new:
            self._cache.load(request.node)
            request.pages = self._cache.pages(request.node)
            self._cache.use(request.node, self._worth(request))
        for attempt, count in zip(granted, missing, strict=True):
            attempt.request.pages += self._allocator.allocate(count, attempt.request.key)

    def grow(self, request: PrefillRequest, tokens: int) -> bool:
        """Give a request the pages of `tokens` tokens, evicting what is missing. False: memory is short."""
        missing = ceil_div(tokens, self._page_size) - len(request.pages)
        if missing > self._allocator.available + self._cache.evictable:
            return False
        if missing > 0:
            self._cache.evict(max(0, missing - self._allocator.available))
            request.pages += self._allocator.allocate(missing, request.key)
        return True

    def keep(self, request: PrefillRequest) -> None:
        """Hand the whole pages computed so far to the cache, and let the request's lock follow."""
        keys = request.keys[: request.computed // self._page_size]
        if len(keys) <= request.node.depth:
            return
        before = request.node
        request.node = self._cache.insert(before, keys, request.pages, request.key, self._worth(request))
        self._cache.lock(request.node)
        self._cache.unlock(before)

    def give_back(self, request: PrefillRequest) -> None:
        """It needs them no more. What is cached stays so while memory lasts."""
        self._allocator.free(request.private_pages, request.key)
        self._cache.unlock(request.node)
        request.pages = []

    def returns(self, request: PrefillRequest) -> int:
        """Pages that could be had if it gave its own back."""
        return len(request.private_pages) + self._cache.exclusive(request.node)

    def check_integrity(self, admitted: Iterable[PrefillRequest]) -> None:
        """Each of `admitted` has its cached pages, and owns the others."""
        for request in admitted:
            assert request.pages[: request.node.depth] == self._cache.pages(request.node)
            assert len(request.private_pages) == self._allocator.owned(request.key)
            assert min(request.pages, default=0) >= 0, "a page is not there yet"

    def _worth(self, request: PrefillRequest) -> float:
        """Greater: kept longer when eviction is by priority."""
        return importance(request.task.priority, low_first=self._low_priority_first)
