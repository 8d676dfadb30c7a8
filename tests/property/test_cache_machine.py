"""Prefix cache and allocator against a model without trie, heap or inheritance: a dict from prefix to facts.

In the model each touch, use and priority is noted on the prefix and all prefixes of it, so it also proves that what the
cache notes on one node only, and passes up when a leaf leaves, comes to the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.device.page_allocator import PageAllocator
from prefill_service.prefix_cache import CACHE, Eviction, Node, PrefixCache

# A page holds one of two "tokens"; the key of a page is the whole prefix, which is what a chained key stands for.
PATHS = st.text("ab", min_size=1, max_size=6)


def keys_of(path: str) -> tuple[bytes, ...]:
    return tuple(path[:i].encode() for i in range(1, len(path) + 1))


@dataclass
class Fact:
    page: int
    born: int
    last: int
    uses: int
    priority: float


class CacheMachine(RuleBasedStateMachine):
    @initialize(eviction=st.sampled_from(Eviction), num_pages=st.integers(6, 24))
    def start(self, eviction: Eviction, num_pages: int) -> None:
        self.eviction = eviction
        self.allocator = PageAllocator(num_pages)
        self.cache = PrefixCache(self.allocator, eviction)
        self.facts: dict[str, Fact] = {}
        self.locks: list[tuple[str, Node]] = []
        self.front_door: set[bytes] = set()  # what somebody who only hears of changes believes
        self.clock = 0

    def matched(self, path: str) -> str:
        return next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.facts), "")

    def chain(self, path: str) -> list[Fact]:
        return [self.facts[path[:n]] for n in range(1, len(path) + 1)]

    def note(self, path: str) -> None:
        self.clock += 1
        for fact in self.chain(path):
            fact.last = self.clock

    def protected(self) -> set[str]:
        return {path[:n] for path, _ in self.locks for n in range(1, len(path) + 1)}

    def evict_from_model(self, count: int) -> int:
        ranks: dict[Eviction, Callable[[Fact], tuple[float, ...]]] = {
            Eviction.LRU: lambda fact: (fact.last,),
            Eviction.LFU: lambda fact: (fact.uses, fact.last),
            Eviction.FIFO: lambda fact: (fact.born,),
            Eviction.MRU: lambda fact: (-fact.last,),
            Eviction.PRIORITY: lambda fact: (fact.priority, fact.last),
        }
        rank = ranks[self.eviction]
        for evicted in range(count):
            protected = self.protected()
            parents = {path[:-1] for path in self.facts}
            leaves = [path for path in self.facts if path not in parents | protected]
            if not leaves:
                return evicted
            del self.facts[min(leaves, key=lambda path: rank(self.facts[path]))]
        return count

    @rule(path=PATHS, skip=st.integers(0, 6), priority=st.sampled_from([-math.inf, 0, 1, 2]))
    def insert(self, path: str, skip: int, priority: float) -> None:
        """A request that found `skip` pages or fewer and computed the rest, some of them again."""
        start = min(skip, len(self.matched(path)))
        need = len(path) - start
        short = need - self.allocator.available
        if short > 0:
            assert self.cache.evict(short) == self.evict_from_model(short)
            start = min(start, len(self.matched(path)))
            need = len(path) - start
        if need > self.allocator.available:
            return
        node = self.cache.match(keys_of(path[:start]))
        pages = self.cache.pages(node) + self.allocator.allocate(need, "request")
        deepest = self.cache.insert(node, keys_of(path), pages, "request", priority)
        assert deepest.depth == len(path)
        for n, page in enumerate(pages, 1):
            if path[:n] not in self.facts:
                self.facts[path[:n]] = Fact(page, self.clock * 100 + n, 0, 0, -math.inf)
        self.note(path)
        for fact in self.chain(path):
            fact.priority = max(fact.priority, priority)
        assert pages == [fact.page for fact in self.chain(path)], "duplicates were not remapped"
        assert self.allocator.owned("request") == 0

    @rule(path=PATHS, use=st.booleans())
    def match(self, path: str, use: bool) -> None:
        node = self.cache.match(keys_of(path))
        found = self.matched(path)
        assert node.depth == len(found)
        assert self.cache.pages(node) == [fact.page for fact in self.chain(found)]
        self.note(found)
        if use:
            self.cache.use(node)
            for fact in self.chain(found):
                fact.uses += 1
        else:
            self.cache.touch(node)

    @rule(path=PATHS)
    def lock(self, path: str) -> None:
        node = self.cache.match(keys_of(path))
        self.cache.lock(node)
        self.locks.append((self.matched(path), node))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        _, node = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(node)

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        assert self.cache.evict(count) == self.evict_from_model(count)

    @rule(path=PATHS, hint=PATHS)
    def match_with_a_hint(self, path: str, hint: str) -> None:
        if path.startswith(hint):
            node = self.cache.match(keys_of(hint))
            assert self.cache.match(keys_of(path), node) is self.cache.match(keys_of(path))

    @rule()
    def tell_the_front_door(self) -> None:
        changes = self.cache.drain_changes()
        assert not set(changes.added) & set(changes.removed)
        seen = set(self.front_door)
        for key in changes.added:
            assert len(key) == 1 or key[:-1] in seen, "a child came before its parent"
            seen.add(key)
        self.front_door = seen - set(changes.removed)
        assert self.front_door == {path.encode() for path in self.facts} == set(self.cache.keys())

    @invariant()
    def agrees(self) -> None:
        assert self.cache.check_integrity() == len(self.locks)
        self.allocator.check_integrity()
        protected = self.protected()
        assert {node.key.decode(): node.page for node in self.nodes()} == {p: f.page for p, f in self.facts.items()}
        assert (self.cache.protected, self.cache.evictable) == (len(protected), len(self.facts) - len(protected))
        assert self.allocator.owned(CACHE) == len(self.facts) == len(self.cache)
        locks = Counter(path for path, _ in self.locks if path)
        assert {node.key.decode(): node.locks for node in self.nodes() if node.locks} == locks

    def nodes(self) -> list[Node]:
        cached = self.cache.keys()
        return [self.cache.find(key) for key in cached]


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
