"""How requests wait for a decode node: in what order, for what room, and what they do about one that hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bootstrap.config import BootstrapConfig
from bootstrap.registry import Node
from bootstrap.requests import LiveRequest
from engine.core.errors import DeadlineExceeded, Overloaded
from engine.core.messages import Abort, Heartbeat, NodeStats, WriterQuiesced
from engine.core.types import Role
from tests.helpers.front_door import House, ask, retracted, token

FULL = NodeStats(pages_total=100, pages_held=100, head_room=0, running=3, serving=True)


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def prefill(house: House) -> Node:
    return house.join(Role.PREFILL, num_pages=1000)


def _heartbeat(head_room: int, retractable: int = 1000) -> Heartbeat:
    stats = replace(FULL, head_room=head_room, retractable=retractable)
    return Heartbeat(stats)


def _asked(house: House, *nodes: Node) -> dict[str, str]:
    """Who was asked last for each request."""
    return {r.reservation.request_id: node.node_id for node in nodes for r in house.reserved(node)}


# ---- order and room ----


def test_a_decode_node_is_asked_only_when_it_has_room(house: House, prefill: Node) -> None:
    decode = house.join(Role.DECODE, stats=FULL)
    house.submit(ask())
    assert house.submitted(prefill), "the prefill node sees the request at once"
    assert not house.reserved(decode)
    house.advance(0.1)
    house.front.on_report(decode, _heartbeat(head_room=19))
    assert not house.reserved(decode), "12 tokens of pages and 8 reserved are more than 19"
    house.front.on_report(decode, _heartbeat(head_room=20))
    assert house.reserved(decode)


def test_reservations_not_yet_granted_count_against_the_room(house: House, prefill: Node) -> None:
    decode = house.join(Role.DECODE, stats=FULL)
    house.submit(ask("r1"))
    house.submit(ask("r2"))
    house.front.on_report(decode, _heartbeat(head_room=39))
    assert len(house.reserved(decode)) == 1
    house.grant(decode, head_room=20)
    assert len(house.reserved(decode)) == 2


def test_the_queue_goes_by_priority_then_arrival(house: House, prefill: Node) -> None:
    decode = house.join(Role.DECODE, stats=FULL)
    for name, priority in (("none", None), ("low", 1), ("high", 5), ("high2", 5)):
        house.submit(ask(name, priority=priority))
    house.front.on_report(decode, _heartbeat(head_room=1000))
    assert [r.reservation.request_id for r in house.reserved(decode)] == ["high", "high2", "low", "none"]


def test_low_priority_first_on_request() -> None:
    house = House(BootstrapConfig(low_priority_first=True))
    house.join(Role.PREFILL)
    decode = house.join(Role.DECODE, stats=FULL)
    for name, priority in (("none", None), ("high", 5), ("low", 1)):
        house.submit(ask(name, priority=priority))
    house.front.on_report(decode, _heartbeat(head_room=1000))
    assert [r.reservation.request_id for r in house.reserved(decode)] == ["low", "high", "none"]


def test_a_large_request_at_the_head_is_not_overtaken(house: House, prefill: Node) -> None:
    decode = house.join(Role.DECODE, stats=FULL)
    house.submit(ask("large", range(100)))
    house.submit(ask("small", range(4)))
    house.front.on_report(decode, _heartbeat(head_room=50))
    assert not house.reserved(decode)


def test_waiting_too_long_for_a_decode_node(house: House, prefill: Node) -> None:
    decode = house.join(Role.DECODE, stats=FULL)
    request = house.submit(ask())
    for _ in range(60):
        house.advance(1.0, prefill, decode)
    assert isinstance(request.error, DeadlineExceeded)
    assert request.error.metadata["phase"] == "queued"
    assert request.error.retry_after is not None
    assert house.links[prefill].of(Abort)


def test_the_end_of_a_long_answer_must_fit_too(house: House, prefill: Node) -> None:
    """As decode admission has it: prompt + new tokens, less what retracting the running requests would give back."""
    decode = house.join(Role.DECODE, stats=FULL)
    house.submit(ask(max_new_tokens=90))
    house.front.on_report(decode, _heartbeat(head_room=69, retractable=30))
    assert not house.reserved(decode)
    house.front.on_report(decode, _heartbeat(head_room=69, retractable=31))
    assert house.reserved(decode)


# ---- who is passed over ----


def test_what_no_serving_node_could_take_is_passed_over(house: House, prefill: Node) -> None:
    large = house.join(Role.DECODE, "large", num_pages=1000, stats=FULL)
    small = house.join(Role.DECODE, "small")
    house.submit(ask("large", range(600)))
    house.front.drain_node("large", 100.0)
    house.submit(ask("small"))
    assert _asked(house, large, small) == {"small": "small"}


def test_nor_does_anything_go_to_a_node_whose_context_is_too_small(house: House, prefill: Node) -> None:
    odd = [house.join(role, f"odd-{role}", max_context=8) for role in (Role.PREFILL, Role.DECODE)]
    decode = house.join(Role.DECODE)
    for number in range(3):
        house.submit(ask(f"r{number}"))
    assert _asked(house, decode) == {f"r{number}": "decode" for number in range(3)}
    assert not house.submitted(odd[0])
    assert not house.reserved(odd[1])


def test_a_head_that_waits_for_one_node_does_not_hold_up_the_others(house: House, prefill: Node) -> None:
    large = house.join(Role.DECODE, "large", num_pages=1000, stats=FULL)
    small = house.join(Role.DECODE, "small")
    head = house.submit(ask("head", range(600)))
    for number in range(3):
        house.submit(ask(f"r{number}"))
    assert _asked(house, large, small) == {"r0": "small", "r1": "small", "r2": "small"}
    house.front.on_report(large, _heartbeat(head_room=607))
    assert not house.reserved(large), "and what it waits for goes to nobody behind it"
    house.front.on_report(large, _heartbeat(head_room=608))
    assert [r.reservation.key for r in house.reserved(large)] == [head.attempt and head.attempt.key]


# ---- requests that go on ----


def _play(house: House, request: LiveRequest, prefill: Node, decode: Node, tokens: int) -> None:
    """Grant what the decode node was asked for last, and make so many tokens."""
    key = house.grant(decode)
    first = len(request.output)
    house.output(prefill, token(key, first))
    house.output(decode, *(token(key, index) for index in range(first + 1, first + tokens)))


def test_what_fitted_at_arrival_fits_when_it_goes_on(house: House, prefill: Node) -> None:
    """However little is left: the tokens that the node sets aside for an answer end where the answer ends."""
    decode = house.join(Role.DECODE)
    request = house.submit(ask(max_new_tokens=390))
    made = 0
    for tokens in (380, 4, 3, 2):
        _play(house, request, prefill, decode, tokens)
        made += tokens
        assert request.attempt is not None
        house.report(decode, retracted(request.attempt.key))
        house.advance(0.1, prefill, decode)
        assert request.error is None
        assert house.reserved(decode)[-1].reservation.first_index == made


@pytest.mark.parametrize("role", Role.PREFILL.pools)
def test_what_fits_no_node_any_more_ends_naming_the_limit(house: House, role: Role) -> None:
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}[role]
    large, small = (house.join(role, name, num_pages=pages) for name, pages in (("large", 1000), ("small", 100)))
    peer = house.join(other, num_pages=1000)
    request = house.submit(ask(token_ids=range(600)))
    house.front.leave(large, "gone")
    behind = house.submit(ask("behind"))
    assert "behind" in _asked(house, small, peer), "it is not held up"
    assert request.error is None, "it may come back at once"
    house.advance(1.0, small, peer)
    assert isinstance(request.error, Overloaded)
    assert request.error.metadata["field"] == "prompt tokens"
    assert request.error.metadata["limit"].startswith("at most 39")
    assert behind.error is None


def test_nor_does_what_outgrows_the_prefill_nodes_wait(house: House) -> None:
    """Known when it has to be prefilled again, however long ago the large node has left."""
    large, small = house.join(Role.PREFILL, "large", num_pages=1000), house.join(Role.PREFILL, "small")
    decode = house.join(Role.DECODE, num_pages=1000)
    request = house.submit(ask(token_ids=range(600), max_new_tokens=9))
    _play(house, request, large, decode, 3)
    house.front.leave(large, "gone")
    _wait(house, 5, small, decode)
    assert request.attempt is not None
    house.report(decode, retracted(request.attempt.key))
    house.advance(0.1, small, decode)
    assert isinstance(request.error, Overloaded)
    assert "retracted" in str(request.error)


def test_a_large_node_that_comes_back_at_once_is_waited_for(house: House, prefill: Node) -> None:
    large, small = house.join(Role.DECODE, "large", num_pages=1000), house.join(Role.DECODE, "small")
    request = house.submit(ask(token_ids=range(600)))
    house.front.leave(large, "blip")
    house.advance(0.5, prefill, small)
    large = house.join(Role.DECODE, "large", num_pages=1000)
    house.advance(0.6, prefill, small, large)
    assert request.error is None
    assert house.reserved(large)


# ---- a grant that does not come ----


def _wait(house: House, seconds: int, *alive: Node) -> None:
    for _ in range(seconds):
        house.advance(1.0, *alive)


def test_a_decode_node_that_hangs_is_left_for_another(house: House, prefill: Node) -> None:
    hung = house.join(Role.DECODE, "hung")
    other = house.join(Role.DECODE, "other", stats=FULL)
    request = house.submit(ask())
    old = house.reserved(hung)[0].reservation.key
    house.report(other, _heartbeat(head_room=20))
    _wait(house, 4, prefill, hung, other)
    assert _asked(house, hung, other) == {"r1": "hung"}
    _wait(house, 1, prefill, hung, other)
    assert _asked(house, hung, other) == {"r1": "other"}
    assert request.failures == 0
    sent = house.links[hung].sent
    assert sent[-2:] == [Abort(old, sent[-2].reason), WriterQuiesced(old)]  # type: ignore[union-attr]
    house.grant(hung, old)
    assert not house.granted(prefill), "a grant of the room that was given up is late"
    key = house.grant(other)
    assert house.granted(prefill)[-1].key == key != old


def test_one_that_waits_for_pages_keeps_its_place_while_no_other_has_room(house: House, prefill: Node) -> None:
    slow, full = house.join(Role.DECODE, "slow"), house.join(Role.DECODE, "full", stats=FULL)
    request = house.submit(ask())
    _wait(house, 50, prefill, slow, full)
    assert len(house.reserved(slow)) == 1
    later = house.submit(ask("later"))
    assert not house.reserved(full)
    assert len(house.reserved(slow)) == 1, "nobody is sent after it"
    house.report(full, _heartbeat(head_room=20))
    assert _asked(house, slow, full) == {"r1": "full"}, "the one that has waited longest goes first"
    _wait(house, 10, prefill, slow, full)
    assert isinstance(request.error, DeadlineExceeded), "all the waiting counts against one time"
    assert later.error is None


def test_the_first_node_may_still_grant_what_is_overdue(house: House, prefill: Node) -> None:
    slow = house.join(Role.DECODE, "slow")
    request = house.submit(ask())
    house.submit(ask("later"))
    _wait(house, 20, prefill, slow)
    first, second = (r.reservation.key for r in house.reserved(slow))
    house.grant(slow, first)
    assert house.granted(prefill)[-1].key == first
    house.submit(ask("latest"))
    assert len(house.reserved(slow)) == 2, "one more is still overdue"
    house.grant(slow, second)
    assert len(house.reserved(slow)) == 3
    assert request.attempts == 1


def test_it_is_not_sent_back_and_forth(house: House, prefill: Node) -> None:
    nodes = [house.join(Role.DECODE, "hung-1"), house.join(Role.DECODE, "hung-2")]
    house.submit(ask())
    _wait(house, 50, prefill, *nodes)
    assert [len(house.reserved(node)) for node in nodes] == [1, 1]
