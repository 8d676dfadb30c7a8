"""Whole hand-offs between a prefill and a decode engine, ended at random moments in every way there is.

Engines, device and transfer are real. The front door is played here: it passes on what it is told, later or sooner.
However a room ends, every page is free or cached in the end; and what was not ended is answered as by the model alone.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from engine.core.messages import (
    Abort,
    Command,
    Grant,
    Granted,
    LinkLost,
    LinkUp,
    PeerJoined,
    Report,
    Reserve,
    RoomFailed,
    RoomFenced,
    RoomQuiesced,
    Submit,
    WriterQuiesced,
)
from engine.core.page_keys import page_keys
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import PrefillTask, Reservation, RoomKey, TokenOutput
from engine.device.batch import ForwardBatch
from tests.helpers.engines import PAGE, Driven, decode_engine, prefill_engine
from tests.helpers.models import prepared_tiny
from tests.helpers.reference import greedy
from tests.helpers.tiny_engine import RecordingLink

PREFILL_PAGES, DECODE_PAGES = 32, 20
NEW_TOKENS = 7
ROOMS = 80
LIVE = 5
GREEDY = SamplingParams(temperature=0)
PATIENCE_S = 60.0
# Some share their first pages, so that there is something to find in the cache.
PROMPTS = [tuple(3 + (10 + 7 * i) % 250 for i in range(n)) for n in (3, 8, 21)]
PROMPTS += [(*PROMPTS[2][:13], *(3 + (5 * i) % 200 for i in range(n))) for n in (2, 17, 36)]


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, ...], list[int]]:
    return {prompt: greedy(prepared_tiny().path, prompt, NEW_TOKENS) for prompt in PROMPTS}


class Side:
    """One node: what it is still to be told, its present link, and how much of that was read."""

    def __init__(self, node: Driven[Any]):
        self.node = node
        self.commands: deque[Command] = deque()
        self.link = RecordingLink()
        self.read = 0
        forward = node.device.runner.forward
        self.failing = False

        def compute(batch: ForwardBatch) -> Tensor:
            if self.failing:
                self.failing = False
                raise RuntimeError("broken for once")
            return forward(batch)

        node.device.runner.forward = compute  # type: ignore[method-assign]

    def deliver(self) -> None:
        if self.commands:
            self.node.tell(self.link, self.commands.popleft())

    def take(self) -> list[Report]:
        reports = self.link.reports[self.read :]
        self.read = len(self.link.reports)
        return reports

    def reattach(self, peer: Driven[Any]) -> None:
        """The session breaks; what was said but not read is lost. Another begins."""
        self.node.tell(self.link, LinkLost())
        self.commands.clear()
        self.link, self.read = RecordingLink(), 0
        self.node.tell(self.link, LinkUp(), PeerJoined(peer.peer))


@dataclass
class Live:
    prompt: tuple[int, ...]
    patience: int  # steps after which the client gives up
    granted: bool = False  # Granted was sent
    tokens: dict[int, TokenOutput] = field(default_factory=dict)


class Cluster:
    def __init__(self, p: Driven[Any], d: Driven[Any], chance: random.Random):
        self.p, self.d = Side(p), Side(d)
        self.chance = chance
        self.live: dict[RoomKey, Live] = {}
        self.ended: dict[str, int] = {}
        self.answered: list[Live] = []
        self.submitted = 0
        for side, other in ((self.p, d), (self.d, p)):
            side.node.tell(side.link, LinkUp(), PeerJoined(other.peer))

    # ---- what clients and fate do ----

    def submit(self) -> None:
        self.submitted += 1
        key, prompt = RoomKey.new(0), self.chance.choice(PROMPTS)
        stopping = StoppingParams(NEW_TOKENS, ignore_eos=True)
        self.live[key] = Live(prompt, self.chance.choice((self.chance.randrange(250), 10**9)))
        task = PrefillTask(str(key), key, prompt, 0, page_keys(prompt, PAGE), GREEDY, stopping)
        writer = self.p.node.agent.identity
        self.p.commands.append(Submit(task))
        self.d.commands.append(Reserve(Reservation(str(key), key, len(prompt), 0, GREEDY, stopping, writer)))

    def abort(self, key: RoomKey, why: str) -> None:
        self.ended[why] = self.ended.get(why, 0) + 1
        one = self.live.pop(key)
        self.p.commands.append(Abort(key, why))
        self.d.commands.append(Abort(key, why))
        if not one.granted:  # the writer never learned where to write
            self.d.commands.append(WriterQuiesced(key))

    def lose(self, side: Side, other: Side) -> None:
        """One node's session breaks: the attempts it had a part in end on the other one."""
        keys = list(self.live)
        side.reattach(other.node)
        for key in keys:
            self.ended["link lost"] = self.ended.get("link lost", 0) + 1
            del self.live[key]
            other.commands.append(Abort(key, "link lost"))
        if side is self.p:  # the writer joins anew
            other.commands.append(PeerJoined(side.node.peer))

    # ---- what a front door does ----

    def relay(self) -> None:
        for report in self.p.take():
            match report:
                case RoomQuiesced(key):
                    self.d.commands.append(WriterQuiesced(key))
                case RoomFailed(key) if key in self.live:
                    self.abort(key, "prefill failed")
        for report in self.d.take():
            match report:
                case Grant(key, pages) if key in self.live:
                    self.live[key].granted = True
                    self.p.commands.append(Granted(key, self.d.node.agent.identity, pages))
                case RoomFenced(key):
                    self.p.commands.append(Abort(key, "is it quiet?"))
                case RoomFailed(key, _, reason) if key in self.live:
                    self.abort(key, "retracted" if reason.startswith("retracted") else "decode failed")
        for side in (self.p, self.d):
            outputs, side.link.outputs = side.link.outputs, []
            for token in (token for output in outputs for token in output.tokens):
                self.token(token)

    def token(self, token: TokenOutput) -> None:
        one = self.live.get(token.key)
        if one is None:
            return
        assert token.index not in one.tokens, "a token comes once"
        one.tokens[token.index] = token
        if len(one.tokens) == NEW_TOKENS:
            self.answered.append(self.live.pop(token.key))

    # ---- time goes by ----

    def step(self) -> None:
        chance = self.chance
        for key, one in list(self.live.items()):
            one.patience -= 1
            if one.patience < 0:
                self.abort(key, "client")
        event = chance.random()
        if event < 0.001:
            self.lose(*chance.sample((self.p, self.d), 2))
        elif event < 0.003:
            chance.choice((self.p, self.d)).failing = True
        elif event < 0.15 and len(self.live) < LIVE:
            self.submit()
        else:
            side = chance.choice((self.p, self.d))
            chance.choice((side.deliver, side.deliver, self.relay, side.node.turn))()

    def settle(self) -> None:
        """Everything that is on its way arrives; nothing new happens."""
        deadline = time.monotonic() + PATIENCE_S
        self.p.failing = self.d.failing = False
        while not self.at_rest():
            assert time.monotonic() < deadline, f"not at rest: {self.p.node.stats} {self.d.node.stats} {self.live}"
            while self.p.commands:
                self.p.deliver()
            while self.d.commands:
                self.d.deliver()
            busy = [side.node.turn() for side in (self.p, self.d)]
            self.relay()
            if not any(busy):
                time.sleep(0.001)

    def at_rest(self) -> bool:
        p, d = self.p.node.stats, self.d.node.stats
        told = not (self.p.commands or self.d.commands or self.live)
        return told and p.idle and d.idle and p.pages_held == d.pages_held == d.pages_fenced == 0


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    chance = random.Random(request.param)
    with (
        prefill_engine(PREFILL_PAGES, chunk_size=8, max_prefill_tokens=16) as p,
        decode_engine(
            DECODE_PAGES,
            host_pages=chance.choice((None, 8, 64)),
            settle_s=0.01,
            max_running=4,
            reserved_decode_tokens=chance.choice((0, 2)),
        ) as d,
    ):
        yield Cluster(p, d, chance)


@pytest.mark.parametrize("cluster", range(4), indirect=True)
def test_pages_come_back_however_rooms_end(cluster: Cluster, answers: dict[tuple[int, ...], list[int]]) -> None:
    while cluster.submitted < ROOMS:
        cluster.step()
    cluster.settle()
    p, d = cluster.p.node, cluster.d.node
    assert d.stats.pages_free == DECODE_PAGES
    assert d.stats.host_pages_free == d.stats.host_pages_total
    assert p.stats.pages_free + p.stats.pages_cached == PREFILL_PAGES
    for one in cluster.answered:
        said = [one.tokens[index].token_id for index in range(NEW_TOKENS)]
        assert said == answers[one.prompt]
    assert len(cluster.answered) + sum(cluster.ended.values()) == ROOMS
    assert cluster.answered
    assert p.engine.failure is d.engine.failure is None
