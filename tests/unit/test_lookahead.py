from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_service.adder import Verdict
from prefill_service.request import PrefillRequest, RequestState
from tests.helpers.scheduling import PAGE, Node, state

FIRST = [range(0, 40)]
LARGE = [range(1000, 1060)]
SMALL = [range(2000, 2008)]


def test_a_head_that_memory_is_too_short_for_holds_up_the_others() -> None:
    node = Node(num_pages=24)
    node.submit(*FIRST)
    node.forward()
    head, small = node.submit(*LARGE), node.submit(*SMALL)
    assert node.scheduler.next_batch() is None
    assert (state(head), state(small)) == (RequestState.WAITING, RequestState.WAITING)


def test_small_requests_go_past_a_blocked_head_while_its_pages_are_set_aside() -> None:
    # 24 pages: the head will come to hold 16 of them and one token, so 7 may go to those behind it.
    node = Node(num_pages=24, lookahead=8)
    first = node.submit(*FIRST)
    node.forward()
    head = node.submit(*LARGE)
    behind = [node.submit(range(start, start + 8)) for start in (2000, 3000, 4000)]
    batch = node.batch()
    assert [row.request for row in batch.rows] == behind[:2]
    refused = node.records[-1].attempts[-1]
    assert (refused.request, refused.verdict, refused.extend) == (behind[2], Verdict.NO_TOKEN, 0)
    node.scheduler.complete_forward(batch)
    assert node.scheduler.next_batch() is None, "they have not ended, and what they hold still counts"

    node.scheduler.finish(first.key)
    batch = node.batch()
    assert batch.rows[0].request is head, "all that was before it has ended"


def test_only_so_many_are_tried() -> None:
    node = Node(num_pages=24, lookahead=2)
    node.submit(*FIRST)
    node.forward()
    node.submit(*LARGE)
    for start in (2000, 3000):
        node.submit(range(start, start + 60))
    node.submit(*SMALL)
    assert node.scheduler.next_batch() is None
    assert len(node.records[-1].attempts) == 3


def test_what_went_past_counts_until_it_ends() -> None:
    node = Node(num_pages=24, lookahead=8)
    first = node.submit(*FIRST)
    node.forward()
    head = node.submit(*LARGE)
    passed = [node.submit(range(start, start + 8)) for start in (2000, 3000)]
    node.forward()
    late = node.submit(range(4000, 4008))
    assert node.scheduler.next_batch() is None
    node.scheduler.finish(passed[0].key)
    assert [row.request for row in node.batch().rows] == [late]
    node.scheduler.abandon_forward(node.scheduler._forward)  # type: ignore[arg-type]
    for request in (passed[1], late, first):
        node.scheduler.finish(request.key)
    node.finish(head)
    node.assert_idle()


@settings(max_examples=150)
@given(
    pages=st.integers(16, 48),
    lengths=st.lists(st.integers(1, 120), min_size=2, max_size=24),
    lookahead=st.integers(1, 8),
    data=st.data(),
)
def test_a_blocked_head_waits_only_for_those_admitted_before_it(
    pages: int, lengths: list[int], lookahead: int, data: st.DataObject
) -> None:
    """Whatever goes past it, the head runs once all that was admitted when it was first blocked has ended."""
    node = Node(num_pages=pages, lookahead=lookahead, chunk_size=32)
    most = pages * PAGE - PAGE - 2
    for number, length in enumerate(lengths):
        node.submit(range(number * 1000, number * 1000 + min(length, most)))
    admitted: list[PrefillRequest] = []  # in this order, and not ended
    waits_for: dict[PrefillRequest, list[PrefillRequest]] = {}  # by blocked head
    while admitted or node.scheduler.stats().waiting:
        batch = node.scheduler.next_batch()
        attempts = node.records.pop().attempts if node.records else ()
        head = next((a.request for a in attempts if not a.extend and state(a.request) is RequestState.WAITING), None)
        if head is not None and attempts[-1].verdict is Verdict.NO_TOKEN:
            ahead = [a.request for a in attempts[: [a.request for a in attempts].index(head)]]
            before = waits_for.setdefault(head, list(dict.fromkeys([*admitted, *ahead])))
            assert any(state(request) is not RequestState.ENDED for request in before), "it is still blocked"
        admitted += [row.request for row in batch.rows if row.admitted] if batch else []
        if batch is not None:
            node.scheduler.complete_forward(batch)
        flying = [request for request in admitted if state(request) is RequestState.IN_FLIGHT]
        if batch is None or (flying and data.draw(st.booleans())):
            ended = data.draw(st.sampled_from(flying))
            node.scheduler.finish(ended.key)
            admitted.remove(ended)
    node.assert_idle()
