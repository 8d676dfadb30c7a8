"""Prefix cache, host tier and allocators against a model without trie, heap or inheritance: a dict from prefix to fact.

In the model each touch, use and priority is noted on the prefix and all prefixes of it, so it also proves that what the
cache notes on one node only, and passes up when a leaf leaves a pool, comes to the same. Two dicts stand for the memory
of the two pools: what a page holds in the end is what its key says, however late the copies are done.
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
    born: int
    last: int
    uses: int
    priority: float
    away: bool = False  # on the host


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        eviction=st.sampled_from(Eviction),
        num_pages=st.integers(6, 24),
        host_pages=st.sampled_from([0, 0, 1, 2, 4, 8, 30]),
    )
    def start(self, eviction: Eviction, num_pages: int, host_pages: int) -> None:
        self.eviction = eviction
        self.allocator = PageAllocator(num_pages)
        self.host = PageAllocator(host_pages) if host_pages else None
        self.cache = PrefixCache(self.allocator, eviction, self.host)
        self.loading = 0  # host pages that are still to be read, for the last time
        self.memory: dict[int, str] = {}
        self.host_memory: dict[int, str] = {}
        self.facts: dict[str, Fact] = {}
        self.locks: list[tuple[str, Node]] = []
        self.front_door: set[bytes] = set()  # what somebody who only hears of changes believes
        self.clock = 0

    def matched(self, path: str) -> str:
        return next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.facts), "")

    def on_device(self, path: str) -> str:
        return next(
            (path[:n] for n in range(len(path), 0, -1) if path[:n] in self.facts and not self.facts[path[:n]].away), ""
        )

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

        def last_of(paths: set[str]) -> str | None:
            """The one of them that leaves first: no other of them needs it."""
            leaves = paths - {path[:-1] for path in paths} - self.protected()
            return min(leaves, key=lambda path: ranks[self.eviction](self.facts[path]), default=None)

        for evicted in range(count):
            away = {path for path, fact in self.facts.items() if fact.away}
            leaves = last_of(self.facts.keys() - away)
            if leaves is None:
                return evicted
            if len(away) + self.loading == self.cache.host_pages:  # the last of the host goes, or this one
                last = last_of(away)
                needed = any(path.startswith(leaves) for path in away)
                gone = leaves if last is None else last if needed else last_of({leaves, last})
                assert gone is not None
                del self.facts[gone]
            if leaves in self.facts:
                self.facts[leaves].away = True
        return count

    @rule(path=PATHS, skip=st.integers(0, 6), priority=st.sampled_from([-math.inf, 0, 1, 2]))
    def insert(self, path: str, skip: int, priority: float) -> None:
        """A request that found `skip` pages or fewer and computed the rest, some of them again."""
        start = min(skip, len(self.on_device(path)))
        need = len(path) - start
        short = need - self.allocator.available
        if short > 0:
            assert self.cache.evict(short) == self.evict_from_model(short)
            start = min(start, len(self.on_device(path)))
            need = len(path) - start
        if need > self.allocator.available:
            return
        node = self.cache.match(keys_of(path[:start]))
        pages = self.cache.pages(node) + self.allocator.allocate(need, "request")
        self.copy()  # before anything is computed
        for n in range(start, len(path)):
            self.memory[pages[n]] = path[: n + 1]
        deepest = self.cache.insert(node, keys_of(path), pages, "request", priority)
        assert deepest.depth == len(path)
        for n in range(1, len(path) + 1):
            self.facts.setdefault(path[:n], Fact(self.clock * 100 + n, 0, 0, -math.inf)).away = False
        self.note(path)
        for fact in self.chain(path):
            fact.priority = max(fact.priority, priority)
        assert pages == self.cache.pages(deepest), "duplicates were not remapped"
        assert self.allocator.owned("request") == 0

    @rule(path=PATHS, use=st.booleans())
    def match(self, path: str, use: bool) -> None:
        node = self.cache.match(keys_of(path))
        found = self.matched(path)
        assert node.depth == len(found)
        resident = self.cache.resident(node, keys_of(path))
        assert resident.depth == len(self.on_device(path))
        if use:
            found = self.on_device(path)
            self.note(found)
            self.cache.use(resident)
            for fact in self.chain(found):
                fact.uses += 1
        else:
            self.note(found)
            self.cache.touch(node, keys_of(path))

    @rule(path=PATHS)
    def load(self, path: str) -> None:
        """A request that finds pages on the host: all of them are brought back, and used, or none."""
        node, found = self.cache.match(keys_of(path)), self.matched(path)
        away = len(found) - len(self.on_device(path))
        self.cache.lock(node)
        self.locks.append((found, node))
        short = away - self.allocator.available
        if short > self.cache.evictable:
            return
        if short > 0:
            assert self.cache.evict(short) == self.evict_from_model(short)
        self.cache.load(node)
        self.loading += away
        self.cache.use(node)
        self.note(found)
        for fact in self.chain(found):
            fact.away = False
            fact.uses += 1

    @rule()
    def copy(self) -> None:
        """What the engine does before it sends or computes."""
        copies = self.cache.take_copies()
        self.loading = 0
        for source, target in zip(copies.offloads.sources, copies.offloads.targets, strict=True):
            self.host_memory[target] = self.memory[source]
        for source, target in zip(copies.loads.sources, copies.loads.targets, strict=True):
            self.memory[target] = self.host_memory[source]
        for node in self.nodes():
            holds = self.memory[node.page] if node.host < 0 else self.host_memory[node.host]
            assert holds == node.key.decode(), "a cached page does not hold what its key says"

    @rule(path=PATHS)
    def lock(self, path: str) -> None:
        node = self.cache.match(keys_of(path))
        self.cache.lock(node)
        self.locks.append((self.matched(path), node))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.copy()  # an admitted request keeps its lock until the engine has gone on
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
        on_device = {path for path, fact in self.facts.items() if not fact.away}
        protected = self.protected() & on_device
        assert {node.key.decode(): node.host >= 0 for node in self.nodes()} == {
            p: f.away for p, f in self.facts.items()
        }
        assert (self.cache.protected, self.cache.evictable) == (len(protected), len(on_device) - len(protected))
        assert self.allocator.owned(CACHE) == len(on_device)
        assert self.cache.host_pages - self.cache.host_free == len(self.facts) - len(on_device) + self.loading
        locks = Counter(path for path, _ in self.locks if path)
        assert {node.key.decode(): node.locks for node in self.nodes() if node.locks} == locks

    def nodes(self) -> list[Node]:
        cached = self.cache.keys()
        return [self.cache.find(key) for key in cached]


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
