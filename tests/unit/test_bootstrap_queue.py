"""Order of the bootstrap queue, and who is in it."""

from __future__ import annotations

from bootstrap.queue import BootstrapQueue
from bootstrap.registry import Node
from bootstrap.requests import Attempt, LiveRequest
from engine.core.types import Role, RoomKey
from tests.helpers.front_door import RecordingLink, ask, registration


def attempt(number: int, priority: int | None = None) -> Attempt:
    order = (priority is None, -(priority or 0), number)
    return Attempt(RoomKey.new(0), LiveRequest(ask(f"r{number}"), order, 0.0, lambda: None), (1,), 0, 0.0, 0.0)


def test_priority_then_arrival_and_those_without_priority_last() -> None:
    queue = BootstrapQueue()
    entries = [attempt(1), attempt(2, -5), attempt(3, 7), attempt(4), attempt(5, 7)]
    for entry in reversed(entries):
        queue.push(entry)
    queue.check_integrity()
    assert [entry.request.order[2] for entry in queue.waiting()] == [3, 5, 2, 1, 4]


def test_an_attempt_counts_until_it_is_granted() -> None:
    queue, entry = BootstrapQueue(), attempt(1)
    queue.push(entry)
    entry.decode = Node(registration(Role.DECODE), RecordingLink(), 0.0)
    queue.asked(entry)
    queue.check_integrity()
    assert list(queue.waiting()) == []
    assert len(queue) == 1
    assert entry in queue
    for _ in range(2):
        queue.discard(entry)
    assert len(queue) == 0
    assert entry not in queue


def test_an_attempt_whose_grant_is_overdue_waits_again_in_its_place() -> None:
    queue, entries = BootstrapQueue(), [attempt(1), attempt(2), attempt(3)]
    for entry in entries:
        queue.push(entry)
    entries[1].decode = Node(registration(Role.DECODE), RecordingLink(), 0.0)
    queue.asked(entries[1])
    queue.overdue(entries[1])
    queue.check_integrity()
    assert list(queue.waiting()) == entries
    queue.discard(entries[1])
    assert len(queue) == 2


def test_an_attempt_that_ends_while_it_waits() -> None:
    queue, first, second = BootstrapQueue(), attempt(1), attempt(2)
    queue.push(first)
    queue.push(second)
    queue.discard(first)
    assert list(queue.waiting()) == [second]
