"""The second tier of the prefix cache: where pages are, which leave, what admission charges, and the copies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.core.page_keys import page_keys
from engine.core.types import PageLayout
from engine.device.kv_pool import KVPool
from engine.device.page_allocator import PageAllocator
from engine.device.page_copy import copy_pages
from prefill_service.adder import Adder, Attempt, Verdict
from prefill_service.host_tier import CopyList, TierCopies
from prefill_service.prefix_cache import Eviction, Node, PrefixCache
from prefill_service.request import PrefillRequest
from prefill_service.tier_copier import TierCopier
from tests.helpers.golden import make_request

PAGE = 16


class Tiers:
    """A cache over two pools."""

    def __init__(self, device: int, host: int, eviction: Eviction = Eviction.LRU):
        self.allocator = PageAllocator(device)
        self.host = PageAllocator(host)
        self.cache = PrefixCache(self.allocator, eviction, self.host)

    def fill(self, keys: Sequence[bytes], priority: float = 0) -> list[int]:
        """Cache a chain, as a request would that found what is on the device; return its pages."""
        node = self.cache.resident(self.cache.match(keys), keys)
        pages = self.cache.pages(node) + self.allocator.allocate(len(keys) - node.depth, "request")
        self.cache.insert(node, keys, pages, "request", priority)
        self.check()
        return pages

    def evict(self, count: int) -> None:
        assert self.cache.evict(count) == count
        self.check()

    def load(self, keys: Sequence[bytes]) -> Node:
        """Bring a chain back, as an admission would; it stays locked."""
        node = self.cache.match(keys)
        self.cache.lock(node)
        self.cache.load(node)
        self.cache.use(node)
        self.check()
        return node

    def check(self) -> None:
        self.cache.check_integrity()
        self.allocator.check_integrity()

    def away(self) -> set[str]:
        cached = self.cache.keys()
        return {key.decode() for key in cached if self.cache.find(key).host >= 0}

    def cached(self) -> set[str]:
        return {key.decode() for key in self.cache.keys()}  # noqa: SIM118  # a method, and no dict


def chain(name: str, pages: int, prefix: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    return prefix + tuple(f"{name}{i}".encode() for i in range(pages))


# ---- where pages are ----


def test_evicted_pages_move_to_the_host_and_still_match() -> None:
    tiers = Tiers(8, 8)
    pages = tiers.fill(chain("a", 6))
    tiers.cache.drain_changes()
    tiers.evict(4)
    node = tiers.cache.match(chain("a", 9))
    assert node.depth == 6
    assert [tiers.cache.resident(node, chain("a", n)).depth for n in (6, 9)] == [2, 2]
    assert tiers.cache.match(chain("a", 1)).depth == 1
    assert (tiers.cache.evictable, tiers.allocator.available, tiers.cache.host_free) == (2, 6, 4)
    changes = tiers.cache.drain_changes()
    assert changes.added == changes.removed == (), "the front door is told of neither tier"
    copies = tiers.cache.take_copies()
    assert copies.offloads.sources == tuple(reversed(pages[2:]))
    assert tiers.cache.take_copies() == TierCopies(), "each copy is named once"


def test_loading_brings_back_a_part_and_leaves_the_rest() -> None:
    tiers = Tiers(8, 8)
    tiers.fill(chain("a", 6))
    tiers.evict(5)
    gone = tiers.cache.take_copies().offloads
    node = tiers.load(chain("a", 4))
    assert tiers.away() == {"a4", "a5"}
    assert (tiers.cache.protected, tiers.cache.evictable) == (4, 0)
    loads = tiers.cache.take_copies().loads
    assert loads.targets == tuple(tiers.cache.pages(node)[1:])
    assert set(loads.sources) <= set(gone.targets)
    assert tiers.cache.host_free == 6
    tiers.cache.unlock(node)
    tiers.check()
    assert tiers.cache.evictable == 4


def test_a_host_page_is_not_free_before_its_load_has_read_it() -> None:
    tiers = Tiers(4, 2)
    tiers.fill(chain("a", 2))
    tiers.evict(2)
    tiers.fill(chain("b", 2))
    tiers.cache.take_copies()
    tiers.load(chain("a", 2))
    tiers.evict(2)  # there is no room for them: both pages of the host are still to be read
    copies = tiers.cache.take_copies()
    assert (tiers.cached(), len(copies.offloads), len(copies.loads)) == ({"a0", "a1"}, 0, 2)
    assert tiers.cache.host_free == 2


def test_what_a_load_brings_cannot_leave_before_the_copies_are_taken() -> None:
    tiers = Tiers(4, 8)
    tiers.fill(chain("a", 2))
    tiers.evict(2)
    tiers.cache.unlock(tiers.load(chain("a", 2)))
    with pytest.raises(AssertionError, match="copies are taken"):
        tiers.cache.evict(1)


def test_a_page_computed_again_takes_the_place_of_that_on_the_host() -> None:
    """Also when it has not even been copied there."""
    tiers = Tiers(8, 8)
    tiers.fill(chain("a", 3))
    tiers.evict(2)
    pages = tiers.fill(chain("a", 3))
    assert tiers.away() == set()
    assert tiers.cache.pages(tiers.cache.match(chain("a", 3))) == pages
    assert (tiers.cache.host_free, tiers.cache.take_copies()) == (8, TierCopies())
    tiers.evict(3)
    assert tiers.away() == {"a0", "a1", "a2"}


# ---- which leave ----


def test_a_full_host_lets_its_own_last_go() -> None:
    tiers = Tiers(4, 2)
    tiers.fill(chain("a", 2))
    tiers.fill(chain("b", 2))
    tiers.cache.drain_changes()
    tiers.evict(2)
    assert tiers.away() == {"a0", "a1"}
    tiers.evict(1)
    assert (tiers.cached(), tiers.away()) == ({"a0", "b0", "b1"}, {"a0", "b1"})
    assert tiers.cache.drain_changes().removed == (b"a1",)
    copies = tiers.cache.take_copies().offloads
    assert len(set(copies.targets)) == len(copies) == 2, "the page that left again is not copied"


@pytest.mark.parametrize(
    ("eviction", "left"),
    [
        (Eviction.LRU, "b0"),
        (Eviction.MRU, "a0"),  # b was used last, so it does not even go to the host
        (Eviction.FIFO, "b0"),
        (Eviction.LFU, "b0"),
        (Eviction.PRIORITY, "a0"),
    ],
)
def test_what_comes_and_what_is_there_are_ranked_together(eviction: Eviction, left: str) -> None:
    tiers = Tiers(3, 1, eviction)
    for name, priority in (("a", 2), ("b", 1)):
        tiers.fill(chain(name, 1), priority)
        tiers.evict(1)
    assert tiers.cached() == tiers.away() == {left}


def test_touching_what_is_on_the_host_keeps_the_device_part_as_well() -> None:
    tiers = Tiers(8, 8)
    a, b = chain("a", 3), chain("b", 3)
    tiers.fill(a)
    tiers.fill(b)
    tiers.evict(1)
    tiers.evict(1)
    assert tiers.away() == {"a2", "a1"}
    tiers.cache.touch(tiers.cache.match(a), a)
    tiers.evict(3)
    assert tiers.away() == {"a2", "a1", "b2", "b1", "b0"}


def test_uses_pass_to_the_parent_once() -> None:
    tiers = Tiers(8, 8, Eviction.LFU)
    a, b = chain("a", 2), chain("b", 1)
    tiers.fill(a)
    tiers.fill(b)
    tiers.cache.use(tiers.cache.match(a))
    for _ in range(3):
        tiers.cache.use(tiers.cache.match(b))
    tiers.evict(1)
    assert tiers.away() == {"a1"}
    tiers.cache.unlock(tiers.load(a))
    tiers.cache.take_copies()
    tiers.evict(2)
    assert tiers.away() == {"a1", "a0"}, "used twice, and b three times"


def test_a_lock_on_the_host_keeps_the_whole_chain() -> None:
    tiers = Tiers(4, 3)
    a = chain("a", 4)
    tiers.fill(a)
    tiers.evict(2)
    node = tiers.cache.match(a)
    tiers.cache.lock(node)
    assert (tiers.cache.protected, tiers.cache.evictable) == (2, 0)
    tiers.fill(chain("b", 2))
    tiers.evict(2)
    assert tiers.cached() == {"a0", "a1", "a2", "a3", "b0"}, "one page of the host was not locked"
    tiers.cache.unlock(node)
    tiers.check()
    tiers.evict(2)
    assert tiers.cache.host_free == 0


# ---- admission ----


def request(tiers: Tiers, name: str, start: int, length: int) -> PrefillRequest:
    made = make_request({"rid": name, "ids": [(start, length)], "max_new": 1}, tiers.cache, PAGE)
    made.observe(tiers.cache.match(made.keys), PAGE)
    return made


def admit(tiers: Tiers, *requests: PrefillRequest, chunk_size: int | None = None) -> list[Attempt]:
    adder = Adder(tiers.cache, tiers.allocator, PAGE, max_prefill_tokens=1000, chunk_size=chunk_size)
    return [adder.admit(one) for one in requests]


def hosted(device: int, pages: int) -> Tiers:
    """Tokens from 0 on cached in so many pages, all on the host."""
    tiers = Tiers(device, 64)
    tiers.fill(page_keys(range(pages * PAGE), PAGE))
    tiers.evict(pages)
    tiers.cache.take_copies()
    return tiers


def test_a_host_hit_is_charged_to_memory_and_not_to_compute() -> None:
    tiers = hosted(32, 4)
    one = request(tiers, "a", 0, 80)
    assert one.matched == 64
    (attempt,) = admit(tiers, one, chunk_size=64)
    assert (attempt.prefix, attempt.loaded, attempt.extend, attempt.verdict) == (64, 64, 16, Verdict.CONTINUE)
    before, after = attempt.before, attempt.after
    assert before.rem_chunk is not None
    assert after.rem_chunk is not None
    assert (before.rem_input - after.rem_input, before.rem_chunk - after.rem_chunk) == (16, 16)
    assert (before.current - after.current, before.total - after.total) == (64 + 16 + PAGE, 64 + 16 + PAGE + 1)


def test_pages_that_two_requests_need_are_loaded_and_charged_once() -> None:
    tiers = hosted(32, 4)
    first, second = request(tiers, "a", 0, 50), request(tiers, "b", 0, 80)
    attempts = admit(tiers, first, second)
    assert [(attempt.prefix, attempt.loaded) for attempt in attempts] == [(48, 48), (64, 16)]


@pytest.mark.parametrize(("device", "admitted"), [(6, False), (7, True)])
def test_all_pages_of_a_host_hit_have_room_or_none_is_loaded(device: int, admitted: bool) -> None:
    """Four pages to load, one to compute, one to spare, and more than that must be there."""
    tiers = hosted(device, 4)
    (attempt,) = admit(tiers, request(tiers, "a", 0, 80))
    assert (attempt.extend > 0) is admitted
    assert tiers.cache.check_integrity() == admitted
    if not admitted:
        assert (attempt.verdict, attempt.loaded, attempt.before) == (Verdict.NO_TOKEN, 0, attempt.after)


def test_memory_promised_to_a_load_is_not_promised_twice() -> None:
    tiers = hosted(9, 4)
    attempts = admit(tiers, request(tiers, "a", 0, 80), request(tiers, "b", 1000, 32))
    assert [attempt.extend for attempt in attempts] == [16, 0]
    assert attempts[1].verdict is Verdict.NO_TOKEN


# ---- the copies ----


def pool(num_pages: int) -> KVPool:
    """Every page holds its own number, and a fraction that names the pool's size."""
    made = KVPool(PageLayout(4, 2, 1, 8, "float32", "f" * 32), num_pages)
    made.data += torch.arange(num_pages).view(-1, 1, 1, 1, 1, 1) + num_pages / 100
    return made


def content(of: KVPool) -> list[float]:
    """What each page holds throughout."""
    rows = of.data.view(of.num_pages, -1)
    assert bool((rows == rows[:, :1]).all())
    return [round(value, 2) for value in rows[:, 0].tolist()]


def test_copying_moves_whole_pages_and_nothing_else() -> None:
    device, host = pool(4), pool(6)
    copy_pages(device, (3, 0), host, (1, 5))
    assert content(host) == [0.06, 3.04, 2.06, 3.06, 4.06, 0.04]
    copy_pages(host, (), device, ())
    assert content(device) == [0.04, 1.04, 2.04, 3.04]


def test_offloads_go_before_loads() -> None:
    """A device page that has just been evicted may be the one to load into, and its copy what is loaded elsewhere."""
    device, host = pool(4), pool(6)
    TierCopier(device, host).execute(TierCopies(CopyList((1,), (5,)), CopyList((2, 5), (1, 3))))
    assert content(device) == [0.04, 2.06, 2.04, 1.04]


def test_after_a_copy_has_failed_nothing_is_copied_any_more() -> None:
    device, host = pool(4), pool(6)
    copier = TierCopier(device, host)
    with pytest.raises(RuntimeError, match="copying pages"):
        copier.execute(TierCopies(CopyList((0,), (99,))))
    with pytest.raises(RuntimeError, match="copying pages"):
        copier.execute(TierCopies())
    assert content(host) == content(pool(6))
