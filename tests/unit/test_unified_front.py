"""A cluster of unified nodes as the front door sees it: one node an attempt, no reservation, and nobody else let in."""

from __future__ import annotations

import pytest

from bootstrap.config import BootstrapConfig
from bootstrap.registry import Node
from bootstrap.requests import LiveRequest, Phase
from engine.core.errors import DeadlineExceeded, InvalidField, Overloaded, Refused, Unavailable
from engine.core.messages import (
    Abort,
    AdmitReport,
    CacheDelta,
    PeerJoined,
    PrefillReport,
    Reserve,
    RoomFailed,
    RoomQuiesced,
    WriterQuiesced,
)
from engine.core.page_keys import page_keys
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey
from tests.helpers.front_door import House, ask, retracted, token


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def node(house: House) -> Node:
    return house.join(Role.UNIFIED)


def key_of(request: LiveRequest) -> RoomKey:
    assert request.attempt is not None
    return request.attempt.key


def where(request: LiveRequest) -> Node:
    assert request.attempt is not None
    assert request.attempt.unified
    assert request.attempt.prefill is not None
    return request.attempt.prefill


def admit(house: House, request: LiveRequest, cached_tokens: int = 0) -> RoomKey:
    key = key_of(request)
    house.output(where(request), admitted=(AdmitReport(key, cached_tokens),))
    return key


def test_a_request_from_arrival_to_its_last_token(house: House, node: Node) -> None:
    request = house.submit(ask())
    assert [one.task.key for one in house.submitted(node)] == [key_of(request)]
    assert request.state.phase == "queued", "it waits on the node"
    assert len(house.front.attempts.queue) == 1
    house.clock.advance(0.5)
    key = admit(house, request, cached_tokens=8)
    assert request.state.phase == "prefilling"
    assert len(house.front.attempts.queue) == 0
    assert request.cached_tokens == 8
    house.clock.advance(1.0)
    house.output(node, token(key, 0), prefilled=(PrefillReport(key, chunks=1, prefill_wait=0.5, prefill=1.0),))
    assert request.state.phase == "decoding"
    house.clock.advance(2.0)
    house.output(node, token(key, 1))
    house.output(node, token(key, 2, FinishReason.LENGTH))
    assert [t.index for t in request.take()] == [0, 1, 2]
    assert request.finish is FinishReason.LENGTH
    timing = request.timing
    assert timing.phases == {Phase.QUEUE: 0.0, Phase.PREFILL_WAIT: 0.5, Phase.PREFILL: 1.0, Phase.DECODE: 2.0}
    assert (timing.first_token, timing.total) == (1.5, 3.5)
    assert (timing.prefill_node, timing.decode_node) == ("unified", "unified")
    assert not house.links[node].of(Reserve)
    assert not house.links[node].of(Abort), "the node has ended it itself"
    assert not node.rooms


def test_an_end_at_the_first_token_is_the_nodes_own(house: House, node: Node) -> None:
    request = house.submit(ask())
    house.output(node, token(admit(house, request), 0, FinishReason.STOP))
    assert request.finish is FinishReason.STOP
    assert not house.links[node].of(Abort)


def test_a_client_that_leaves_is_told_once(house: House, node: Node) -> None:
    request = house.submit(ask())
    key = admit(house, request)
    house.output(node, token(key, 0))
    house.front.abort("r1")
    house.check()
    assert [abort.key for abort in house.links[node].of(Abort)] == [key]
    house.report(node, RoomQuiesced(key))
    assert not house.links[node].of(WriterQuiesced), "nothing of it was ever fenced"


def test_a_token_comes_though_no_word_of_admission_has(house: House, node: Node) -> None:
    request = house.submit(ask())
    house.output(node, token(key_of(request), 0))
    assert [t.index for t in request.take()] == [0]
    assert (request.state.phase, len(house.front.attempts.queue)) == ("decoding", 0)
    admit(house, request)
    assert request.state.phase == "decoding"
    house.output(node, token(key_of(request), 1, FinishReason.STOP))
    assert [t.index for t in request.take()] == [1]


# ---- a cluster is of one kind ----


@pytest.mark.parametrize(("first", "second"), [(Role.UNIFIED, Role.DECODE), (Role.PREFILL, Role.UNIFIED)])
def test_the_other_kind_of_node_is_refused(house: House, first: Role, second: Role) -> None:
    there = house.join(first)
    with pytest.raises(Refused) as refused:
        house.join(second)
    ours = {Role.UNIFIED: "unified nodes only", Role.PREFILL: "prefill and decode nodes only"}[first]
    assert refused.value.metadata == {"field": "role", "value": str(second), "expected": ours}
    house.front.leave(there, "gone")
    house.join(second)  # with the last of its nodes, a cluster is over


def test_unified_nodes_hear_nothing_of_each_other(house: House, node: Node) -> None:
    other = house.join(Role.UNIFIED, "other")
    assert not house.links[node].of(PeerJoined) + house.links[other].of(PeerJoined)


def test_ready_while_one_serves_and_missed_when_none_does(house: House, node: Node) -> None:
    assert house.front.ready
    house.front.leave(node, "gone")
    assert not house.front.ready
    request = house.submit(ask())
    house.advance(1.1)
    assert isinstance(request.error, Unavailable)
    assert request.error.reason == "NO_UNIFIED_NODE"
    with pytest.raises(Unavailable, match="no unified node serves"):
        house.submit(ask("r2"))


def test_one_that_comes_in_time_finds_the_request_waiting(house: House, node: Node) -> None:
    house.front.leave(node, "gone")
    request = house.submit(ask())
    house.clock.advance(0.5)
    back = house.join(Role.UNIFIED)
    house.advance(0.1, back)
    house.output(back, token(admit(house, request), 0, FinishReason.LENGTH))
    assert request.finish is FinishReason.LENGTH
    assert request.timing.phases[Phase.QUEUE] == 0.5


# ---- where to ----


def test_the_least_loaded_node_is_chosen_counting_what_decodes(house: House, node: Node) -> None:
    other = house.join(Role.UNIFIED, "other")
    first, second = (house.submit(ask(f"r{i}")) for i in (1, 2))
    assert {where(first), where(second)} == {node, other}
    for request in (first, second):
        house.output(where(request), token(admit(house, request), 0))
    house.front.stop(second, FinishReason.ABORT, "gone")
    for i in (3, 4):
        third = house.submit(ask(f"r{i}"))
        assert where(third) is not where(first)
        house.front.stop(third, FinishReason.ABORT, "gone")


def test_a_cached_prefix_draws_its_request(house: House, node: Node) -> None:
    other = house.join(Role.UNIFIED, "other")
    for one in (node, other):
        house.report(one, CacheDelta((), (), reset=True))
    house.report(other, CacheDelta(page_keys(range(40), 4), ()))
    assert all(where(house.submit(ask(f"r{i}", range(40)))) is other for i in range(3))


# ---- limits ----


def test_the_queue_is_bounded_by_what_waits_on_the_nodes() -> None:
    house = House(BootstrapConfig(max_queue=2))
    node = house.join(Role.UNIFIED)
    first = house.submit(ask("r1"))
    house.submit(ask("r2"))
    with pytest.raises(Overloaded, match="2 requests wait already"):
        house.submit(ask("r3"))
    admit(house, first)
    house.submit(ask("r4"))
    assert len(house.submitted(node)) == 3


def test_waiting_on_a_node_is_bounded_by_the_queue_timeout(house: House, node: Node) -> None:
    waits, runs = house.submit(ask("waits")), house.submit(ask("runs"))
    admit(house, runs)
    house.advance(59.0, node)
    assert waits.error is None
    house.advance(1.0, node)
    assert isinstance(waits.error, DeadlineExceeded)
    assert waits.error.metadata["phase"] == "queued"
    assert [abort.key for abort in house.links[node].of(Abort)] == [house.submitted(node)[0].task.key]
    house.advance(200.0, node)
    assert runs.error is None, "a prompt may take longer"


def test_a_phase_too_slow_is_the_nodes_fault(house: House, node: Node) -> None:
    other = house.join(Role.UNIFIED, "other")
    request = house.submit(ask())
    slow = where(request)
    house.output(slow, token(admit(house, request), 0))
    house.advance(60.0, node, other)
    assert where(request) is not slow
    assert [abort.key.epoch for abort in house.links[slow].of(Abort)] == [0]


@pytest.mark.parametrize(
    ("prompt", "answer", "field"),
    [(100, 295, None), (100, 296, "stopping.max_new_tokens"), (394, 1, None), (395, 1, "prompt tokens")],
)
def test_what_can_never_fit_is_refused(house: House, node: Node, prompt: int, answer: int, field: str | None) -> None:
    """100 pages of 4 tokens; a node admits what is less than that together with one more page."""
    asked = ask(token_ids=range(prompt), max_new_tokens=answer)
    assert house.front.registry.answer_room(prompt) == 395 - prompt
    if field is None:
        house.submit(asked)
        return
    with pytest.raises(InvalidField) as refused:
        house.submit(asked)
    assert refused.value.metadata["field"] == field


def test_no_room_is_known_before_a_node_is_there(house: House) -> None:
    assert house.front.registry.answer_room(10) is None


# ---- nodes go, rooms fail ----


def test_a_lost_node_is_a_retry_elsewhere_from_the_next_token(house: House, node: Node) -> None:
    house.join(Role.UNIFIED, "other")
    request = house.submit(ask(max_new_tokens=4))
    lost = where(request)
    key = admit(house, request)
    house.output(lost, token(key, 0))
    house.output(lost, token(key, 1))
    house.front.leave(lost, "gone")
    house.check()
    survivor = where(request)
    assert survivor is not lost
    task = house.submitted(survivor)[0].task
    assert (task.first_index, task.token_ids[10:]) == (2, (1000, 1001))
    key = admit(house, request)
    house.output(survivor, token(key, 2))
    house.output(survivor, token(key, 3, FinishReason.LENGTH))
    assert [t.index for t in request.take()] == [0, 1, 2, 3]
    assert request.attempts == 2
    house.output(lost, token(key, 2))  # which is not there any more


def test_a_draining_node_gets_nothing_new_and_keeps_what_it_has(house: House, node: Node) -> None:
    other = house.join(Role.UNIFIED, "other")
    request = house.submit(ask())
    drained, stays = (where(request), other if where(request) is node else node)
    house.front.drain_node(drained.node_id, 10.0)
    assert all(where(house.submit(ask(f"q{i}"))) is stays for i in range(3))
    house.output(drained, token(admit(house, request), 0, FinishReason.LENGTH))
    assert request.finish is FinishReason.LENGTH


def test_a_retracted_room_may_come_back_to_the_same_node(house: House, node: Node) -> None:
    request = house.submit(ask(max_new_tokens=9))
    key = admit(house, request)
    house.output(node, token(key, 0))
    house.report(node, retracted(key))
    assert where(request) is node
    assert house.submitted(node)[-1].task.first_index == 1


def test_what_outgrows_every_node_ends_with_the_limit(house: House) -> None:
    large, small = house.join(Role.UNIFIED, "large", num_pages=1000), house.join(Role.UNIFIED, "small")
    request = house.submit(ask(token_ids=range(390), max_new_tokens=600))
    assert where(request) is large
    key = admit(house, request)
    for index in range(8):
        house.output(large, token(key, index))
    house.front.leave(large, "gone")
    house.advance(1.1, small)
    assert isinstance(request.error, Overloaded)
    assert request.error.metadata["limit"] == "at most 394, the room on a unified node"


def test_an_answer_that_has_begun_goes_on_where_it_can_only_just(house: House) -> None:
    """It was let in where all of it fits. What is left counts no more than its next token."""
    large, small = house.join(Role.UNIFIED, "large", num_pages=1000), house.join(Role.UNIFIED, "small")
    request = house.submit(ask(token_ids=range(300), max_new_tokens=600))
    house.output(large, token(admit(house, request), 0))
    house.front.leave(large, "gone")
    assert where(request) is small


def test_metrics_and_listing_know_the_role(house: House, node: Node) -> None:
    house.report(node, RoomFailed(RoomKey.new(0), "decoding", "of nobody"))
    house.front.tick()
    assert 'kvrelay_node_pages_total{node="unified",role="unified"}' in house.metrics.expose()
    assert house.front.registry.serving(Role.UNIFIED) == [node]
