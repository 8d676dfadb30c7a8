"""Requests that give way on a decode node: parked on the host, back again, or on their way through a prefill node.

Engine, device and transfer are real. Each room has content of its own, so an answer tells whose pages it was made from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode_service import parking
from decode_service.config import DecodeOptions
from decode_service.retraction import PARKED_AT_MOST_S, victims
from decode_service.room import DecodeRoom
from engine.core.clock import ManualClock
from engine.core.lifetime import Timeline
from engine.core.messages import (
    Abort,
    Explain,
    Explanation,
    Grant,
    Heartbeat,
    LinkLost,
    LinkUp,
    PeerJoined,
    PeerLeft,
    RoomFailed,
    WriterQuiesced,
)
from engine.core.metrics import NodeMetric
from engine.core.sampling import FinishReason, SamplingParams
from engine.core.types import NodeIdentity, PeerInfo, Role, RoomKey, TokenOutput
from engine.device.batch import ForwardBatch
from tests.helpers.decode_rooms import Decode, failed, grant_of, key_of, note, pages, reserve, write
from tests.helpers.engines import PAGE, decode_engine
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FilePool, LocalNode

PAGES = 16
SOURCES = 64  # pages that the writer has to write
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=7, repetition_penalty=1.3, frequency_penalty=0.4)


@dataclass(frozen=True)
class Ask:
    """A request, and which of the writer's pages its KV is."""

    prompt: int = 6
    max_new: int = 26
    first: int = 0
    sampling: SamplingParams = GREEDY
    priority: int | None = None


class Node:
    """A decode engine, a writer, and the front door between them."""

    def __init__(self, d: Decode, writer: LocalNode, clock: ManualClock):
        self.d, self.writer, self.clock = d, writer, clock
        self.link = RecordingLink()
        self.asks: dict[RoomKey, Ask] = {}
        self.trips: list[tuple[str, RoomKey, int]] = []  # out or in, and how many tokens the room had by then
        self._watch("park", "out")
        self._watch("bring_back", "in")
        d.tell(self.link, LinkUp())

    def _watch(self, name: str, way: str) -> None:
        real = getattr(self.d.engine._parking, name)

        def watched(key: RoomKey, device_pages: Sequence[int]) -> Any:
            done = real(key, device_pages)
            if done is not False:
                self.trips.append((way, key, len(self.link.tokens(key))))
            return done

        setattr(self.d.engine._parking, name, watched)

    def reserve(self, *asks: Ask) -> list[RoomKey]:
        reserves = [reserve(self.writer, a.prompt, a.max_new, sampling=a.sampling, priority=a.priority) for a in asks]
        keys = [key_of(one) for one in reserves]
        self.asks.update(zip(keys, asks, strict=True))
        self.d.tell(self.link, *reserves)
        return keys

    def deliver(self, *keys: RoomKey) -> None:
        grants = [grant_of(self.d, self.link, key) for key in keys]
        before = self.d.stats.transferring
        for grant in grants:
            write(self.writer, self.d, grant, note(), first=self.asks[grant.key].first)
        self.d.until(lambda: self.d.stats.transferring == before - len(keys), "they arrive", passes=False)

    def run(self, *asks: Ask) -> list[RoomKey]:
        """Requests whose pages arrive before the first step."""
        keys = self.reserve(*asks)
        self.deliver(*keys)
        return keys

    def finish(self) -> None:
        self.d.until(lambda: self.d.stats.idle, "all end")

    def answer(self, key: RoomKey) -> list[TokenOutput]:
        """Less what is not the same in every batch: the room, and the last digits of a log probability."""
        return [replace(token, key=RoomKey(0, 0), logprob=0.0) for token in self.link.tokens(key)]

    def alone(self, ask: Ask) -> list[TokenOutput]:
        (key,) = self.run(ask)
        self.finish()
        return self.answer(key)

    def went(self, where: str) -> float:
        return self.d.engine.metrics.registry.get_sample_value(NodeMetric.RETRACTED.metric, {"where": where}) or 0.0

    @property
    def host(self) -> tuple[int, int]:
        """Pages free, and all."""
        return self.d.stats.host_pages_free, self.d.stats.host_pages_total


@contextmanager
def node(tmp_path: Path, host_pages: int | None = 64, num_pages: int = PAGES, **options: Any) -> Iterator[Node]:
    clock = ManualClock()
    with decode_engine(num_pages, host_pages=host_pages, clock=clock, **options) as d:
        pool = FilePool(tmp_path / "pool", SOURCES, d.device.pool.page_bytes)
        content = np.random.default_rng(3).normal(size=pool.pages.size // 4).astype(np.float32)
        pool.pages[:] = content.view(np.uint8).reshape(pool.pages.shape)
        writer = LocalNode(NodeIdentity.new("p"), pool)
        writer.agent.add_peer(d.agent.identity, d.agent.metadata, d.agent.memory)
        writer.start_sender()
        try:
            yield Node(d, writer, clock)
        finally:
            writer.close()


@pytest.fixture
def n(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as one:
        yield one


def one_parked(n: Node) -> tuple[RoomKey, RoomKey]:
    """Who runs, and who is parked for its sake."""
    first, second = n.run(Ask(max_new=44), Ask(max_new=44, first=9))
    n.d.until(lambda: n.d.stats.retracted == 1, "one gives way")
    parked = n.trips[-1][1]
    return (second if parked == first else first), parked


def test_no_more_give_way_than_must() -> None:
    """Who has given way needs no page any more, and leaves those it had."""
    rooms = []
    for prompt, first_index in ((4, 0), (8, 2), (6, 3)):  # two whose next token begins a page, and one
        reservation = reserve(NodeIdentity.new("p"), prompt, first_index=first_index).reservation
        room = DecodeRoom(reservation, RecordingLink(), Timeline(), last_index=first_index)
        room.pages.extend(range(-(-prompt // PAGE)))
        rooms.append(room)
    assert victims(rooms, 2, PAGE, DecodeOptions()) == []
    assert victims(rooms, 0, PAGE, DecodeOptions()) == rooms[:1]
    assert victims(rooms[1:2], 0, PAGE, DecodeOptions()) == [], "never the last"


# ---- out and back ----


@pytest.mark.parametrize("host_pages", [64, None, 5], ids=["host", "prefill", "mixed"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_those_given_alone(tmp_path: Path, host_pages: int | None, sampling: SamplingParams) -> None:
    with node(tmp_path, host_pages) as n:
        asks = [Ask(prompt=3 + 2 * i, max_new=30 - 3 * i, first=9 * i, sampling=sampling) for i in range(5)]
        alone = [n.alone(ask) for ask in asks]
        assert len({tuple(token.token_id for token in answer) for answer in alone}) == len(asks)
        assert n.trips == []
        keys = n.run(*asks)
        n.finish()
        sent_back = [key for key, _, _ in failed(n.link)]
        assert {report.reason for report in n.link.of(RoomFailed)} <= {"retracted: out of pages"}
        for key, whole in zip(keys, alone, strict=True):
            said = n.answer(key)
            assert said == whole[: len(said)]
            assert (len(said) < len(whole)) == (key in sent_back)
        assert n.went("prefill") == len(sent_back)
        assert n.went("host") == sum(way == "out" for way, _, _ in n.trips)
        assert (n.went("host") > 0) == (host_pages is not None)
        assert (n.went("prefill") > 0) == (host_pages != 64)
        assert pages(n.d) == (PAGES, 0, 0)
        assert n.host == (host_pages or 0, host_pages or 0)


@pytest.mark.parametrize(
    ("reserved", "sizes"),
    [
        # Here a page is missing in the very step in which some are back, who have made the fewest tokens.
        (0, [(1, 26), (2, 26), (4, 22), (6, 26), (5, 28)]),
        (0, [(2, 21), (5, 12), (6, 22), (7, 10), (1, 13)]),
        (PAGE, [(4, 24)] * 3),
        (3 * PAGE, [(4, 24)] * 3),
    ],
)
def test_nobody_goes_out_and_in_for_nothing(tmp_path: Path, reserved: int, sizes: list[tuple[int, int]]) -> None:
    """Who is back makes as many tokens as were reserved for it before it gives way again, and at least one."""
    with node(tmp_path, reserved_decode_tokens=reserved) as n:
        n.run(*(Ask(prompt, max_new, first=i) for i, (prompt, max_new) in enumerate(sizes)))
        n.finish()
        assert failed(n.link) == []
        assert len(n.trips) >= 2
        back: dict[RoomKey, int] = {}
        for way, key, tokens in n.trips:
            if way == "in":
                back[key] = tokens
            elif key in back:
                assert tokens - back.pop(key) >= max(reserved, 1)


def test_with_nothing_reserved_pages_are_not_copied_at_every_step(tmp_path: Path) -> None:
    """The one whose next token begins a page would be back, and out again, as soon as what it has fits."""
    with node(tmp_path) as n:
        (long,) = n.run(Ask(prompt=4, max_new=41))
        short = n.run(Ask(prompt=4, max_new=41, first=5), Ask(prompt=8, max_new=21, first=11))
        n.finish()
        assert failed(n.link) == []
        steps = len(n.link.outputs)
        assert all(len(n.link.tokens(key)) == n.asks[key].max_new - 1 for key in (long, *short))
        assert 0 < sum(way == "out" for way, _, _ in n.trips) < steps / PAGE


def test_what_nearly_fills_the_pool_comes_back_without_a_reserve(tmp_path: Path) -> None:
    """Held and reserved together it would never fit, but alone it needs no more than the pool has."""
    with node(tmp_path, reserved_decode_tokens=2 * PAGE, priority_scheduling=True) as n:
        (big,) = n.reserve(Ask(prompt=4, max_new=60))
        n.d.turn()
        (small,) = n.reserve(Ask(prompt=8, max_new=12, first=3, priority=9))
        n.d.turn()
        n.deliver(big)
        n.d.until(lambda: not n.d.turn() and n.d.stats.running == 1, "it has all pages but those that arrive")
        n.deliver(small)
        n.d.until(lambda: n.d.stats.retracted == 1, "the less important one gives way")
        n.finish()
        assert [way for way, _, _ in n.trips] == ["out", "in"]
        assert n.link.tokens(big)[-1].finish is FinishReason.LENGTH
        assert failed(n.link) == []


def test_they_come_back_in_order_of_arrival(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        keys = n.run(*(Ask(prompt=4, max_new=40, first=i) for i in range(5)))
        n.d.until(lambda: n.d.stats.retracted == 3, "three are out")
        out = {key for _, key, _ in n.trips}
        n.d.until(lambda: any(way == "in" for way, _, _ in n.trips), "one is back")
        assert next(key for way, key, _ in n.trips if way == "in") == next(key for key in keys if key in out)


def test_it_is_told_of_a_request_that_it_was_away(n: Node) -> None:
    _, parked = one_parked(n)
    n.finish()
    n.d.tell(n.link, Explain(1, f"r{parked}"))
    (record,) = n.link.of(Explanation)[-1].rooms
    events = [event.event for event in record.events]
    # The clock stands still, so all come at the same time: their order is that in which they usually happen.
    assert events == ["arrived", "granted", "complete", "first_step", "retracted", "resumed", "ended"]
    assert record.outcome == "finished"


# ---- while some are out ----


def test_nobody_new_comes_but_what_was_granted_arrives(tmp_path: Path) -> None:
    with node(tmp_path) as n:
        granted, a, b = n.reserve(Ask(max_new=4), Ask(max_new=40, first=9), Ask(max_new=40, first=20))
        n.deliver(a, b)
        n.d.until(lambda: n.d.stats.retracted == 1, "one gives way")
        said = n.link.of(Heartbeat)[-1].stats
        assert (said.head_room, said.retracted, said.idle) == (0, 1, False), "it is told at once"
        (new,) = n.reserve(Ask(prompt=1, max_new=1))
        n.d.turn()
        assert new not in [grant.key for grant in n.link.of(Grant)]
        assert n.d.stats.head_room == 0
        n.deliver(granted)
        n.d.until(lambda: len(n.link.tokens(granted)) == 3, "what was on its way is decoded")
        assert n.d.stats.retracted >= 1
        n.deliver(new)
        n.finish()
        assert failed(n.link) == []


def test_the_last_running_one_goes_on_when_what_arrives_has_ended(n: Node) -> None:
    """It needs a page, others are parked, and all other pages are on their way: nobody waits for anybody in a ring."""
    a, b, arriving = n.reserve(Ask(max_new=40, first=9), Ask(max_new=40, first=20), Ask(prompt=24, max_new=20))
    n.deliver(a, b)
    n.d.until(lambda: not n.d.turn() and n.d.stats.retracted == 1, "nobody can go on")
    assert (n.d.stats.running, n.d.stats.transferring, n.d.stats.pages_free) == (1, 1, 0)
    n.deliver(arriving)
    n.finish()
    assert failed(n.link) == []
    assert [len(n.link.tokens(key)) for key in (arriving, a, b)] == [19, 39, 39]


def test_the_last_running_one_goes_on_when_what_was_fenced_is_free(n: Node) -> None:
    a, b, arriving = n.reserve(Ask(max_new=40, first=9), Ask(max_new=40, first=20), Ask(prompt=24, max_new=20))
    n.deliver(a, b)
    n.d.until(lambda: not n.d.turn() and n.d.stats.retracted == 1, "nobody can go on")
    n.d.tell(n.link, Abort(arriving, "x"))
    assert (n.d.turn(), n.d.stats.pages_fenced) == (False, 6)
    n.d.tell(n.link, WriterQuiesced(arriving))
    n.clock.advance(1)  # what may have been on its way has landed
    n.finish()
    assert failed(n.link) == []
    assert [len(n.link.tokens(key)) for key in (a, b)] == [39, 39]


def test_who_waits_too_long_goes_through_a_prefill_node(n: Node) -> None:
    runs, parked = one_parked(n)
    n.clock.advance(PARKED_AT_MOST_S - 0.1)
    n.d.turn()
    assert n.d.stats.retracted == 1
    n.clock.advance(0.1)
    n.d.turn()
    assert failed(n.link) == [(parked, "decoding", True)]
    assert n.link.of(RoomFailed)[0].reason == "retracted: no room again for 10 s"
    assert n.host == (64, 64)
    assert (n.went("host"), n.went("prefill")) == (1, 1)
    n.finish()
    assert n.link.tokens(runs)[-1].finish is FinishReason.LENGTH


# ---- what is out ends ----


@pytest.mark.parametrize("ending", ["abort", "link lost"])
def test_what_is_given_up_while_it_is_out_leaves_nothing(n: Node, ending: str) -> None:
    _, parked = one_parked(n)
    said = len(n.link.tokens(parked))
    n.d.tell(n.link, Abort(parked, "x") if ending == "abort" else LinkLost())
    assert n.host == (64, 64)
    n.finish()
    assert len(n.link.tokens(parked)) == said
    assert pages(n.d) == (PAGES, 0, 0)
    n.d.tell(n.link, Abort(parked, "again"))


def test_its_writer_may_leave(n: Node) -> None:
    agent = n.writer.agent
    n.d.tell(n.link, PeerJoined(PeerInfo(n.writer.identity, Role.PREFILL, agent.memory, agent.metadata)))
    runs, parked = one_parked(n)
    n.d.tell(n.link, PeerLeft(n.writer.identity))
    n.finish()
    assert failed(n.link) == []
    assert n.answer(parked)[-1].index == n.answer(runs)[-1].index == 43


def test_a_step_that_fails_does_not_touch_what_is_out(n: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, parked = one_parked(n)

    def fail(batch: ForwardBatch) -> None:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(n.d.device.runner, "forward", fail)
        n.d.turn()
    assert [key for key, _, _ in failed(n.link)] == [runs]
    n.finish()
    assert len(n.link.tokens(parked)) == 43


@pytest.mark.parametrize("way", ["out", "back"])
def test_a_copy_that_fails_costs_those_that_run(n: Node, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = n.run(Ask(max_new=44), Ask(max_new=44, first=9))
    if way == "back":
        n.d.until(lambda: n.d.stats.retracted == 1, "one gives way")

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(parking, "copy_pages", fail)
        n.finish()
    (incident,) = n.d.incidents
    inner = [report for report in n.link.of(RoomFailed) if incident in report.reason]
    assert [report.retriable for report in inner] == [False] * (2 if way == "out" else 1)
    assert {report.key for report in inner} <= set(keys)
    assert (pages(n.d), n.host) == ((PAGES, 0, 0), (64, 64))
    n.alone(Ask())


# ---- anything, in any order ----


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends(tmp_path: Path, seed: int) -> None:
    """Requests come, arrive sooner or later, are aborted, and give way; time passes and steps fail.

    None is left over, every page is free in the end, and what was answered was answered as if alone.
    """
    chance = random.Random(seed)
    options = {
        "reserved_decode_tokens": chance.choice((0, 0, 3, PAGE, 9)),
        "max_running": chance.choice((3, 8)),
        "priority_scheduling": chance.random() < 0.5,
    }
    asks = [
        Ask(chance.randrange(1, 25), chance.randrange(1, 30), 5 * i, sampling, chance.choice((None, 1, 5)))
        for i, sampling in enumerate([GREEDY, SAMPLED] * 4)
    ]
    with node(tmp_path, chance.choice((None, 5, 64, 64)), settle_s=0.01, **options) as n:
        alone = {ask: n.alone(ask) for ask in asks}
        forward = n.d.device.runner.forward
        failing = False

        def sometimes(batch: ForwardBatch) -> Any:
            nonlocal failing
            if failing:
                failing = False
                raise RuntimeError("for once")
            return forward(batch)

        n.d.device.runner.forward = sometimes  # type: ignore[method-assign]
        ended: set[RoomKey] = set()
        written: set[RoomKey] = set()
        keys: list[RoomKey] = []

        def look() -> None:
            ended.update(key for key, _, _ in failed(n.link))
            ended.update(t.key for output in n.link.outputs for t in output.tokens if t.finish is not None)

        def deliver() -> None:
            for grant in n.link.of(Grant):
                if grant.key not in written | ended:
                    written.add(grant.key)
                    write(n.writer, n.d, grant, note(), first=n.asks[grant.key].first)
                    if n.asks[grant.key].max_new == 1:
                        ended.add(grant.key)

        def abort(key: RoomKey) -> None:
            ended.add(key)
            n.d.tell(n.link, Abort(key, "x"), WriterQuiesced(key))

        while len(keys) < 60:
            event = chance.random()
            if event < 0.12 and len(set(keys) - ended) < 9:
                keys += n.reserve(chance.choice(asks))
            elif event < 0.2:
                deliver()
            elif event < 0.21 and (live := [key for key in keys if key not in ended]):
                abort(chance.choice(live))
            elif event < 0.215:
                failing = True
            elif event < 0.22:
                n.clock.advance(chance.choice((0.5, PARKED_AT_MOST_S)))
            else:
                n.d.turn()
            look()
        failing = False

        def over() -> bool:
            deliver()
            look()
            n.clock.advance(0.001)
            return n.d.stats.idle and not n.d.stats.pages_fenced

        n.d.until(over, "every request ends")
        assert set(keys) <= ended
        assert (pages(n.d)[0], n.host[0]) == (PAGES, n.host[1])
        for key in keys:
            said = n.answer(key)
            assert said == alone[n.asks[key]][: len(said)]
        assert any(n.answer(key) == alone[n.asks[key]] for key in keys)
