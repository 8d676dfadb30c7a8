"""Pages that a writer may still reach: how its last word gets to the decode node, also over broken sessions."""

from __future__ import annotations

import pytest

from bootstrap.fences import REMIND_S
from bootstrap.registry import Node
from engine.core.messages import Abort, PeerJoined, RoomFenced, RoomQuiesced, WriterQuiesced
from engine.core.sampling import FinishReason
from engine.core.types import NodeIdentity, Role, RoomKey
from tests.helpers.front_door import House, ask


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def prefill(house: House) -> Node:
    return house.join(Role.PREFILL)


@pytest.fixture
def decode(house: House) -> Node:
    return house.join(Role.DECODE)


def test_quiesced_is_relayed_while_live_and_long_after(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.grant(decode)
    house.front.stop(request, FinishReason.ABORT, "enough")
    house.advance(1.0, prefill, decode)
    assert not house.links[decode].of(WriterQuiesced)
    house.front.on_report(prefill, RoomQuiesced(key))
    assert house.links[decode].of(WriterQuiesced) == [WriterQuiesced(key)]
    house.front.on_report(prefill, RoomQuiesced(key))
    assert len(house.links[decode].of(WriterQuiesced)) == 1


def test_a_writer_that_was_done_already_is_not_waited_for(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.grant(decode)
    house.front.on_report(prefill, RoomQuiesced(key))
    house.front.stop(request, FinishReason.ABORT, "enough")
    assert house.links[decode].of(WriterQuiesced) == [WriterQuiesced(key)]


def test_a_writer_that_never_learned_the_address_is_done(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.reserved(decode)[0].reservation.key
    house.front.stop(request, FinishReason.ABORT, "enough")
    assert house.links[decode].sent[-2:] == [Abort(key, "enough"), WriterQuiesced(key)]


def test_what_is_too_much_to_be_kept_is_asked_for_again_by_the_decode_node(
    house: House, prefill: Node, decode: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.fences.MAX_WAITS", 1)
    first, second = RoomKey(1, 0), RoomKey(2, 0)
    for key in (first, second):
        house.report(decode, RoomFenced(key, prefill.identity))
        house.report(prefill, RoomQuiesced(second))
    assert not house.links[decode].of(WriterQuiesced), "what is not kept is not passed on"
    house.report(prefill, RoomQuiesced(first))
    house.report(decode, RoomFenced(second, prefill.identity))
    house.report(prefill, RoomQuiesced(second))
    assert house.links[decode].of(WriterQuiesced) == [WriterQuiesced(first), WriterQuiesced(second)]
    assert [command.key for command in house.links[prefill].of(Abort)] == [first, second, second]


@pytest.mark.parametrize("granted", [True, False])
def test_a_writer_that_does_not_answer_is_asked_again(house: House, prefill: Node, decode: Node, granted: bool) -> None:
    """One of the two messages was lost. It stops with the answer, which the decode node hears of if it has to."""
    request = house.submit(ask())
    key = house.grant(decode) if granted else house.reserved(decode)[0].reservation.key
    house.front.stop(request, FinishReason.ABORT, "enough")
    for times in (1, 2, 3):
        assert [abort.key for abort in house.links[prefill].of(Abort)] == [key] * times
        house.advance(REMIND_S, prefill, decode)
    house.report(prefill, RoomQuiesced(key))
    house.advance(2 * REMIND_S, prefill, decode)
    assert len(house.links[prefill].of(Abort)) == 4
    assert house.links[decode].of(WriterQuiesced) == [WriterQuiesced(key)]


# ---- over broken sessions ----


def test_a_writer_that_comes_back_is_asked_again(house: House, prefill: Node, decode: Node) -> None:
    house.submit(ask())
    key = house.grant(decode)
    house.front.leave(prefill, "its session ended")
    again = house.join(Role.PREFILL)
    assert isinstance(house.links[decode].sent[-2], PeerJoined), "upon which the decode node names what it has fenced"
    house.report(decode, RoomFenced(key, again.identity))
    assert [abort.key for abort in house.links[again].of(Abort)] == [key]
    assert not house.links[decode].of(WriterQuiesced)
    house.report(again, RoomQuiesced(key))
    assert house.links[decode].of(WriterQuiesced) == [WriterQuiesced(key)]


def test_a_decode_node_that_comes_back_is_answered(house: House, prefill: Node, decode: Node) -> None:
    house.submit(ask())
    key = house.grant(decode)
    house.front.leave(decode, "its session ended")
    house.report(prefill, RoomQuiesced(key))  # goes nowhere
    again = house.join(Role.DECODE)
    house.report(again, RoomFenced(key, prefill.identity))
    assert [abort.key for abort in house.links[prefill].of(Abort)] == [key, key]
    house.report(prefill, RoomQuiesced(key))
    assert house.links[again].of(WriterQuiesced) == [WriterQuiesced(key)]


def test_a_room_of_another_front_door(house: House, prefill: Node, decode: Node) -> None:
    key = RoomKey.new(0)
    house.report(decode, RoomFenced(key, prefill.identity))
    house.report(prefill, RoomQuiesced(key))
    assert house.links[decode].of(WriterQuiesced) == [WriterQuiesced(key)]


def test_a_writer_that_is_not_here_is_not_taken_for_its_successor(house: House, prefill: Node, decode: Node) -> None:
    house.report(decode, RoomFenced(RoomKey.new(0), NodeIdentity(prefill.node_id, "0")))
    house.report(decode, RoomFenced(RoomKey.new(0), NodeIdentity("nobody", "1")))
    assert not house.links[prefill].of(Abort)


def test_a_live_room_is_not_aborted_for_being_called_fenced(house: House, prefill: Node, decode: Node) -> None:
    request = house.submit(ask())
    key = house.grant(decode)
    house.report(decode, RoomFenced(key, prefill.identity))
    assert not house.links[prefill].of(Abort)
    house.front.stop(request, FinishReason.ABORT, "enough")
    assert house.links[prefill].of(Abort)
