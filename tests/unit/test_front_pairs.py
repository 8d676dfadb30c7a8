"""A broken link between two nodes that are both well: the pair is set aside, and each goes on with others."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest

from bootstrap.config import BootstrapConfig
from bootstrap.pairs import FAILURES, FIRST_REST_S, MAX_REST_S, Pairs
from bootstrap.registry import Node
from bootstrap.requests import LiveRequest
from engine.core.clock import ManualClock
from engine.core.handoff import FailureCause
from engine.core.messages import Heartbeat, RoomFailed
from engine.core.metrics import FrontDoorMetric
from engine.core.sampling import FinishReason
from engine.core.types import NodeIdentity, Role
from tests.helpers.front_door import SERVING, House, ask, token

P, Q, D, E = (NodeIdentity(name, "1") for name in ("p", "q", "d", "e"))


# ---- the pairs alone ----


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def fail(pairs: Pairs, times: int = FAILURES) -> None:
    for _ in range(times):
        pairs.failed(P, D, math.inf)  # one after the other


def test_set_aside_after_failures_in_a_row(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    pairs = Pairs(clock)
    fail(pairs, FAILURES - 1)
    pairs.worked(P, D)
    fail(pairs, FAILURES - 1)
    pairs.worked(P, E)  # another pair
    assert not pairs.set_aside(P, D)
    with caplog.at_level(logging.INFO):
        fail(pairs, 1)
    assert pairs.set_aside(P, D)
    assert not pairs.set_aside(P, E)
    assert not pairs.set_aside(Q, D)
    assert (len(pairs), pairs.peers(P), pairs.peers(D), pairs.peers(Q)) == (1, ["d"], ["p"], [])
    pairs.worked(P, D)
    assert len(pairs) == 0
    assert [record.message for record in caplog.records] == ["peer pair set aside"]


def test_what_was_under_way_together_counts_once(clock: ManualClock) -> None:
    pairs = Pairs(clock)
    for _ in range(FAILURES - 1):
        began = clock()
        for _ in range(10):
            clock.advance(0.5)
            pairs.failed(P, D, began)
    assert not pairs.set_aside(P, D)
    pairs.failed(P, D, clock())
    assert pairs.set_aside(P, D)


def test_a_trial_that_fails_doubles_the_rest_and_one_that_works_ends_it(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = Pairs(clock)
    fail(pairs)
    rests = []
    for _ in range(6):
        began = clock()
        while pairs.set_aside(P, D):
            pairs.failed(P, D, clock())  # had nowhere else to go: it is set aside no longer for that
            clock.advance(1)
            pairs.tick()
        rests.append(clock() - began)
        pairs.failed(P, D, clock())
        assert pairs.set_aside(P, D), "one failure is enough now"
    assert rests == [min(FIRST_REST_S * 2**i, MAX_REST_S) for i in range(6)]
    clock.advance(MAX_REST_S)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        pairs.tick()
        pairs.worked(P, D)
    assert [record.message for record in caplog.records] == ["peer pair is tried again", "peer pair works again"]
    fail(pairs, FAILURES - 1)
    assert not pairs.set_aside(P, D), "all is forgotten"


@pytest.mark.parametrize("gone", [P, D])
def test_forgotten_when_either_end_leaves(clock: ManualClock, gone: NodeIdentity) -> None:
    pairs = Pairs(clock)
    fail(pairs)
    pairs.left(replace(gone, incarnation="2"))
    assert pairs.set_aside(P, D)
    pairs.left(gone)
    assert not pairs.set_aside(P, D)


# ---- with a front door ----


class Links:
    """A front door with two nodes of each role, and links of which some are broken."""

    def __init__(self, prefills: int = 2, decodes: int = 2):
        self.house = House(BootstrapConfig(max_attempts=3))
        for role, count in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
            for number in range(1, count + 1):
                self.house.join(role, f"{role}-{number}", incarnation=f"{role}{number}")
        self.broken: set[tuple[str, str]] = set()
        self.count = 0

    def node(self, node_id: str) -> Node:
        found = self.house.front.registry.get(node_id)
        assert found is not None
        return found

    def pair_of(self, request: LiveRequest) -> tuple[Node, Node]:
        attempt = request.attempt
        assert attempt is not None
        assert attempt.prefill is not None
        assert attempt.decode is not None
        return attempt.prefill, attempt.decode

    def ask(self, routing_key: str = "") -> tuple[LiveRequest, list[tuple[str, str]]]:
        """One request to its end; the pairs that its attempts were given to."""
        self.count += 1
        request = self.house.submit(ask(f"r{self.count}", max_new_tokens=2, routing_key=routing_key))
        tried = []
        while not request.ended:
            prefill, decode = self.pair_of(request)
            assert request.attempt is not None
            key = request.attempt.key
            tried.append((prefill.node_id[-1], decode.node_id[-1]))
            self.house.grant(decode, key)
            if tried[-1] in self.broken:
                self.house.report(prefill, RoomFailed(key, "transferring", "write failed"))
                continue
            self.house.output(prefill, token(key, len(request.output)))
            self.house.output(decode, token(key, 1, FinishReason.LENGTH))
        return request, tried

    def set_aside(self) -> float | None:
        self.house.front.tick()
        return self.house.metrics.registry.get_sample_value(FrontDoorMetric.SET_ASIDE.metric)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.house.advance(1.0, *self.house.front.registry.nodes())


def _full() -> Heartbeat:
    return Heartbeat(replace(SERVING, head_room=0, pages_free=0, pages_held=100, running=1))


def _roomy() -> Heartbeat:
    return Heartbeat(SERVING)


def key_to(links: Links, prefill: str) -> str:
    """A routing key that leads to this prefill node."""
    for number in range(100):
        request, tried = links.ask(f"key{number}")
        if tried[0][0] == prefill and request.finish is not None:
            return f"key{number}"
    raise AssertionError("no key found")


def test_one_broken_link_is_used_three_times_and_no_more() -> None:
    links = Links()
    key = key_to(links, "1")
    links.broken = {("1", "1")}
    used = 0
    for _ in range(20):
        request, tried = links.ask(key)
        assert request.finish is FinishReason.LENGTH
        assert len(tried) <= 2
        if tried[0] == ("1", "1"):
            used += 1
            assert tried[1] == ("1", "2"), "the prefill node, which has the prompt, is not changed"
        else:
            assert tried == [("1", "2")]
    assert used == FAILURES
    assert links.set_aside() == 1


def test_the_pair_is_tried_again_and_works() -> None:
    links = Links()
    key = key_to(links, "1")
    links.broken = {("1", "1")}
    for _ in range(8):
        links.ask(key)
    links.broken = set()
    links.wait(FIRST_REST_S + 1)
    assert links.set_aside() == 0
    assert ("1", "1") in {pair for _ in range(4) for pair in links.ask(key)[1]}


def test_a_decode_node_that_nobody_reaches_costs_each_request_one_more_attempt_at_most() -> None:
    links = Links(prefills=2, decodes=2)
    links.broken = {("1", "1"), ("2", "1")}
    tries = [links.ask() for _ in range(20)]
    assert all(request.finish is FinishReason.LENGTH for request, _ in tries)
    assert max(len(tried) for _, tried in tries) == 2
    assert links.set_aside() == 2
    assert tries[-1][1][0][1] == "2"


def test_a_prefill_node_that_reaches_nobody_is_given_no_more_requests() -> None:
    """Its second failure is with another decode node, so the third attempt is with another prefill node."""
    links = Links(prefills=2, decodes=3)
    key = key_to(links, "1")
    links.broken = {("1", str(decode)) for decode in (1, 2, 3)}
    tries = [links.ask(key) for _ in range(20)]
    assert all(request.finish is FinishReason.LENGTH for request, _ in tries)
    first = tries[0][1]
    assert [prefill for prefill, _ in first] == ["1", "1", "2"]
    assert links.set_aside() == 3
    assert {prefill for prefill, _ in tries[-1][1]} == {"2"}


def test_a_request_that_waits_for_a_pair_set_aside_meanwhile_goes_to_another_prefill_node() -> None:
    links = Links(prefills=2, decodes=1)
    house, decode = links.house, links.node("decode-1")
    key = key_to(links, "1")
    house.advance(0.1, *house.front.registry.nodes())
    house.front.on_report(decode, _full())
    waiting = house.submit(ask("waits", max_new_tokens=2, routing_key=key))
    assert waiting.attempt is not None
    assert waiting.attempt.decode is None
    first = waiting.attempt.prefill
    assert first is not None
    for _ in range(FAILURES):
        house.front.attempts.pairs.failed(first.identity, decode.identity, math.inf)
    house.front.on_report(decode, _roomy())
    house.check()
    prefill, _ = links.pair_of(waiting)
    assert prefill is not first
    assert waiting.attempts == 2
    assert first.node_id in waiting.avoid


@pytest.mark.parametrize("number", [0, 1])
def test_one_that_begins_again_on_another_prefill_node_keeps_off_what_is_set_aside_with_that(number: int) -> None:
    """Its decode node did not answer, and its prefill node drains: both are new, and so is what they are set aside."""
    links = Links(prefills=2, decodes=3)
    house = links.house
    request = house.submit(ask("late", max_new_tokens=2))
    writer, silent = links.pair_of(request)
    house.front.drain_node(writer.node_id, 10.0)
    (other,) = house.front.registry.serving(Role.PREFILL)
    left = [node for node in house.front.registry.serving(Role.DECODE) if node is not silent]
    for _ in range(FAILURES):
        house.front.attempts.pairs.failed(other.identity, left[number].identity, math.inf)
    house.advance(house.config.grant_timeout, *house.front.registry.nodes())
    house.check()
    assert links.pair_of(request) == (other, left[1 - number])


def test_a_pair_set_aside_is_better_than_none() -> None:
    links = Links(prefills=1, decodes=1)
    links.broken = {("1", "1")}
    failed, tried = links.ask()
    assert failed.error is not None
    assert failed.error.reason == "ROOM_FAILED"
    assert tried == [("1", "1")] * 3
    assert links.set_aside() == 1
    links.broken = set()
    assert links.ask()[0].finish is FinishReason.LENGTH
    assert links.set_aside() == 0, "it works again"


def test_a_transfer_that_takes_too_long_counts() -> None:
    links = Links()
    house = links.house
    for number in range(FAILURES):
        request = house.submit(ask(f"slow{number}", routing_key="k", max_new_tokens=5))
        prefill, decode = links.pair_of(request)
        assert request.attempt is not None
        key = request.attempt.key
        house.grant(decode, key)
        house.output(prefill, token(key, 0))
        before = {node.node_id for node in (prefill, decode)}
        links.wait(house.config.transfer_timeout + 1)
        assert len(before & request.avoid) == 1
        house.front.stop(request, FinishReason.ABORT, "enough")
    assert sum(pair.failures for pair in house.front.attempts.pairs._pairs.values()) == FAILURES


def test_a_node_that_is_held_up_while_many_wait_for_it_is_no_broken_link() -> None:
    links = Links(prefills=1, decodes=1)
    house = links.house
    for number in range(4 * FAILURES):
        request = house.submit(ask(f"held up {number}", max_new_tokens=5))
        prefill, decode = links.pair_of(request)
        assert request.attempt is not None
        house.grant(decode, request.attempt.key)
        house.output(prefill, token(request.attempt.key, 0))
        links.wait(1)
    links.wait(house.config.transfer_timeout)
    assert links.set_aside() == 0
    assert [pair.failures for pair in house.front.attempts.pairs._pairs.values()] == [1]


@pytest.mark.parametrize(
    ("phase", "cause", "retriable"),
    [
        ("transferring", FailureCause.PEER_LEFT, True),
        ("decoding", FailureCause.RETRACTED, True),
        ("prefilling", FailureCause.FAULT, False),
        ("transferring", FailureCause.FAULT, False),
        ("prefilling", FailureCause.FAULT, True),
    ],
)
def test_what_one_side_fails_at_by_itself_does_not_count(phase: str, cause: FailureCause, retriable: bool) -> None:
    links = Links(prefills=1, decodes=1)
    for number in range(FAILURES):
        request = links.house.submit(ask(f"r{number}"))
        prefill, decode = links.pair_of(request)
        assert request.attempt is not None
        links.house.grant(decode)
        links.house.report(prefill, RoomFailed(request.attempt.key, phase, "why", retriable, cause=cause))
        if not request.ended:
            links.house.front.stop(request, FinishReason.ABORT, "enough")
    assert links.set_aside() == 0


def test_a_node_that_comes_back_is_not_set_aside() -> None:
    links = Links(prefills=1, decodes=1)
    links.broken = {("1", "1")}
    links.ask()
    assert links.set_aside() == 1
    links.house.front.leave(links.node("decode-1"), "gone")
    assert links.set_aside() == 0
    links.house.join(Role.DECODE, "decode-1", incarnation="new")
    assert links.set_aside() == 0


def test_a_draining_prefill_node_goes_on_with_a_pair_set_aside() -> None:
    """No other prefill node serves, so nothing better is left for what it has already."""
    links = Links(prefills=1, decodes=1)
    house, decode, prefill = links.house, links.node("decode-1"), links.node("prefill-1")
    house.front.on_report(decode, _full())
    request = house.submit(ask("waits"))
    for _ in range(FAILURES):
        house.front.attempts.pairs.failed(prefill.identity, decode.identity, math.inf)
    house.front.drain_node("prefill-1", 10.0)
    house.front.on_report(decode, _roomy())
    assert links.pair_of(request) == (prefill, decode)
