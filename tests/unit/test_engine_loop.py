"""The engine thread with nothing in it: what it survives, what ends it, and what others may see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from engine.core import loop
from engine.core.clock import ManualClock
from engine.core.loop import FATAL_FAILURES
from engine.core.messages import (
    Abort,
    Command,
    Inspect,
    Inspection,
    LinkLost,
    LinkUp,
    NodeStats,
    PeerJoined,
    PeerLeft,
)
from engine.core.metrics import Metrics
from engine.core.types import NodeIdentity, PeerInfo, PoolMemory, Role, RoomKey
from tests.helpers.tiny_engine import RecordingLink, TinyEngine
from tests.helpers.transfer_node import eventually
from transfer.errors import PeerRefused

LINK = RecordingLink()


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_WAIT_S", 0.01)
    monkeypatch.setattr(loop, "CHECK_AFTER_S", 0.05)


@pytest.fixture
def engine() -> Iterator[TinyEngine]:
    one = TinyEngine()
    yield one
    one.on_step = lambda: False
    one.stop()


def started(engine: TinyEngine) -> TinyEngine:
    engine.start()
    eventually(lambda: engine.turns > 0)
    return engine


def turn(engine: TinyEngine, count: int = 2) -> None:
    """Wait for some passes that begin after this call."""
    turns = engine.turns
    engine.post(None, "turn")
    eventually(lambda: engine.turns >= turns + count)


class Fails:
    """Raises while `wanted` says so; counts its calls."""

    def __init__(self, wanted: Callable[[int], bool]):
        self.calls = 0
        self._wanted = wanted

    def __call__(self) -> bool:
        self.calls += 1
        if self._wanted(self.calls):
            raise ValueError(f"call {self.calls}")
        return False


# ---- handling ----


def test_items_are_handled_in_order_with_their_link(engine: TinyEngine) -> None:
    other = RecordingLink()
    items: list[tuple[RecordingLink | None, Command | LinkUp | LinkLost | str]] = [
        (LINK, LinkUp()),
        (other, LinkUp()),
        *((LINK, Abort(RoomKey(i, 0), "x")) for i in range(50)),
        (None, "an event"),
        (LINK, LinkLost()),
    ]
    for link, item in items:
        engine.post(link, item)  # before it runs: kept until it does
    started(engine)
    eventually(lambda: len(engine.taken) == len(items))
    assert list(zip(engine.came_over, engine.taken, strict=True)) == items
    assert engine.links == {other}


def test_a_handler_that_raises_costs_its_item_only(engine: TinyEngine, caplog: pytest.LogCaptureFixture) -> None:
    def handle(item: Command | str) -> None:
        if item == "bad":
            raise KeyError(item)

    engine.on_handle = handle
    started(engine)
    for item in ("good", *["bad"] * 5, "better"):
        engine.post(None, item)
    eventually(lambda: engine.taken[-1:] == ["better"])
    turn(engine)
    assert engine.alive
    assert engine.failure is None
    assert engine.incidents == []
    assert [record.message for record in caplog.records] == ["handling failed"] * 5
    logged = [vars(record)["incident"] for record in caplog.records]
    assert engine.unhandled == [("bad", incident) for incident in logged], "so that it can end the room"
    assert len(set(logged)) == 5
    assert all(record.exc_info for record in caplog.records)


def test_what_input_can_cause_is_logged_in_one_line(engine: TinyEngine, caplog: pytest.LogCaptureFixture) -> None:
    refused = PeerRefused(NodeIdentity("d", "1"), "page_bytes is 64, here 128")

    def handle(item: Command | str) -> None:
        raise refused

    engine.on_handle = handle
    started(engine)
    engine.post(None, "joined")
    eventually(lambda: len(engine.unhandled) == 1)
    (record,) = caplog.records
    assert (record.levelname, record.exc_info, vars(record)["error"]) == ("WARNING", None, str(refused))
    assert engine.unhandled == [("joined", vars(record)["incident"])]


# ---- peers, of whom several bootstraps may speak ----

OTHER = RecordingLink()
PEER = PeerInfo(NodeIdentity("d", "1"), Role.DECODE, PoolMemory(4096, 64, 8), b"agent")
JOINED, LEFT = PeerJoined(PEER), PeerLeft(PEER.identity)


@pytest.mark.parametrize(
    ("said", "handled"),
    [
        ([(LINK, JOINED), (LINK, LEFT)], [JOINED, LEFT]),
        ([(LINK, JOINED), (OTHER, JOINED), (LINK, LEFT)], [JOINED, JOINED]),
        ([(LINK, JOINED), (OTHER, JOINED), (LINK, LEFT), (OTHER, LEFT)], [JOINED, JOINED, LEFT]),
        ([(LINK, JOINED), (LINK, JOINED), (LINK, LEFT)], [JOINED, JOINED, LEFT]),
        ([(LINK, JOINED), (LINK, LEFT), (LINK, LEFT)], [JOINED, LEFT]),
        ([(LINK, LEFT)], []),
        ([(LINK, JOINED), (OTHER, LEFT)], [JOINED]),
        ([(LINK, JOINED), (LINK, LinkLost())], [JOINED, LinkLost()]),
        ([(LINK, JOINED), (OTHER, JOINED), (LINK, LinkLost()), (OTHER, LEFT)], [JOINED, JOINED, LinkLost(), LEFT]),
        ([(LINK, JOINED), (LINK, LinkLost()), (OTHER, JOINED), (OTHER, LEFT)], [JOINED, LinkLost(), JOINED, LEFT]),
    ],
)
def test_a_peer_has_left_when_nobody_says_any_more_that_it_is_there(
    engine: TinyEngine, said: list[tuple[RecordingLink, Command]], handled: list[Command]
) -> None:
    for link, item in said:
        engine.post(link, item)
    started(engine)
    turn(engine)
    assert engine.taken[:-1] == handled


# ---- passes ----


def test_a_pass_with_work_left_is_followed_by_another_at_once(engine: TinyEngine) -> None:
    passes = iter([True] * 200)
    engine.on_step = lambda: next(passes, False)
    started(engine)
    eventually(lambda: engine.turns > 200)


def test_a_pass_that_raises_ends_its_rooms_once(engine: TinyEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.on_step = Fails(lambda call: call == 1)
    started(engine)
    turn(engine)
    assert engine.failure is None
    (incident,) = engine.incidents
    (record,) = caplog.records
    assert vars(record)["incident"] == incident
    assert record.exc_info is not None


def test_failures_must_be_in_a_row_to_end_it(engine: TinyEngine) -> None:
    engine.on_step = Fails(lambda call: call % FATAL_FAILURES != 0 and call < 31)
    started(engine)
    eventually(lambda: len(engine.incidents) == 20)
    turn(engine)
    assert engine.failure is None


def test_three_failures_in_a_row_end_it(engine: TinyEngine) -> None:
    engine.on_step = fails = Fails(lambda call: True)
    engine.start()
    eventually(lambda: not engine.alive)
    assert fails.calls == FATAL_FAILURES == 3
    assert len(engine.incidents) == len(set(engine.incidents)) == 2, "the third has nobody left to tell"
    assert isinstance(engine.failure, ValueError)
    assert not engine.turning
    engine.stop()


def test_a_broken_repair_ends_it(engine: TinyEngine) -> None:
    def fail(incident: str) -> None:
        raise RuntimeError("cannot even end them")

    engine.on_step = Fails(lambda call: True)
    engine.step_failed = fail  # type: ignore[method-assign]
    engine.start()
    eventually(lambda: not engine.alive)
    assert isinstance(engine.failure, RuntimeError)


def test_a_canary_that_fails_never_serves(engine: TinyEngine) -> None:
    engine.on_warm_up = Fails(lambda call: True)
    engine.start()
    eventually(lambda: engine.failure is not None)
    assert not engine.ready
    assert not engine.stats().serving
    assert not engine.turning


# ---- what others see ----


def test_it_serves_once_the_canary_has_passed(engine: TinyEngine) -> None:
    go_on = threading.Event()
    engine.on_warm_up = lambda: go_on.wait(10)
    engine.start()
    assert not engine.stats().serving
    assert not engine.turning
    go_on.set()
    eventually(lambda: engine.stats().serving)
    assert engine.turning


def test_counts_are_those_of_the_last_pass(engine: TinyEngine) -> None:
    started(engine)
    engine.holds = NodeStats(pages_total=8, pages_free=3, pages_held=5, running=2)
    turn(engine)
    assert engine.stats() == replace(engine.holds, serving=True)
    engine.begin_drain()
    assert engine.stats() == replace(engine.holds, serving=True, draining=True), "at once, whatever the thread does"
    turn(engine)
    assert engine.stats().draining


def test_a_pass_that_takes_too_long_is_seen_from_outside() -> None:
    clock, go_on = ManualClock(100), threading.Event()
    engine = TinyEngine(clock, stall_timeout_s=5)
    started(engine)
    assert engine.turning
    entered = threading.Event()

    def hang() -> bool:
        entered.set()
        go_on.wait(10)
        return False

    engine.on_step = hang
    engine.post(None, "wake")
    assert entered.wait(10)
    clock.advance(4.9)
    assert engine.turning
    clock.advance(0.1)
    assert not engine.turning
    assert not engine.stats().serving
    go_on.set()
    eventually(lambda: engine.turning)
    assert engine.stats().serving
    engine.stop()
    assert not engine.turning


# ---- integrity ----


def test_books_are_checked_once_each_time_it_comes_to_rest(engine: TinyEngine) -> None:
    started(engine)
    turn(engine, 4)
    eventually(lambda: engine.checks == 1)
    turns = engine.turns
    eventually(lambda: engine.turns >= turns + 3)  # passes without any work
    assert engine.checks == 1
    passes = iter([True] * 50)
    engine.on_step = lambda: next(passes, False)
    engine.post(None, "work")
    eventually(lambda: engine.checks == 2)
    assert next(passes, None) is None, "not while there was work"
    assert engine.integrity_count() == 0


@pytest.mark.parametrize("problem", [AssertionError("3 pages are lost"), AssertionError(), KeyError("a page")])
def test_wrong_books_are_counted_and_never_end_it(
    engine: TinyEngine, problem: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def check() -> None:
        raise problem

    started(engine)
    engine.on_check = check
    engine.post(None, "something")
    eventually(lambda: engine.integrity_count() == 1)
    turn(engine)
    assert engine.failure is None
    assert "integrity check failed" in [record.message for record in caplog.records]


def test_inspection(engine: TinyEngine) -> None:
    link, stranger = RecordingLink(), RecordingLink()
    engine.post(link, LinkUp())
    engine.post(stranger, LinkUp())
    engine.holds = NodeStats(pages_total=8, pages_held=8)
    engine.begin_drain()
    started(engine)
    engine.post(link, Inspect(7))
    eventually(lambda: len(link.reports) == 1)

    def check() -> None:
        raise AssertionError("3 pages are lost")

    engine.on_check = check
    engine.post(link, Inspect(8))
    eventually(lambda: len(link.reports) == 2)
    engine.on_check = lambda: None
    stats = replace(engine.holds, serving=True, draining=True)
    assert link.reports == [Inspection(7, stats, ()), Inspection(8, stats, ("AssertionError: 3 pages are lost",))]
    assert stranger.reports == []


# ---- the end ----


def test_stop_may_be_called_twice_and_before_the_start() -> None:
    never = TinyEngine()
    never.stop()
    engine = started(TinyEngine())
    engine.stop()
    assert not engine.alive
    turns = engine.turns
    engine.stop()
    assert engine.turns == turns
    assert engine.failure is None


def test_stop_lets_the_pass_in_progress_end() -> None:
    engine, entered, go_on = TinyEngine(), threading.Event(), threading.Event()
    passes: list[str] = []

    def slow() -> bool:
        entered.set()
        go_on.wait(10)
        passes.append("ended")
        return True

    engine.on_step = slow
    engine.start()
    assert entered.wait(10)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    assert passes == []
    go_on.set()
    stopping.join(10)
    assert passes == ["ended"]


def test_stop_does_not_wait_for_a_pass_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STOP_TIMEOUT_S", 0.05)
    engine, entered, go_on = TinyEngine(), threading.Event(), threading.Event()

    def hang() -> bool:
        entered.set()
        return go_on.wait(10)

    engine.on_step = hang
    engine.start()
    assert entered.wait(10)
    engine.stop()
    assert engine.alive
    go_on.set()
    eventually(lambda: not engine.alive)


def test_each_engine_counts_for_itself() -> None:
    assert isinstance(TinyEngine().metrics, Metrics)
    assert TinyEngine().metrics.registry is not TinyEngine().metrics.registry
