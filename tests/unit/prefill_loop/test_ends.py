"""Rooms of a prefill engine end early, in any state: their pages come back once their writes are over."""

from __future__ import annotations

import pytest

from engine.core.messages import Abort, Granted, LinkLost, LinkUp, PeerJoined, PeerLeft, RoomFailed, Submit
from engine.core.types import NodeIdentity, PeerInfo, Role, RoomKey
from tests.helpers.prefill_rooms import (
    CHUNK,
    Gate,
    Pages,
    Prefill,
    arrived,
    complete,
    failed,
    key_of,
    prompt,
    quiesced,
    rest,
    submit,
)
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import LocalNode, eventually

STATES = ("ungranted", "waiting", "running", "transferring")


def at(p: Prefill, link: RecordingLink, grants: Pages, state: str) -> Submit:
    """A room in this state, beside one that must not notice."""
    asked = submit(prompt(2 * CHUNK + 2, 99))
    p.tell(link, asked)
    if state != "ungranted":
        p.tell(link, grants.grant(asked))
    if state == "running":
        p.turn()
    if state == "transferring":
        while p.turn():
            pass
    assert getattr(p.stats, state) >= 1
    return asked


@pytest.mark.parametrize("ending", ["abort", "link lost", "peer left"])
@pytest.mark.parametrize("state", STATES)
def test_a_room_ends_in_any_state(
    p: Prefill,
    d: LocalNode,
    link: RecordingLink,
    grants: Pages,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    ending: str,
) -> None:
    gate = Gate(p, monkeypatch)
    mine, other = RecordingLink(), submit(prompt(5))
    p.tell(link, other)
    asked = at(p, mine, grants, state)
    key = key_of(asked)
    said = len(mine.outputs)
    if ending == "abort":
        p.tell(mine, Abort(key, "x"))
    elif ending == "link lost":
        p.tell(mine, LinkLost())
    else:
        p.tell(link, PeerLeft(d.identity))
    ended = not (ending == "peer left" and state == "ungranted")  # that one may still be granted elsewhere
    while p.turn():
        pass
    assert len(mine.outputs) == said, "nothing more is computed"
    if ending == "peer left" and ended:
        assert failed(mine) == [(key, "transferring", True)]
        assert mine.of(RoomFailed)[0].reason == "decode node d left"
    else:
        assert failed(mine) == []
    opened = state in ("running", "transferring")
    assert quiesced(mine) == ([key] if ended and not opened else []), "not while a write may be in progress"
    assert p.stats.pages_held == 0 or opened
    gate.open = True
    p.until(lambda: quiesced(mine) == [key] or not ended, "it is quiet")
    assert (p.stats.ungranted, p.stats.pages_held, p.stats.transferring) == (1 if ended else 2, 0, 0)
    if ending != "peer left":
        p.tell(link, grants.grant(other))
        p.until(lambda: bool(complete(d, key_of(other))), "others go on")
    if ended:
        p.tell(mine, Granted(key, d.identity, (0, 1, 2, 3, 4)))
    assert (p.turn(), p.stats.waiting) == (False, 0), "what has ended does not come back"
    assert quiesced(mine) == ([key] if ended else [])


@pytest.mark.parametrize("state", STATES)
def test_each_abort_is_answered_once_it_is_quiet(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Also when the bootstrap that asked first is gone, and another asks again over its own link."""
    gate = Gate(p, monkeypatch)
    first, second = RecordingLink(), RecordingLink()
    key = key_of(at(p, first, grants, state))
    p.tell(first, LinkLost())
    p.tell(second, LinkUp(), Abort(key, "asked again"))
    p.turn()
    assert quiesced(second) == ([] if state in ("running", "transferring") else [key])
    gate.open = True
    p.until(lambda: quiesced(second) == [key], "it is answered where it was asked")
    p.tell(second, Abort(key, "and again"), Abort(RoomKey.new(5), "never heard of"))
    assert len(quiesced(second)) == 3, "what is not here is quiet"


def test_a_room_ends_for_one_reason(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(p, monkeypatch)
    key = key_of(at(p, link, grants, "transferring"))
    p.tell(link, Abort(key, "x"), PeerLeft(d.identity), Abort(key, "again"))
    gate.open = True
    rest(p)
    assert (failed(link), quiesced(link)) == ([], [key])


def test_an_aborted_room_may_still_be_written_whole(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages
) -> None:
    """The last write had ended before the sender heard of the abort: quiet is quiet."""
    asked = submit(prompt(5))
    p.tell(link, asked, grants.grant(asked))
    p.turn()
    eventually(lambda: p.engine._sender.stats().rooms == 0)
    p.tell(link, Abort(key_of(asked), "too late"))
    p.until(lambda: p.stats.idle, "it is quiet")
    arrived(d, key_of(asked))
    assert set(quiesced(link)) == {key_of(asked)}


def test_a_peer_that_left_is_written_to_no_more(p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages) -> None:
    p.tell(link, PeerLeft(d.identity), PeerLeft(d.identity), PeerLeft(NodeIdentity.new("other")))
    asked = submit(prompt(5))
    p.tell(link, asked, grants.grant(asked))
    rest(p)
    assert failed(link) == [(key_of(asked), "transferring", True)]
    p.tell(link, PeerJoined(PeerInfo(d.identity, Role.DECODE, d.agent.memory, d.agent.metadata)))
    again = submit(prompt(5))
    p.tell(link, again, grants.grant(again))
    rest(p)
    arrived(d, key_of(again))
