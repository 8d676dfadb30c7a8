"""The page allocator against a dict from page to owner."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.device.page_allocator import OutOfPages, PageAllocator

OWNERS = st.sampled_from(["a", "b", "cache"])


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.owner: dict[int, str] = {}

    @rule(count=st.integers(0, 6), owner=OWNERS)
    def allocate(self, count: int, owner: str) -> None:
        free = self.allocator.num_pages - len(self.owner)
        try:
            pages = self.allocator.allocate(count, owner)
        except OutOfPages:
            assert count > free
            return
        assert len(set(pages)) == count <= free
        assert not self.owner.keys() & set(pages), "a page has two owners"
        self.owner |= dict.fromkeys(pages, owner)

    @rule(data=st.data(), owner=OWNERS)
    def free(self, data: st.DataObject, owner: str) -> None:
        pages = self.some(data, owner)
        self.allocator.free(pages, owner)
        for page in pages:
            del self.owner[page]

    @rule(data=st.data(), owner=OWNERS, to=OWNERS)
    def move(self, data: st.DataObject, owner: str, to: str) -> None:
        pages = self.some(data, owner)
        self.allocator.move(pages, owner, to)
        self.owner |= dict.fromkeys(pages, to)

    def some(self, data: st.DataObject, owner: str) -> list[int]:
        mine = [page for page, of in self.owner.items() if of == owner]
        return data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.available == self.allocator.num_pages - len(self.owner)
        counts = Counter(self.owner.values())
        assert all(self.allocator.owned(owner) == counts[owner] for owner in ("a", "b", "cache"))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
