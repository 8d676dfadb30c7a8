from __future__ import annotations

import pytest

from engine.core.page_keys import page_keys
from engine.device.page_allocator import PageAllocator
from prefill_service.prefix_cache import CACHE, Eviction, Node, PrefixCache
from tests.helpers.golden import Json, cases, expand

KEYS = page_keys(range(64), 1)  # a chain of 64 pages of one token


class Script:
    """A cache driven by token ids, as the golden scripts drive it."""

    def __init__(self, page_size: int, num_pages: int, eviction: Eviction):
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = PrefixCache(self.allocator, eviction)
        self.locked: dict[str, Node] = {}

    def step(self, verb: str, *operands: object) -> object:
        answer: object = getattr(self, verb)(*operands)
        self.cache.check_integrity()
        self.allocator.check_integrity()
        return answer

    def keys(self, runs: list[tuple[int, int]]) -> tuple[bytes, ...]:
        return page_keys(expand(runs), self.page_size)

    def match(self, runs: list[tuple[int, int]]) -> int:
        node = self.cache.match(self.keys(runs))
        self.cache.touch(node)
        return node.depth * self.page_size

    def touch(self, runs: list[tuple[int, int]]) -> None:
        self.cache.touch(self.cache.match(self.keys(runs)))

    def insert(self, runs: list[tuple[int, int]]) -> int:
        keys = self.keys(runs)
        pages = self.allocator.allocate(len(keys), "script")
        return self.cache.insert(self.cache.root, keys, pages, "script").depth * self.page_size

    def lock(self, name: str, runs: list[tuple[int, int]]) -> int:
        self.locked[name] = self.cache.match(self.keys(runs))
        self.cache.lock(self.locked[name])
        return self.locked[name].depth * self.page_size

    def unlock(self, name: str) -> None:
        self.cache.unlock(self.locked.pop(name))

    def sizes(self) -> dict[str, int]:
        pages = (self.allocator.available, self.cache.evictable, self.cache.protected)
        return dict(zip(("available", "evictable", "protected"), (n * self.page_size for n in pages), strict=True))


@pytest.mark.parametrize(("args", "want"), cases("cache"))
def test_golden_cache(args: Json, want: list[object]) -> None:
    script = Script(args["page_size"], args["capacity"] // args["page_size"], Eviction(args["eviction_policy"]))
    assert [script.step(*step) for step in args["steps"]] == want


def fill(cache: PrefixCache, allocator: PageAllocator, keys: tuple[bytes, ...], priority: float = 0) -> list[int]:
    """Cache a chain from its first page on, as a request that found nothing would; return its pages."""
    pages = allocator.allocate(len(keys), "request")
    cache.insert(cache.root, keys, pages, "request", priority)
    return pages


def chain(name: str, pages: int, prefix: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    return prefix + tuple(f"{name}{i}".encode() for i in range(pages))


@pytest.mark.parametrize("cached", range(0, 65, 7))
@pytest.mark.parametrize("asked", [0, 1, 2, 63, 64])
def test_match_finds_the_longest_cached_prefix(cached: int, asked: int) -> None:
    allocator = PageAllocator(64)
    cache = PrefixCache(allocator)
    pages = fill(cache, allocator, KEYS[:cached])
    node = cache.match(KEYS[:asked])
    assert node.depth == min(cached, asked)
    assert cache.pages(node) == pages[: node.depth]
    for hint in (cache.root, cache.match(KEYS[: cached // 2]), cache.match(KEYS[:asked])):
        if hint.depth <= asked:
            assert cache.match(KEYS[:asked], hint) is node


def test_a_hint_that_was_evicted_does_not_count() -> None:
    allocator = PageAllocator(64)
    cache = PrefixCache(allocator)
    fill(cache, allocator, KEYS[:10])
    hint = cache.match(KEYS)
    cache.evict(4)
    assert cache.match(KEYS, hint).depth == 6
    fill(cache, allocator, KEYS[:20])
    assert cache.match(KEYS, hint).depth == 20


def test_duplicates_are_remapped_and_freed() -> None:
    allocator = PageAllocator(16)
    cache = PrefixCache(allocator)
    first = fill(cache, allocator, KEYS[:4])
    second = allocator.allocate(6, "late")
    mine = second[4:]
    node = cache.insert(cache.root, KEYS[:6], second, "late")
    assert second == first + mine, "the four duplicates now name the cached pages"
    assert node.depth == 6
    assert (allocator.owned("late"), allocator.owned(CACHE), allocator.available) == (0, 6, 10)


def test_insert_goes_on_from_a_node() -> None:
    allocator = PageAllocator(16)
    cache = PrefixCache(allocator)
    pages = fill(cache, allocator, KEYS[:4])
    node = cache.match(KEYS[:4])
    cache.lock(node)
    pages += allocator.allocate(3, "request")  # the last one is partly filled, so it has no key
    deeper = cache.insert(node, KEYS[:6], pages, "request")
    cache.lock(deeper)
    cache.unlock(node)
    assert (cache.evictable, cache.protected, allocator.owned("request")) == (0, 6, 1)
    assert cache.check_integrity() == 1


def test_a_lock_protects_the_whole_chain_and_nothing_else() -> None:
    allocator = PageAllocator(32)
    cache = PrefixCache(allocator)
    stem = chain("s", 4)
    fill(cache, allocator, chain("a", 3, stem))
    fill(cache, allocator, chain("b", 3, stem))
    node = cache.match(chain("a", 2, stem))
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert (cache.protected, cache.evictable) == (6, 4)
    assert cache.evict(100) == 4
    assert cache.match(chain("a", 3, stem)) is node
    assert cache.match(chain("b", 3, stem)).depth == 4
    cache.unlock(node)
    assert cache.evict(100) == 6
    assert allocator.available == 32


def test_unlocking_what_is_not_locked_is_a_bug() -> None:
    cache = PrefixCache(PageAllocator(4))
    with pytest.raises(AssertionError, match="unlocked more often"):
        cache.unlock(cache.root)


def names(cache: PrefixCache) -> set[str]:
    cached = cache.keys()
    return {key.decode()[0] for key in cached}


@pytest.mark.parametrize(
    ("eviction", "left"),
    [
        (Eviction.LRU, "ca"),  # b is used longest ago
        (Eviction.MRU, "bc"),  # a was used last
        (Eviction.FIFO, "cb"),  # a was cached first
        (Eviction.LFU, "ab"),  # c was never used
        (Eviction.PRIORITY, "ac"),  # b has the least priority
    ],
)
def test_eviction_orders(eviction: Eviction, left: str) -> None:
    allocator = PageAllocator(16)
    cache = PrefixCache(allocator, eviction)
    for name, priority in (("a", 2), ("b", 1), ("c", 3)):
        fill(cache, allocator, chain(name, 2), priority)
    cache.use(cache.match(chain("b", 2)))
    cache.touch(cache.match(chain("c", 2)))
    cache.use(cache.match(chain("a", 2)))
    assert cache.evict(2) == 2
    assert names(cache) == set(left)


def test_a_parent_inherits_the_uses_of_its_children() -> None:
    """Least often used: a stem used through many leaves must outlive a page used once."""
    allocator = PageAllocator(32)
    cache = PrefixCache(allocator, Eviction.LFU)
    stem = chain("s", 1)
    for name in "abc":
        fill(cache, allocator, chain(name, 1, stem))
        cache.use(cache.match(chain(name, 1, stem)))
    fill(cache, allocator, chain("x", 1))
    for _ in range(2):
        cache.use(cache.match(chain("x", 1)))
    assert cache.evict(4) == 4
    assert names(cache) == {"s"}


def test_a_page_keeps_the_greatest_priority_that_used_it() -> None:
    """Also where that was a request for a longer chain, or for one that was cached already."""
    allocator = PageAllocator(32)
    cache = PrefixCache(allocator, Eviction.PRIORITY)
    stem, other = chain("s", 2), chain("o", 2)
    fill(cache, allocator, stem, priority=1)
    fill(cache, allocator, chain("a", 1, stem), priority=5)
    fill(cache, allocator, other, priority=1)
    fill(cache, allocator, other, priority=4)
    fill(cache, allocator, chain("x", 2), priority=3)
    assert cache.evict(2) == 2
    assert names(cache) == {"a", "s", "o"}
    assert cache.evict(2) == 2
    assert names(cache) == {"a", "s"}
    assert cache.evict(1) == 1
    fill(cache, allocator, chain("x", 1), priority=3)
    assert cache.evict(1) == 1
    assert names(cache) == {"s"}


def test_touching_many_times_keeps_the_heap_small() -> None:
    allocator = PageAllocator(64)
    cache = PrefixCache(allocator, Eviction.MRU)
    for i in range(32):
        fill(cache, allocator, chain(f"{i}-", 2))
    for i in range(10_000):
        cache.touch(cache.match(chain(f"{i % 32}-", 2)))
    assert len(cache._leaves) < 256
    cache.evict(2)
    assert cache.match(chain("15-", 2)).depth == 0, "the last one touched"


def test_changes_name_parents_first_when_a_chain_went_and_came_back() -> None:
    allocator = PageAllocator(16)
    cache = PrefixCache(allocator)
    fill(cache, allocator, KEYS[:3])
    cache.drain_changes()
    cache.evict(3)
    fill(cache, allocator, KEYS[:3])
    changes = cache.drain_changes()
    assert (changes.added, changes.removed) == (KEYS[:3], ())


def test_changes_name_keys_that_came_and_went() -> None:
    allocator = PageAllocator(16)
    cache = PrefixCache(allocator)
    fill(cache, allocator, KEYS[:3])
    assert cache.drain_changes().added == KEYS[:3], "parents before children"
    cache.evict(2)
    fill(cache, allocator, KEYS[:2])
    changes = cache.drain_changes()
    assert (changes.added, changes.removed) == ((KEYS[1],), (KEYS[2],))
    assert cache.drain_changes().added == cache.drain_changes().removed == ()
    assert cache.keys() == KEYS[:2]
