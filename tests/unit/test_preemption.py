from __future__ import annotations

import pytest

from engine.core.types import PrefillTask
from prefill_service.request import PrefillRequest, RequestState
from tests.helpers.scheduling import Node, state


class Decoding:
    """Requests that have decoded nothing yet."""

    def __init__(self) -> None:
        self.preempted: list[PrefillRequest] = []
        self.grown: list[PrefillRequest] = []  # that could not be admitted again

    def growth(self, request: PrefillRequest) -> float:
        return 8.0

    def may_wait(self, request: PrefillRequest) -> bool:
        return request not in self.grown

    def preempt(self, request: PrefillRequest) -> PrefillTask:
        self.preempted.append(request)
        return request.task


def running(
    priorities: list[int | None], *, pages: int, **config: object
) -> tuple[Node, Decoding, list[PrefillRequest]]:
    """A node on which requests of 16 tokens, one of each priority and all apart, decode."""
    decoding = Decoding()
    node = Node(pages, decoding, priority_scheduling=True, **config)
    requests = []
    for number, priority in enumerate(priorities):
        node.clock.advance(1)
        requests.append(node.submit(range(number * 100, number * 100 + 16), priority=priority))
        node.forward()
    assert all(state(request) is RequestState.IN_FLIGHT for request in requests)
    return node, decoding, requests


def test_the_least_important_and_then_the_newest_give_way_when_memory_is_short() -> None:
    node, decoding, requests = running([5, 0, 0, 30], pages=40)
    newcomer = node.submit(range(1000, 1016), priority=20)
    batch = node.batch()
    assert [row.request for row in batch.rows] == [newcomer]
    assert decoding.preempted == [requests[2]]
    assert state(requests[2]) is RequestState.WAITING


@pytest.mark.parametrize(("ahead", "preempts"), [(10, False), (11, True)])
def test_only_those_it_is_ahead_of_by_more_than_the_threshold(ahead: int, preempts: bool) -> None:
    node, decoding, _ = running([5, 5], pages=28)
    node.submit(range(1000, 1016), priority=5 + ahead)
    node.scheduler.next_batch()
    assert bool(decoding.preempted) == preempts


def test_nobody_is_preempted_in_vain() -> None:
    node, decoding, _ = running([0, 30], pages=40)
    node.submit(range(1000, 1080), priority=20)
    assert node.scheduler.next_batch() is None
    assert not decoding.preempted, "even without the first there would not be room"


def test_a_slot_is_made_too() -> None:
    node, decoding, requests = running([0, 3], pages=200)
    newcomer = node.submit(range(1000, 1016), priority=20)
    batch = node.scheduler.next_batch(slots=0)
    assert batch is not None
    assert [row.request for row in batch.rows] == [newcomer]
    assert decoding.preempted == [requests[0]]


def test_without_a_threshold_nobody_is_preempted() -> None:
    node, decoding, _ = running([0], pages=24, preemption_threshold=None)
    node.submit(range(1000, 1016), priority=100)
    assert node.scheduler.next_batch() is None
    assert not decoding.preempted


def test_smaller_priorities_first() -> None:
    node, decoding, requests = running([50, 0], pages=28, low_priority_first=True)
    node.submit(range(1000, 1016), priority=5)
    node.scheduler.next_batch()
    assert decoding.preempted == [requests[0]]


def test_a_preempted_request_finds_what_it_had_computed() -> None:
    node, decoding, (victim,) = running([0], pages=26)
    newcomer = node.submit(range(1000, 1016), priority=20)
    node.scheduler.complete_forward(node.batch())
    assert decoding.preempted == [victim]
    node.scheduler.finish(newcomer.key)
    (row,) = node.batch().rows
    assert (row.request, row.start) == (victim, 12), (
        "all but its last page, which must be computed again for its logits"
    )


def test_on_a_prefill_node_a_chunk_leaves_room_for_those_of_much_higher_priority() -> None:
    node = Node(chunk_size=16, priority_scheduling=True)
    long = node.submit(range(64), priority=0)
    node.forward()
    urgent = node.submit(range(1000, 1006), priority=11)
    equal = node.submit(range(2000, 2006), priority=10)
    batch = node.batch()
    assert [(row.request, row.end - row.start) for row in batch.rows] == [(long, 8), (urgent, 6)]
    assert state(equal) is RequestState.WAITING


def test_what_could_not_be_admitted_again_is_not_preempted() -> None:
    node, decoding, requests = running([0, 0], pages=28)
    decoding.grown.append(requests[1])
    node.submit(range(1000, 1016), priority=20)
    node.scheduler.next_batch()
    assert decoding.preempted == [requests[0]]


def test_a_slot_alone_is_not_made_when_memory_would_be_short() -> None:
    node, decoding, _ = running([0, 30], pages=40)
    node.submit(range(1000, 1080), priority=20)
    assert node.scheduler.next_batch(slots=0) is None
    assert not decoding.preempted


def test_a_chunk_leaves_no_room_for_what_memory_will_refuse() -> None:
    node = Node(20, chunk_size=32, priority_scheduling=True)
    blocker = node.submit(range(5000, 5010), priority=0)
    node.forward()
    long = node.submit(range(60), priority=0)
    node.forward()
    node.submit(range(1000, 1028), priority=50)
    (row,) = node.batch().rows
    assert (row.request, row.end - row.start) == (long, 28)
    assert state(blocker) is RequestState.IN_FLIGHT


def test_pages_are_worth_as_much_as_the_most_important_request_that_used_them() -> None:
    node = Node(16, eviction="priority", priority_scheduling=True)
    for start, priority in ((0, 0), (100, 5)):
        node.finish(node.submit(range(start, start + 12), priority=priority))
    node.finish(node.submit(range(14), priority=100))  # computes no whole page of its own
    node.finish(node.submit(range(200, 244), priority=200))
    cached = node.submit(range(0, 12)), node.submit(range(100, 112))
    node.scheduler.next_batch()
    assert cached[0].matched > cached[1].matched


def test_what_is_put_back_waits_at_the_head() -> None:
    node = Node(60, Decoding())
    first = node.submit(range(16))
    node.forward()
    second = node.submit(range(100, 116))
    node.scheduler.requeue(first.key, first.task)
    assert [row.request for row in node.batch().rows] == [first, second]
