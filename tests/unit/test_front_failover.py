"""What the front door does when a node is lost, fails a room, hangs or drains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bootstrap.config import BootstrapConfig
from bootstrap.registry import Node
from bootstrap.requests import LiveRequest
from engine.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVRelayError,
    NotFound,
    Overloaded,
    Refused,
    Unavailable,
)
from engine.core.journal import ENDED_KEPT
from engine.core.messages import Abort, Drain, Heartbeat, NodeStats, PeerLeft, RoomFailed, RoomQuiesced, WriterQuiesced
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey
from tests.helpers.front_door import House, ask, retracted, token


@pytest.fixture
def house() -> House:
    """Two nodes of each role."""
    house = House()
    for role in Role.PREFILL.pools:
        for number in (1, 2):
            house.join(role, f"{role}-{number}")
    return house


def node(house: House, node_id: str) -> Node:
    found = house.front.registry.get(node_id)
    assert found is not None
    return found


def parts(request: LiveRequest) -> tuple[Node, Node]:
    assert request.attempt is not None
    assert request.attempt.prefill is not None
    assert request.attempt.decode is not None
    return request.attempt.prefill, request.attempt.decode


def key_of(request: LiveRequest) -> RoomKey:
    assert request.attempt is not None
    return request.attempt.key


def finish(house: House, request: LiveRequest) -> list[int]:
    """Run the present attempt to its end; the indices the client saw of it."""
    prefill, decode = parts(request)
    key = key_of(request)
    house.grant(decode, key)
    first = len(request.output)
    last = request.ask.stopping.max_new_tokens - 1
    house.output(prefill, token(key, first, FinishReason.LENGTH if first == last else None))
    for index in range(first + 1, last + 1):
        house.output(decode, token(key, index, FinishReason.LENGTH if index == last else None))
    assert request.finish is FinishReason.LENGTH
    taken = request.take()
    assert {t.key for t in taken if t.index >= first} == {key}, "nothing early of an earlier attempt"
    return [t.index for t in taken]


def test_the_time_to_the_first_token_counts_from_the_first_arrival(house: House) -> None:
    request = house.submit(replace(ask(), ttft_target=3.0))
    first, _ = parts(request)
    house.advance(1.5, *house.front.registry.nodes())
    house.front.leave(first, "gone")
    house.check()
    second, _ = parts(request)
    tasks = [house.submitted(node)[0].task for node in (first, second)]
    assert [(task.ttft_target, task.waited) for task in tasks] == [(3.0, 0.0), (3.0, 1.5)]


def test_a_prefill_node_lost_before_token_0(house: House) -> None:
    request = house.submit(ask())
    prefill, decode = parts(request)
    old = key_of(request)
    house.grant(decode)
    house.front.leave(prefill, "gone")
    house.check()
    assert Abort(old, house.links[decode].of(Abort)[0].reason) in house.links[decode].sent
    assert key_of(request).epoch == old.epoch + 1
    assert key_of(request).room != old.room
    assert parts(request)[0] is not prefill
    assert finish(house, request) == [0, 1, 2, 3]
    assert request.attempts == 2


def test_a_decode_node_lost_while_decoding(house: House) -> None:
    request = house.submit(ask(max_new_tokens=6))
    prefill, decode = parts(request)
    key = house.grant(decode)
    house.output(prefill, token(key, 0))
    house.output(decode, token(key, 1))
    house.output(decode, token(key, 3))  # early: must be made again
    house.front.leave(decode, "gone")
    house.check()
    task = house.submitted(parts(request)[0])[-1].task
    assert task.token_ids == (*range(10), 1000, 1001)
    assert task.first_index == 2
    assert house.reserved(parts(request)[1])[-1].reservation.first_index == 2
    assert [t.index for t in request.take()] == [0, 1]
    assert finish(house, request) == [2, 3, 4, 5]


def test_the_prefill_node_is_not_needed_once_every_page_arrived(house: House) -> None:
    request = house.submit(ask())
    prefill, decode = parts(request)
    key = house.grant(decode)
    house.output(prefill, token(key, 0))
    house.output(decode, token(key, 1))
    house.front.leave(prefill, "gone")
    house.check()
    assert key_of(request) == key
    house.output(decode, token(key, 2), token(key, 3, FinishReason.LENGTH))
    assert request.finish is FinishReason.LENGTH
    assert request.attempts == 1


def test_but_it_is_while_its_token_has_not_come(house: House) -> None:
    request = house.submit(ask())
    prefill, decode = parts(request)
    key = house.grant(decode)
    house.output(decode, token(key, 1))
    house.front.leave(prefill, "gone")
    house.check()
    assert key_of(request) != key
    assert finish(house, request) == [0, 1, 2, 3]


def test_abort_comes_before_the_news_that_the_writer_left(house: House) -> None:
    """So the decode node fences the pages first, and then learns that it need not wait."""
    request = house.submit(ask())
    prefill, decode = parts(request)
    house.grant(decode)
    house.front.leave(prefill, "gone")
    kinds = [type(command) for command in house.links[decode].sent]
    assert kinds.index(Abort) < kinds.index(PeerLeft)


def test_a_failed_room_goes_to_other_nodes(house: House) -> None:
    request = house.submit(ask())
    prefill, decode = parts(request)
    house.grant(decode)
    house.front.on_report(prefill, RoomFailed(key_of(request), "transferring", "write failed"))
    house.check()
    assert parts(request)[0] is not prefill
    assert parts(request)[1] is not decode
    assert finish(house, request) == [0, 1, 2, 3]


def test_the_same_nodes_are_tried_again_when_there_are_no_others() -> None:
    house = House()
    prefill, decode = house.join(Role.PREFILL), house.join(Role.DECODE)
    request = house.submit(ask())
    for attempt in range(3):
        assert request.attempts == attempt + 1
        house.grant(decode, key_of(request))
        house.front.on_report(decode, RoomFailed(key_of(request), "transferring", "checksum"))
        house.check()
    assert isinstance(request.error, Unavailable)
    assert request.error.metadata["phase"] == "transferring"
    assert "checksum" in str(request.error)
    assert len(house.links[prefill].of(Abort)) == 3


def test_a_room_that_no_other_node_can_save(house: House) -> None:
    request = house.submit(ask())
    _, decode = parts(request)
    house.front.on_report(decode, RoomFailed(key_of(request), "decoding", "too large alone", retriable=False))
    house.check()
    assert request.error is not None
    assert request.error.code == KVRelayError.code
    assert request.attempts == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("RESOURCE_EXHAUSTED", Overloaded),
        ("FAILED_PRECONDITION", Refused),
        ("INTERNAL", KVRelayError),
        ("NO_SUCH_CODE", KVRelayError),
    ],
)
def test_a_room_that_no_other_node_can_save_ends_with_the_status_it_names(
    house: House, code: str, kind: type[KVRelayError]
) -> None:
    request = house.submit(ask())
    prefill, _ = parts(request)
    house.report(prefill, RoomFailed(key_of(request), "queued", "no priorities here", retriable=False, code=code))
    assert type(request.error) is kind
    assert request.error is not None
    assert (request.error.reason, request.error.metadata["phase"]) == ("ROOM_FAILED", "queued")
    assert "no priorities here" in str(request.error)


def test_what_a_node_says_of_a_failure_is_kept_short(house: House) -> None:
    request = house.submit(ask())
    prefill, _ = parts(request)
    house.report(prefill, RoomFailed(key_of(request), "queued", "x" * 1_000_000, retriable=False))
    assert len(str(request.error)) < 2000


def test_lost_nodes_do_not_use_up_a_request(house: House) -> None:
    """Three deaths, each before a token; others serve all the while."""
    request = house.submit(ask())
    for number in range(4):
        prefill, decode = parts(request)
        house.grant(decode, key_of(request))
        house.front.leave(prefill, "died")
        house.check()
        house.join(Role.PREFILL, prefill.node_id, incarnation=str(number + 2))
    assert request.error is None
    assert finish(house, request) == [0, 1, 2, 3]


def test_nor_do_attempts_that_made_a_token(house: House) -> None:
    request = house.submit(ask(max_new_tokens=8))
    for index in range(6):
        prefill, decode = parts(request)
        key = house.grant(decode, key_of(request))
        house.output(prefill, token(key, index))
        house.report(decode, RoomFailed(key, "transferring", "checksum"))
    assert request.failures == 0
    assert finish(house, request)[-1] == 7


def test_but_a_request_that_takes_node_after_node_down_ends(house: House) -> None:
    request = house.submit(ask(max_new_tokens=100))
    lost = 0
    while not request.ended:
        prefill, decode = parts(request)
        key = house.grant(decode, key_of(request))
        house.output(prefill, token(key, len(request.output)))
        house.front.leave(decode, "died")
        lost += 1
        house.join(Role.DECODE, decode.node_id, incarnation=str(lost + 1))
    assert isinstance(request.error, Unavailable)
    assert request.error.reason == "NODE_LOST"
    assert lost == 16


def test_a_lone_node_that_dies_again_and_again_is_given_up() -> None:
    house = House()
    house.join(Role.PREFILL)
    decode = house.join(Role.DECODE)
    request = house.submit(ask())
    for number in range(3):
        assert not request.ended
        house.grant(decode, key_of(request))
        house.front.leave(decode, "died")
        decode = house.join(Role.DECODE, incarnation=str(number + 2))
    assert isinstance(request.error, Unavailable)


def test_retractions_without_a_token_do_not_go_on_for_ever() -> None:
    house = House()
    house.join(Role.PREFILL)
    decode = house.join(Role.DECODE)
    request = house.submit(ask())
    for _ in range(3):
        assert not request.ended
        house.grant(decode, key_of(request))
        house.report(decode, retracted(key_of(request)))
    assert request.ended


def test_retraction_is_no_failure() -> None:
    house = House(BootstrapConfig(max_attempts=1))
    prefill, decode = house.join(Role.PREFILL), house.join(Role.DECODE)
    request = house.submit(ask(max_new_tokens=20))
    for _ in range(5):
        key = house.grant(decode, key_of(request))
        house.output(prefill, token(key, len(request.output)))
        house.front.on_report(decode, retracted(key))
        house.check()
    assert not request.ended
    assert request.attempts == 6
    assert [t.index for t in request.take()] == [0, 1, 2, 3, 4]


def test_the_last_node_of_a_pool_gone(house: House) -> None:
    request = house.submit(ask())
    _, decode = parts(request)
    house.grant(decode)
    other = next(n for n in house.front.registry.nodes(Role.DECODE) if n is not decode)
    house.front.leave(other, "gone")
    house.front.leave(decode, "gone")
    house.advance(1.1, *house.front.registry.nodes())
    assert isinstance(request.error, Unavailable)
    assert request.error.reason == "NO_DECODE_NODE"
    assert request.error.metadata["phase"] == "reserved"
    assert "gone" in str(request.error)


def test_a_silent_node_is_gone_when_its_lease_ends(house: House) -> None:
    request = house.submit(ask())
    prefill, decode = parts(request)
    house.grant(decode)
    others = [n for n in house.front.registry.nodes() if n is not prefill]
    for _ in range(6):
        house.advance(1.0, *others)
    assert house.front.registry.get(prefill.node_id) is None
    assert isinstance(house.links[prefill].closed, Unavailable)
    assert parts(request)[0] is not prefill


def test_a_front_door_that_was_held_up_does_not_blame_the_nodes(house: House) -> None:
    house.advance(60.0)
    assert len(house.front.registry) == 4
    for _ in range(6):
        house.advance(1.0)
    assert len(house.front.registry) == 0


@pytest.mark.parametrize(
    ("phase", "seconds", "suspects"),
    [("reserved", 300, {"prefill"}), ("transferring", 60, {"prefill", "decode"}), ("decoding", 60, {"decode"})],
)
def test_a_phase_that_hangs_is_tried_elsewhere(house: House, phase: str, seconds: int, suspects: set[str]) -> None:
    request = house.submit(ask())
    before = parts(request)
    key = house.grant(before[1])
    if phase != "reserved":
        house.output(before[0], token(key, 0))
    if phase == "decoding":
        house.output(before[1], token(key, 1))
    nodes = house.front.registry.nodes()
    for _ in range(seconds - 1):
        house.advance(1.0, *nodes)
    assert key_of(request) == key
    house.advance(1.0, *nodes)
    assert key_of(request) != key
    changed = {str(old.role) for old, new in zip(before, parts(request), strict=True) if old is not new}
    assert changed >= suspects
    assert finish(house, request)[-1] == 3


def test_hanging_everywhere_is_a_deadline_that_names_the_phase() -> None:
    house = House(BootstrapConfig(max_attempts=2))
    prefill, decode = house.join(Role.PREFILL), house.join(Role.DECODE)
    request = house.submit(ask())
    for _ in range(2):
        house.grant(decode, key_of(request))
        for _ in range(300):
            house.advance(1.0, prefill, decode)
    assert isinstance(request.error, DeadlineExceeded)
    assert request.error.metadata["phase"] == "reserved"


def test_tokens_keep_a_long_answer_alive(house: House) -> None:
    request = house.submit(ask(max_new_tokens=50))
    prefill, decode = parts(request)
    key = house.grant(decode)
    nodes = house.front.registry.nodes()
    house.output(prefill, token(key, 0))
    for index in range(1, 10):
        for _ in range(10):
            house.advance(4.0, *nodes)
        house.output(decode, token(key, index))
    assert key_of(request) == key


def test_a_draining_node_gets_nothing_new_and_keeps_what_it_has(house: House) -> None:
    request = house.submit(ask())
    prefill, decode = parts(request)
    house.front.drain_node(prefill.node_id, 30.0)
    assert house.links[prefill].of(Drain) == [Drain(30.0)]
    for number in range(4):
        house.submit(ask(f"more-{number}"))
    assert len(house.submitted(prefill)) == 1
    key = house.grant(decode, key_of(request))
    house.output(prefill, token(key, 0, FinishReason.LENGTH))
    assert request.finish is FinishReason.LENGTH


def test_a_node_that_drains_on_its_own_says_so(house: House) -> None:
    decode = node(house, "decode-1")
    house.front.on_report(decode, Heartbeat(NodeStats(head_room=400, serving=True, draining=True)))
    for number in range(3):
        house.submit(ask(f"r{number}"))
    assert not house.reserved(decode)


def test_draining_a_node_nobody_knows(house: House) -> None:
    with pytest.raises(NotFound):
        house.front.drain_node("nobody", 1.0)


def test_a_new_incarnation_replaces_the_old_one(house: House) -> None:
    request = house.submit(ask())
    old, decode = parts(request)
    house.grant(decode)
    new = house.join(Role.PREFILL, old.node_id, incarnation="2")
    assert house.front.registry.get(old.node_id) is new
    closed = house.links[old].closed
    assert isinstance(closed, Refused)
    assert closed.reason == "NODE_REPLACED"
    kinds = [type(c).__name__ for c in house.links[decode].sent if type(c).__name__.startswith("Peer")]
    assert kinds[-2:] == ["PeerLeft", "PeerJoined"]
    house.front.leave(old, "its session ended")  # the old stream ends after the new one began
    assert house.front.registry.get(old.node_id) is new
    with pytest.raises(Refused) as refused:  # it dials again without having heard why it was dropped
        house.join(Role.PREFILL, old.node_id, incarnation=old.identity.incarnation)
    assert refused.value.reason == "NODE_REPLACED"
    assert house.front.registry.get(old.node_id) is new
    assert finish(house, request) == [0, 1, 2, 3]


def test_nobody_waits_for_a_writer_that_left(house: House) -> None:
    request = house.submit(ask())
    prefill, decode = parts(request)
    key = house.grant(decode)
    house.front.stop(request, FinishReason.ABORT, "enough")
    house.front.leave(prefill, "gone")
    house.front.on_report(prefill, RoomQuiesced(key))
    assert not house.links[decode].of(WriterQuiesced)


# ---- what is remembered ----


def test_why_an_attempt_ended_and_where_is_remembered(house: House) -> None:
    request = house.submit(ask("mine"))
    house.submit(ask("another"))
    prefill, decode = parts(request)
    key = house.grant(decode, key_of(request))
    house.output(prefill, token(key, 0))
    house.clock.advance(2.0)
    house.front.leave(decode, "its session ended")
    first, second = house.front.attempts.history.explain("mine", [attempt for attempt in (request.attempt,) if attempt])
    assert (first.key, first.seconds, first.phase) == (key, 2.0, "transferring")
    assert (first.prefill_node, first.decode_node) == (prefill.node_id, decode.node_id)
    assert first.outcome == f"decode node {decode.node_id} was lost while transferring: its session ended"
    assert (second.key, second.first_index, second.outcome) == (key_of(request), 1, "")
    finish(house, request)
    assert [one.outcome for one in house.front.attempts.history.explain("mine", [])][1:] == ["finished"]


def test_of_attempts_that_ended_the_last_ones_are_remembered(house: House) -> None:
    for number in range(ENDED_KEPT + 1):
        house.front.stop(house.submit(ask(f"r{number}")), FinishReason.ABORT, "the client has gone")
    history = house.front.attempts.history
    assert [len(history.explain(f"r{number}", [])) for number in (0, 1, ENDED_KEPT)] == [0, 1, 1]
    assert history.explain("r1", [])[0].outcome == "the client has gone"
