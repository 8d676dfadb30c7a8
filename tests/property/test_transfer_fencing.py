"""Fenced pages come back once, and only by acknowledgement or by their writer's end."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.types import NodeIdentity, RoomKey
from transfer.fencing import FenceTable

WRITERS = [NodeIdentity("p1", "a"), NodeIdentity("p1", "b"), NodeIdentity("p2", "a")]
PAGES = frozenset(range(24))


class Fencing(RuleBasedStateMachine):
    """A decode node's pages beside a plain model of who may still write where."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FenceTable()
        self.free = set(PAGES)
        self.fenced: dict[RoomKey, tuple[list[int], NodeIdentity]] = {}
        self.ended: list[RoomKey] = []
        self.late = 0
        self.rooms = 0

    def give_back(self, pages: list[int], expected: list[int]) -> None:
        assert pages == expected
        assert not self.free & set(pages)
        self.free |= set(pages)

    @rule(count=st.integers(0, 6), writer=st.sampled_from(WRITERS), epoch=st.integers(0, 1))
    def an_attempt_ends(self, count: int, writer: NodeIdentity, epoch: int) -> None:
        self.rooms += 1
        room = RoomKey(self.rooms // 2, epoch * 1000 + self.rooms)
        pages = sorted(self.free)[:count]
        self.free -= set(pages)
        self.table.fence(room, pages, writer)
        self.fenced[room] = (pages, writer)
        assert room in self.table

    @precondition(lambda self: self.fenced)
    @rule(data=st.data())
    def the_writer_is_quiet(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(sorted(self.fenced, key=str)))
        pages, _ = self.fenced.pop(room)
        self.ended.append(room)
        self.give_back(self.table.quiesced(room), pages)

    @rule(data=st.data())
    def a_late_or_strange_acknowledgement(self, data: st.DataObject) -> None:
        other_epochs = [RoomKey(room.room, room.epoch + 5000) for room in self.fenced]
        room = data.draw(st.sampled_from([RoomKey(2**63, 0), *self.ended, *other_epochs]))
        self.late += 1
        assert self.table.quiesced(room) == []

    @rule(writer=st.sampled_from(WRITERS))
    def a_writer_is_gone(self, writer: NodeIdentity) -> None:
        rooms = [room for room, (_, who) in self.fenced.items() if who == writer]
        self.give_back(self.table.writer_gone(writer), [page for room in rooms for page in self.fenced.pop(room)[0]])

    @invariant()
    def every_page_is_free_or_fenced(self) -> None:
        self.table.check_integrity()
        held = [page for pages, _ in self.fenced.values() for page in pages]
        assert self.table.fenced_pages == len(held)
        assert self.table.rooms == len(self.fenced)
        assert self.table.late == self.late
        assert self.free | set(held) == PAGES


TestFencing = Fencing.TestCase
