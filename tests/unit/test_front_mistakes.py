"""When something raises for one request, that request ends INTERNAL with an incident id; nothing else notices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from bootstrap.config import BootstrapConfig
from bootstrap.registry import Node
from bootstrap.requests import Attempt, LiveRequest
from engine.core.errors import Unavailable
from engine.core.messages import Abort, AdmitReport, Command, Grant, Reserve, RoomFailed, RoomQuiesced
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey
from tests.helpers.front_door import House, ask, token


class Boom(Exception):
    pass


class Scene:
    """One prefill node, two decode nodes, a request that will be unlucky and one that must not notice."""

    def __init__(self) -> None:
        self.house = House(BootstrapConfig(max_attempts=3))
        self.prefill = self.house.join(Role.PREFILL)
        self.decodes = [self.house.join(Role.DECODE, f"decode-{number}") for number in (1, 2)]
        self.bad = self.house.submit(ask("bad"))
        self.good = self.house.submit(ask("good"))

    def decode_of(self, request: LiveRequest) -> Node:
        assert request.attempt is not None
        assert request.attempt.decode is not None
        return request.attempt.decode

    def key(self, request: LiveRequest) -> RoomKey:
        assert request.attempt is not None
        return request.attempt.key

    def break_(self, owner: object, method: str, only: LiveRequest | None = None) -> None:
        """From now on this raises when it has to do with the unlucky request."""
        real = getattr(owner, method)
        unlucky = only or self.bad

        def broken(*args: Any, **options: Any) -> Any:
            for one in args:
                request = one.request if isinstance(one, Attempt) else one
                if request is unlucky or (isinstance(one, RoomKey) and one == self.key(unlucky)):
                    raise Boom
            return real(*args, **options)

        setattr(owner, method, broken)

    def grant(self, request: LiveRequest) -> None:
        self.house.report(self.decode_of(request), Grant(self.key(request), (1,), 300))

    def finish_good(self) -> None:
        good, house = self.good, self.house
        attempt = good.attempt
        assert attempt is not None
        if attempt.state.phase == "queued":
            self.grant(good)
        first = len(good.output)
        house.output(self.prefill, *[token(attempt.key, i) for i in range(first, min(first + 1, 3))])
        decode = self.decode_of(good)
        house.output(decode, *[token(attempt.key, i) for i in range(first + 1, 3)])
        house.output(decode, token(attempt.key, 3, FinishReason.LENGTH))
        assert good.finish is FinishReason.LENGTH
        assert [one.index for one in good.take()] == [0, 1, 2, 3]


def grant_raises(scene: Scene) -> None:
    scene.break_(scene.house.front.attempts, "granted")
    scene.grant(scene.bad)


def quiesced_raises(scene: Scene) -> None:
    scene.grant(scene.bad)
    scene.break_(scene.house.front.attempts, "quiesced")
    scene.house.report(scene.prefill, RoomQuiesced(scene.key(scene.bad)))


def room_failed_raises(scene: Scene) -> None:
    scene.break_(scene.house.front._outcomes, "room_failed")
    scene.house.report(scene.prefill, RoomFailed(scene.key(scene.bad), "transferring", "broken"))


def a_retry_raises(scene: Scene) -> None:
    scene.break_(scene.house.front.attempts, "_submit")
    scene.house.report(scene.prefill, RoomFailed(scene.key(scene.bad), "transferring", "broken"))


def a_token_raises(scene: Scene) -> None:
    """In a step that holds the other request's tokens, too."""
    for request in (scene.bad, scene.good):
        scene.grant(request)
    scene.break_(scene.house.front, "_token")
    scene.house.output(scene.prefill, token(scene.key(scene.bad), 0), token(scene.key(scene.good), 0))
    assert len(scene.good.output) == 1
    decode = scene.decode_of(scene.good)
    scene.house.output(decode, token(scene.key(scene.good), 1), token(scene.key(scene.good), 2))
    scene.house.output(decode, token(scene.key(scene.good), 3, FinishReason.LENGTH))


def a_report_of_a_step_raises(scene: Scene) -> None:
    scene.grant(scene.bad)
    scene.break_(scene.house.front.attempts, "admitted")
    scene.house.output(scene.prefill, admitted=(AdmitReport(scene.key(scene.bad), 0),))


def tick_raises(scene: Scene) -> None:
    scene.break_(scene.house.front._outcomes, "_tick")
    scene.house.front.tick()


def the_queue_raises(scene: Scene) -> None:
    """Its decode node is late, and another has room."""
    scene.grant(scene.good)
    scene.break_(scene.house.front.attempts, "_restart")
    scene.house.advance(scene.house.config.grant_timeout, *scene.house.front.registry.nodes())


def the_loss_of_its_node_raises(scene: Scene) -> None:
    scene.break_(scene.house.front.attempts, "start")
    scene.house.front.leave(scene.decode_of(scene.bad), "gone")


def its_end_raises(scene: Scene) -> None:
    """Even then nothing of it is left in the books."""
    decode = scene.decode_of(scene.bad)
    link = scene.house.links[decode]
    send = link.send

    def broken(command: Command) -> None:
        if isinstance(command, Abort):
            raise Boom
        send(command)

    link.send = broken  # type: ignore[method-assign]
    scene.break_(scene.house.front._outcomes, "_tick")
    scene.house.front.tick()


@pytest.mark.parametrize(
    "happens",
    [
        grant_raises,
        quiesced_raises,
        room_failed_raises,
        a_retry_raises,
        a_token_raises,
        a_report_of_a_step_raises,
        tick_raises,
        the_queue_raises,
        the_loss_of_its_node_raises,
        its_end_raises,
    ],
)
def test_what_raises_ends_one_request(happens: Callable[[Scene], None], caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    with caplog.at_level(logging.ERROR):
        happens(scene)
    scene.house.check()
    assert scene.bad.error is not None
    assert scene.bad.error.code == "INTERNAL"
    incident = scene.bad.error.metadata["incident"]
    assert incident in str(scene.bad.error)
    (record,) = [one for one in caplog.records if one.message == "request broke"]
    assert (record.incident, record.request_id) == (incident, "bad")  # type: ignore[attr-defined]
    assert record.exc_info is not None
    assert record.exc_info[0] is Boom
    assert set(scene.house.front.requests) <= {(None, "good")}
    if not scene.good.ended:
        scene.finish_good()
    assert scene.good.finish is FinishReason.LENGTH
    another = scene.house.submit(ask("another"))
    assert isinstance(scene.house.links[scene.decode_of(another)].sent[-1], Reserve)


def test_an_arrival_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    submit = scene.house.front.attempts._submit

    def broken(attempt: Attempt) -> bool:
        if attempt.request.ask.request_id == "new":
            raise Boom
        return submit(attempt)

    scene.house.front.attempts._submit = broken  # type: ignore[method-assign]
    new = scene.house.submit(ask("new"))
    assert new.error is not None
    assert new.error.code == "INTERNAL"
    assert (None, "new") not in scene.house.front.requests
    scene.finish_good()


def test_one_that_waits_for_a_prefill_node_and_raises_then() -> None:
    house = House()
    house.join(Role.DECODE)
    waiting = [house.submit(ask(name)) for name in ("first", "bad", "last")]
    submit = house.front.attempts._submit

    def broken(attempt: Attempt) -> bool:
        if attempt.request.ask.request_id == "bad":
            raise Boom
        return submit(attempt)

    house.front.attempts._submit = broken  # type: ignore[method-assign]
    prefill = house.join(Role.PREFILL)
    assert [one.task.request_id for one in house.submitted(prefill)] == ["first", "last"]
    assert [one.ended for one in waiting] == [False, True, False]


def test_at_shutdown_every_stream_ends_though_one_raises() -> None:
    scene = Scene()
    scene.break_(scene.house.front.attempts, "close")
    scene.house.front.fail_all(lambda: Unavailable("shut down", reason="DRAINING"))
    assert not scene.house.front.requests
    assert scene.good.error is not None
    assert scene.bad.error is not None
