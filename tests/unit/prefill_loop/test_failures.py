"""What a prefill engine cannot do, or fails at: the rooms that it was about end, and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from engine.core.messages import Granted, Reserve, RoomFailed, StepOutput
from engine.core.sampling import StoppingParams
from engine.core.types import NodeIdentity, PrefillTask, Reservation, RoomKey
from engine.device.batch import ForwardBatch
from tests.helpers.engines import PAGE
from tests.helpers.prefill_rooms import (
    CHUNK,
    GREEDY,
    PAGES,
    Pages,
    Prefill,
    answer,
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
from tests.helpers.transfer_node import LocalNode


def test_what_can_never_run_is_refused_with_the_reason(p: Prefill, link: RecordingLink) -> None:
    most = PAGES * PAGE - PAGE - 2
    fits, too_long = submit(prompt(most)), submit(prompt(most + 1))
    p.tell(link, fits, too_long, fits)  # told twice, it is taken in once
    (long,) = link.of(RoomFailed)
    assert (long.key, long.phase, long.retriable, long.code) == (key_of(too_long), "queued", False, "INVALID_ARGUMENT")
    assert long.reason == f"token_ids is {most + 1}; allowed: 1 to {most} tokens, the room on this node"
    assert p.stats.ungranted == 1


def test_a_submit_that_cannot_be_handled_is_answered(
    p: Prefill, link: RecordingLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: PrefillTask) -> None:
        raise ZeroDivisionError("a secret")

    asked, other = submit(prompt(5)), submit(prompt(5))
    with monkeypatch.context() as patch:
        patch.setattr(p.engine._scheduler, "submit", fail)
        p.tell(link, asked)
    p.tell(link, other)
    (record,) = caplog.records
    incident = vars(record)["incident"]
    assert link.reports == [
        RoomFailed(key_of(asked), "queued", f"internal error, incident {incident}", retriable=False)
    ]
    assert p.stats.ungranted == 1


def failing(p: Prefill, monkeypatch: pytest.MonkeyPatch, on: Callable[[int], bool]) -> None:
    """Forwards raise when `on` their number, from 1 on."""
    forward, count = p.device.runner.forward, iter(range(1, 1000))

    def compute(batch: ForwardBatch) -> Tensor:
        if on(next(count)):
            raise RuntimeError("a secret")
        return forward(batch)

    monkeypatch.setattr(p.device.runner, "forward", compute)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_forward_that_raises_fails_its_rooms_and_no_others(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """In the first pass is `short`, and in all three `long`; `late` comes afterwards, `never` is not granted."""
    long, short, late, never = (submit(prompt(n, n)) for n in (20, 3, 6, 5))
    failing(p, monkeypatch, lambda call: call == number)
    p.tell(link, short, long, never, grants.grant(short), grants.grant(long))
    while p.turn():
        pass
    (incident,) = p.incidents
    victims = [key_of(short), key_of(long)] if number == 1 else [key_of(long)]
    assert failed(link) == [(key, "prefilling", False) for key in victims]
    assert {report.reason for report in link.of(RoomFailed)} == {f"internal error, incident {incident}"}
    assert {report.code for report in link.of(RoomFailed)} == {"INTERNAL"}
    assert p.failures() == len(victims)
    p.tell(link, late, grants.grant(late))
    p.until(lambda: len(quiesced(link)) == 3, "all but one are over")
    arrived(d, key_of(late))
    if number > 1:
        arrived(d, key_of(short))
    assert bool(complete(d, key_of(short))) == (number > 1)
    assert complete(d, key_of(long)) == []
    assert (p.stats.ungranted, p.stats.transferring, p.stats.pages_held) == (1, 0, 0)


def test_what_failed_can_be_asked_for_again(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks before the one that failed are cached, and right; what the failed one wrote is not."""
    failing(p, monkeypatch, lambda call: call == 2)
    for _ in range(2):
        asked = submit(prompt(20))
        p.tell(link, asked, grants.grant(asked))
        rest(p)
    (token,) = link.tokens(key_of(asked))
    assert token.token_id == answer(prompt(20))
    assert p.stats.cached_tokens_total == CHUNK


def test_a_room_that_cannot_be_opened_fails_its_pass(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = submit(prompt(3)), submit(prompt(4))
    p.tell(link, one, other, grants.grant(one), grants.grant(other))
    opened = p.engine._sender.open

    def fail(room: RoomKey, *rest: Any) -> None:
        assert room != key_of(other)
        opened(room, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(p.engine._sender, "open", fail)
        p.turn()
    assert {key for key, _, _ in failed(link)} == {key_of(one), key_of(other)}
    rest(p)
    assert p.stats.pages_free == PAGES
    assert len(quiesced(link)) == 2


class BadLink(RecordingLink):
    """Takes no tokens."""

    def publish(self, output: StepOutput) -> None:
        if output.tokens:
            raise RuntimeError("no")
        super().publish(output)


def test_an_answer_that_cannot_be_sent_fails_its_pass(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages
) -> None:
    """The forward was good, so what it computed stays cached; the pages of its rooms come back all the same."""
    bad = BadLink()
    one, other = submit(prompt(9)), submit(prompt(3))
    p.tell(bad, one, grants.grant(one))
    p.tell(link, other, grants.grant(other))
    while p.turn():
        pass
    rest(p)
    assert [key for key, _, _ in failed(bad)] == quiesced(bad) == [key_of(one)]
    assert p.stats.pages_held == 0
    assert quiesced(link) == [key_of(other)]


def test_without_a_lease_nothing_is_written(p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages) -> None:
    asked = submit(prompt(9))
    link.lease = False
    p.tell(link, asked, grants.grant(asked))
    rest(p)
    assert failed(link) == [(key_of(asked), "transferring", True)]
    assert link.of(RoomFailed)[0].reason == "this node's lease ran out"
    assert quiesced(link) == [key_of(asked)]
    assert not d.pool.pages.any()
    link.lease = True
    again = submit(prompt(9))
    p.tell(link, again, grants.grant(again))
    rest(p)
    arrived(d, key_of(again))


def test_a_peer_nobody_named_costs_its_rooms_only(p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages) -> None:
    stranger = NodeIdentity.new("d")
    lost, good = submit(prompt(6)), submit(prompt(6))
    p.tell(link, lost, good, Granted(key_of(lost), stranger, (0, 1)), grants.grant(good))
    rest(p)
    assert failed(link) == [(key_of(lost), "transferring", True)]
    assert link.of(RoomFailed)[0].reason == f"no transfer peer {stranger}"
    assert sorted(quiesced(link), key=str) == sorted([key_of(lost), key_of(good)], key=str)
    arrived(d, key_of(good))


def test_commands_for_another_kind_of_node_are_ignored(
    p: Prefill, link: RecordingLink, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = StoppingParams(1)
    p.tell(link, Reserve(Reservation("r", RoomKey.new(0), 1, 0, GREEDY, stopping, NodeIdentity("p", "1"))))
    assert [record.message for record in caplog.records] == ["not for a prefill node"]
    assert link.reports == []
