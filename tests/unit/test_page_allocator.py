from __future__ import annotations

import pytest

from engine.core.errors import Overloaded
from engine.device.page_allocator import OutOfPages, PageAllocator


def test_hands_out_each_page_once() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(3, "a") + allocator.allocate(1, "b")
    assert sorted(pages) == [0, 1, 2, 3]
    assert (allocator.available, allocator.owned("a"), allocator.owned("b")) == (0, 3, 1)
    allocator.check_integrity()


def test_refuses_all_when_short_and_takes_none() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(3, "a")
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 free") as error:
        allocator.allocate(2, "b")
    assert isinstance(error.value, Overloaded)
    assert (allocator.available, allocator.owned("b")) == (1, 0)


def test_allocating_nothing_is_fine() -> None:
    assert PageAllocator(1).allocate(0, "a") == []


def test_moves_ownership() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2, "a")
    allocator.move(pages[:1], "a", "cache")
    allocator.free(pages[:1], "cache")
    allocator.free(pages[1:], "a")
    assert allocator.available == 4
    allocator.check_integrity()


@pytest.mark.parametrize("thief", ["b", "cache"])
def test_pages_of_others_cannot_be_touched(thief: str) -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2, "a")
    with pytest.raises(AssertionError, match="is a's, not"):
        allocator.free(pages, thief)
    with pytest.raises(AssertionError, match="is a's, not"):
        allocator.move(pages, thief, "c")


def test_a_page_cannot_be_freed_twice() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(1, "a")
    allocator.free(pages, "a")
    with pytest.raises(AssertionError, match="is None's"):
        allocator.free(pages, "a")
