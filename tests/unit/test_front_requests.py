"""One request through the front door: order of messages, ends, deadlines, what nodes are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bootstrap.config import BootstrapConfig
from bootstrap.registry import Node
from bootstrap.requests import Phase
from engine.core.errors import AlreadyExists, DeadlineExceeded, InvalidField, NotFound, Overloaded, Unavailable
from engine.core.handoff import HandoffState
from engine.core.messages import (
    Abort,
    AdmitReport,
    DecodeReport,
    Heartbeat,
    NodeStats,
    PrefillReport,
    RelayReport,
    RoomFailed,
)
from engine.core.metrics import FrontDoorMetric
from engine.core.page_keys import page_keys
from engine.core.sampling import FinishReason, SamplingParams
from engine.core.types import Role
from tests.helpers.front_door import SERVING, House, ask, token

FULL = NodeStats(pages_total=100, pages_held=100, head_room=0, running=3, serving=True)


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def prefill(house: House) -> Node:
    return house.join(Role.PREFILL)


@pytest.fixture
def decode(house: House) -> Node:
    return house.join(Role.DECODE)


def test_a_request_from_arrival_to_its_last_token(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    task = house.submitted(prefill)[0].task
    assert task.page_keys == page_keys(range(10), 4)
    reservation = house.reserved(decode)[0].reservation
    assert reservation.key == task.key
    assert reservation.writer == prefill.identity
    assert reservation.history == ()
    key = house.grant(decode)
    granted = house.granted(prefill)[0]
    assert (granted.key, granted.peer, granted.pages) == (key, decode.identity, (1, 2, 3))
    house.output(prefill, token(key, 0))
    house.output(decode, token(key, 1), token(key, 2))
    house.output(decode, token(key, 3, FinishReason.LENGTH))
    assert [t.index for t in request.take()] == [0, 1, 2, 3]
    assert request.finish is FinishReason.LENGTH
    assert not house.front.requests
    assert not house.links[prefill].of(Abort) + house.links[decode].of(Abort)


def test_the_decode_node_may_be_heard_before_the_prefill_node(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.grant(decode)
    house.output(decode, token(key, 1))
    house.output(decode, token(key, 2))
    assert request.take() == []
    house.output(prefill, token(key, 0))
    assert [t.index for t in request.take()] == [0, 1, 2]


def test_what_comes_twice_is_given_once(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.grant(decode)
    for _ in range(2):
        house.output(prefill, token(key, 0))
        house.output(decode, token(key, 1))
    assert [t.index for t in request.take()] == [0, 1]


def test_an_end_at_token_0_is_an_abort_for_both(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.grant(decode)
    house.output(prefill, token(key, 0, FinishReason.STOP))
    assert request.finish is FinishReason.STOP
    assert [abort.key for abort in house.links[prefill].of(Abort) + house.links[decode].of(Abort)] == [key, key]


def test_late_messages_are_dropped_and_counted(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.grant(decode)
    house.front.stop(request, FinishReason.ABORT, "enough")
    house.output(prefill, token(key, 0))
    house.grant(decode, key)
    assert request.take() == []
    assert (house.late("token"), house.late("grant")) == (1, 1)
    assert not house.granted(prefill)[1:]


def test_tokens_behind_the_end_of_an_answer_are_not_kept(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask(max_new_tokens=4))
    key = house.grant(decode)
    house.output(decode, *(token(key, index) for index in (4, 5, 1 << 31)), token(key, 3))
    assert house.late("token") == 3
    house.output(prefill, *(token(key, index) for index in range(3)))
    assert [one.index for one in request.take()] == [0, 1, 2, 3]


def test_a_node_cannot_speak_for_a_room_that_is_not_its_own(house: House, prefill: Node, decode: Node) -> None:
    other = house.join(Role.DECODE, "decode-2", stats=FULL)
    request = house.submit(ask())
    key = house.grant(decode)
    house.output(other, token(key, 0))
    assert request.take() == []
    assert house.late("token") == 1


def test_a_node_that_has_left_says_nothing_more(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.grant(decode)
    house.front.leave(decode, "gone")
    house.report(decode, Heartbeat(SERVING))
    house.report(decode, RoomFailed(key, "decoding", "late"))
    house.output(decode, token(key, 1))
    assert 'node="decode"' not in house.metrics.expose(), "no gauge of a node that is not there"
    assert house.late("room_failed") == house.late("token") == 0
    assert request.attempts == 2


def test_a_token_of_a_room_that_was_never_granted(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    house.output(prefill, token(house.submitted(prefill)[0].task.key, 0))
    assert request.take() == []


def test_timing_is_summed_from_here_and_from_reports(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    house.clock.advance(0.5)
    key = house.grant(decode)
    house.output(prefill, admitted=(AdmitReport(key, cached_tokens=8),))
    house.clock.advance(1.0)
    report = PrefillReport(key, chunks=1, prefill_wait=0.2, prefill=0.7)
    house.output(prefill, token(key, 0), prefilled=(report,))
    house.output(prefill, relayed=(RelayReport(key, 3072, 0.25),))
    house.clock.advance(0.25)
    house.output(decode, token(key, 1), decoded=(DecodeReport(key, handoff=0.1),))
    house.clock.advance(2.0)
    house.output(decode, token(key, 2, FinishReason.LENGTH))
    timing = request.timing
    assert timing.phases == {
        Phase.QUEUE: 0.0,
        Phase.GRANT_WAIT: 0.5,
        Phase.PREFILL_WAIT: 0.2,
        Phase.PREFILL: 0.7,
        Phase.HANDOFF: 0.1,
        Phase.DECODE: 2.0,
    }
    assert (timing.first_token, timing.total) == (1.5, 3.75)
    assert (timing.relayed_bytes, timing.relay) == (3072, 0.25)
    assert request.cached_tokens == 8


def test_an_answer_ended_by_a_stop_string_has_its_times_too(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask(max_new_tokens=50))
    key = house.grant(decode)
    house.output(prefill, token(key, 0), prefilled=(PrefillReport(key, 1, 0.2, 0.7),))
    house.output(decode, token(key, 1), decoded=(DecodeReport(key, handoff=0.1),))
    house.clock.advance(2.0)
    house.output(decode, token(key, 2))
    house.clock.advance(0.1)
    house.front.stop(request, FinishReason.STOP, "stop string")
    assert (request.timing.phases[Phase.HANDOFF], request.timing.phases[Phase.DECODE]) == (0.1, 2.0)
    assert house.observed(FrontDoorMetric.PHASE, phase="decode") == 1


def test_what_is_not_known_is_not_observed(house: House, prefill: Node, decode: Node) -> None:
    house.submit(ask())
    key = house.grant(decode)
    house.output(prefill, token(key, 0, FinishReason.LENGTH))
    seen = {phase: house.observed(FrontDoorMetric.PHASE, phase=phase) for phase in Phase}
    assert {phase for phase, count in seen.items() if count} == {Phase.QUEUE, Phase.GRANT_WAIT}


def test_admission_is_a_phase_of_its_own_and_known_at_once(house: House, prefill: Node, decode: Node) -> None:
    woken: list[None] = []
    request = house.front.submit(ask(), lambda: woken.append(None))
    key = house.reserved(decode)[0].reservation.key
    house.output(prefill, admitted=(AdmitReport(key, 8),))
    assert request.cached_tokens is None, "it was not granted yet: that node is wrong"
    assert house.late("admit_report") == 1
    house.grant(decode)
    house.output(prefill, admitted=(AdmitReport(key, 8),))
    assert request.state is HandoffState.PREFILLING
    assert request.cached_tokens == 8
    assert woken


def test_penalties_need_the_history(house: House, prefill: Node, decode: Node) -> None:
    house.submit(ask(sampling=SamplingParams(presence_penalty=0.5)))
    assert house.reserved(decode)[0].reservation.history == tuple(range(10))


# ---- refused at arrival ----


def test_two_live_requests_of_one_id(house: House, prefill: Node, decode: Node) -> None:
    house.submit(ask())
    with pytest.raises(AlreadyExists):
        house.submit(ask())


def test_the_queue_is_bounded() -> None:
    house = House(BootstrapConfig(max_queue=2))
    house.join(Role.PREFILL)
    house.join(Role.DECODE, stats=FULL)
    house.submit(ask("r1"))
    house.submit(ask("r2"))
    with pytest.raises(Overloaded) as refused:
        house.submit(ask("r3"))
    assert refused.value.retry_after is not None


def test_what_can_never_fit_is_refused_naming_field_and_limit(house: House, prefill: Node, decode: Node) -> None:
    # 100 pages of 4 tokens; 8 tokens reserved on the decode node, one page and two tokens on the prefill node.
    house.submit(ask("fits", range(392), max_new_tokens=8))
    with pytest.raises(InvalidField, match="prompt tokens is 393") as refused:
        house.submit(ask("too long", range(393)))
    assert refused.value.metadata["field"] == "prompt tokens"
    with pytest.raises(InvalidField) as refused:
        house.submit(ask("too greedy", range(300), max_new_tokens=101))
    assert refused.value.metadata["field"] == "stopping.max_new_tokens"


def test_one_node_that_is_large_enough_will_do(house: House) -> None:
    small = house.join(Role.PREFILL, "small", num_pages=10)
    large = house.join(Role.PREFILL, "large")
    house.join(Role.DECODE, "small-d", num_pages=10)
    large_decode = house.join(Role.DECODE, "large-d")
    house.submit(ask(token_ids=range(200)))
    assert not house.submitted(small)
    assert house.submitted(large)
    assert house.reserved(large_decode)


def test_without_a_node_of_a_role_a_request_fails_within_a_heartbeat(house: House, prefill: Node) -> None:
    request = house.submit(ask())  # a decode node may be about to come back
    house.advance(0.9, prefill)
    assert not request.ended
    house.advance(0.2, prefill)
    assert isinstance(request.error, Unavailable)
    assert (request.error.reason, request.error.metadata["phase"]) == ("NO_DECODE_NODE", "queued")
    with pytest.raises(Unavailable):
        house.submit(ask("r2"))


def test_a_node_that_comes_back_in_time_finds_the_request_waiting(house: House) -> None:
    request = house.submit(ask())
    house.clock.advance(0.5)
    prefill, decode = house.join(Role.PREFILL), house.join(Role.DECODE)
    house.advance(0.1)
    key = house.grant(decode)
    house.output(prefill, token(key, 0, FinishReason.LENGTH))
    assert request.finish is FinishReason.LENGTH


def test_nothing_is_taken_in_while_shutting_down(house: House, prefill: Node, decode: Node) -> None:
    live = house.submit(ask())
    house.front.draining = True
    with pytest.raises(Unavailable):
        house.submit(ask("r2"))
    house.front.fail_all(lambda: Unavailable("over", phase="shutdown"))
    assert isinstance(live.error, Unavailable)
    assert house.links[prefill].of(Abort)


# ---- ends that a client brings about ----


def test_abort_by_id(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.grant(decode)
    house.front.abort("r1")
    assert request.finish is FinishReason.ABORT
    assert [a.key for a in house.links[prefill].of(Abort)] == [key]
    assert [a.key for a in house.links[decode].of(Abort)] == [key]
    with pytest.raises(NotFound):
        house.front.abort("r1")


def test_only_who_asked_may_abort(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(replace(ask(), client="ann"))
    for other in ("bob", ""):
        with pytest.raises(NotFound):
            house.front.abort("r1", other)
    assert not request.ended
    house.front.abort("r1", "ann")
    assert request.finish is FinishReason.ABORT


@pytest.mark.parametrize(("after", "passed"), [(1.0, False), (1.95, True), (2.5, True)])
def test_a_call_that_ends_by_its_deadline_is_not_one_whose_client_left(
    house: House, prefill: Node, decode: Node, after: float, passed: bool
) -> None:
    request = house.submit(ask(deadline=house.clock() + 2.0))
    house.clock.advance(after)
    house.front.client_gone(request)
    house.front.client_gone(request)
    assert request.finish is (None if passed else FinishReason.ABORT)
    assert (request.error is not None and request.error.reason == "CLIENT_DEADLINE") == passed


def test_an_id_is_its_clients_own(house: House, prefill: Node, decode: Node) -> None:
    of_ann, of_bob = (house.submit(replace(ask(), client=name)) for name in ("ann", "bob"))
    with pytest.raises(AlreadyExists):
        house.submit(replace(ask(), client="ann"))
    house.front.abort("r1", "bob", of_others=True)
    assert (of_bob.finish, of_ann.ended) == (FinishReason.ABORT, False), "its own, though it may end all"
    house.front.abort("r1", "bob", of_others=True)
    assert of_ann.finish is FinishReason.ABORT


def test_the_clients_deadline_ends_it_everywhere(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask(deadline=house.clock() + 2.0))
    house.grant(decode)
    house.advance(2.0, prefill, decode)
    assert isinstance(request.error, DeadlineExceeded)
    assert request.error.metadata["phase"] == "reserved"
    assert house.links[prefill].of(Abort)
    assert house.links[decode].of(Abort)
