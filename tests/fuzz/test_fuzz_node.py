"""Hostile commands to real nodes, from a bootstrap that is broken or worse, while a sound one goes on with them.

Nodes take commands from bootstraps they dialled, so this is the other gRPC entry. What a bootstrap says may cost the
rooms it named, and nobody else's: the sound one's requests go on, token for token, the engine threads turn, the books
are right after every turn, and once the hostile session is over every page is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

import rpc.session
from engine.core.access import NodeAccess
from engine.core.messages import (
    Abort,
    Command,
    Explain,
    Grant,
    Granted,
    Inspect,
    Inspection,
    PeerJoined,
    PeerLeft,
    Registration,
    Reserve,
    RoomFenced,
    RoomQuiesced,
    Submit,
    WriterQuiesced,
)
from engine.core.page_keys import page_keys
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import NodeIdentity, PrefillTask, Reservation, RoomKey
from kvrelay.v1 import bootstrap_pb2 as pb
from rpc.session import Session, end
from rpc.wire import command_to_wire
from tests.fuzz.hostile import each, payloads
from tests.helpers.bootstrap_peer import BootstrapPeer, PeerSession
from tests.helpers.engines import PAGE, Driven, decode_engine, prefill_engine

PROMPT = tuple(range(5, 5 + 3 * PAGE + 1))
NEW = 4
GREEDY = SamplingParams(temperature=0.0)
STOPPING = StoppingParams(max_new_tokens=NEW, ignore_eos=True)
ROUND, ROUNDS, AT_ONCE = 50, 4, 12
PATIENCE_S = 60.0


def submit(key: RoomKey, request_id: str = "hostile", sampling: SamplingParams = GREEDY) -> Submit:
    keys = page_keys(PROMPT, PAGE, "")
    return Submit(PrefillTask(request_id, key, PROMPT, 0, keys, sampling, STOPPING))


def reserve(key: RoomKey, writer: NodeIdentity, sampling: SamplingParams = GREEDY) -> Reserve:
    history = PROMPT if sampling.needs_history else ()
    return Reserve(Reservation("hostile", key, len(PROMPT), 0, sampling, STOPPING, writer, history=history))


class Mishaps(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.seen) < 20:
            self.seen.append(logging.Formatter().format(record))


class House:
    """Real engines on sessions with two bootstraps, all in one event loop. The test is each engine's thread."""

    def __init__(self, **nodes: Driven[Any]):
        self.nodes = nodes
        self._runner = asyncio.Runner()
        self._inspections = itertools.count(10**12)  # nobody else's numbers
        self.mishaps = Mishaps()

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def __enter__(self) -> House:
        logging.getLogger("kvrelay").addHandler(self.mishaps)
        self.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._close())
        self._runner.close()
        logging.getLogger("kvrelay").removeHandler(self.mishaps)

    async def _open(self) -> None:
        self.sound, self.hostile = BootstrapPeer(0.2, 3600), BootstrapPeer(0.2, 3600)
        self.said: dict[BootstrapPeer, dict[str, PeerSession]] = {}
        self._sessions: list[asyncio.Task[None]] = []
        for peer in (self.sound, self.hostile):
            await peer.start()
        for name, node in self.nodes.items():
            identity, memory = node.agent.identity, node.agent.memory
            told = Registration(identity, node.peer.role, name, node.device.layout, memory, node.agent.metadata, 512)
            session = Session(
                [self.sound.address, self.hostile.address], told, node.engine, lambda _: None, NodeAccess()
            )
            self._sessions.append(asyncio.create_task(session.run()))
        for peer in (self.sound, self.hostile):
            await self.until(lambda peer=peer: len(peer.sessions) == len(self.nodes), "all are attached")
            self.said[peer] = {session.registration.model: session for session in peer.sessions}
        for name, node in self.nodes.items():
            for other in self.nodes.values():
                if other.peer.role is not node.peer.role:
                    self.said[self.sound][name].send(PeerJoined(other.peer))

    async def _close(self) -> None:
        await asyncio.gather(*(end(session) for session in self._sessions))
        for peer in (self.sound, self.hostile):
            await peer.stop()

    def turn(self) -> None:
        for node in self.nodes.values():
            node.turn()
            assert not node.incidents, self.mishaps.seen

    async def until(self, condition: Any, what: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.turn()
                await asyncio.sleep(0.001)
        assert condition(), what

    async def inspected(self, peer: BootstrapPeer) -> None:
        """Until every node has taken in what this bootstrap has sent it, and its books are right."""
        number = next(self._inspections)
        for session in self.said[peer].values():
            session.send(Inspect(number))

        def answers() -> list[Inspection]:
            assert not any(session.over for session in self.said[peer].values()), "a session has ended"
            every = [one for session in self.said[peer].values() for one in session.of(Inspection)]
            return [one for one in every if one.inspection_id == number]

        await self.until(lambda: len(answers()) == len(self.nodes), "every node answers")
        assert not [problem for one in answers() for problem in one.problems]

    async def answer(self) -> list[int]:
        """One request of the sound bootstrap, from prompt to last token."""
        key = RoomKey.new(0)
        prefill, decode = self.said[self.sound]["prefill"], self.said[self.sound]["decode"]
        prefill.send(submit(key, "good"))
        decode.send(reserve(key, self.nodes["prefill"].agent.identity))

        def granted() -> list[Grant]:
            return [one for one in decode.of(Grant) if one.key == key]

        await self.until(granted, "a grant")
        prefill.send(Granted(key, self.nodes["decode"].agent.identity, granted()[0].pages))

        def tokens() -> dict[int, int]:
            made = [token for step in self.sound.outputs for token in step.tokens if token.key == key]
            return {token.index: token.token_id for token in made}

        await self.until(lambda: len(tokens()) == NEW, "every token")
        await self.until(lambda: any(one.key == key for one in prefill.of(RoomQuiesced)), "the writer is quiet")
        made = tokens()
        self.sound.outputs.clear()
        return [made[index] for index in range(NEW)]

    async def come_to_rest(self) -> None:
        """The broken bootstrap ends its sessions and is mended: it answers for what is fenced. Then all is free."""
        for session in self.said[self.hostile].values():
            session.end()
        await self.until(lambda: len(self.hostile.sessions) == 2 * len(self.nodes), "all are attached again")
        for session in self.hostile.sessions[len(self.nodes) :]:
            self.said[self.hostile][session.registration.model] = session
        await self.inspected(self.hostile)
        for session in self.said[self.hostile].values():
            session.send(*(WriterQuiesced(one.key) for one in session.of(RoomFenced)))
        for name, node in self.nodes.items():
            await self.until(lambda node=node: _at_rest(node), f"{name} holds nothing: {node.stats}")


def _at_rest(node: Driven[Any]) -> bool:
    stats = node.stats
    return bool(stats.idle and stats.pages_free + stats.pages_cached == stats.pages_total)


# ---- what is sent ----

KEYS = [RoomKey(1000 + i, 0) for i in range(4)]
PICKY = SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.2, seed=3)
NOBODY = NodeIdentity("nobody", "1")


def commands(prefill: Driven[Any], decode: Driven[Any]) -> list[pb.NodeCommand]:
    """Valid ones. Pages are granted on a decode node that no sound request is on."""
    made: list[Command] = [Inspect(7), Explain(7, "hostile"), PeerLeft(decode.peer.identity), PeerLeft(NOBODY)]
    made += [PeerJoined(prefill.peer), PeerJoined(decode.peer), PeerJoined(replace(decode.peer, identity=NOBODY))]
    for key in KEYS:
        made += [submit(key), submit(key, sampling=PICKY)]
        made += [reserve(key, prefill.peer.identity), reserve(key, NOBODY, PICKY)]
        made += [Granted(key, decode.peer.identity, (0, 1, 2, 3)), Granted(key, NOBODY, (0, 1, 2, 3))]
        made += [Abort(key, "x"), WriterQuiesced(key)]
    return [*map(command_to_wire, made), pb.NodeCommand(heartbeat_ack=1), pb.NodeCommand(welcome=pb.Welcome())]


@st.composite
def batches(draw: st.DrawFn, valid: tuple[pb.NodeCommand, ...]) -> list[tuple[str, bytes]]:
    one = payloads(pb.NodeCommand, valid)
    return [(draw(st.sampled_from(("prefill", "decode", "other"))), draw(one)) for _ in range(AT_ONCE)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.session, "FIRST_BACKOFF_S", 0.01)


def test_a_hostile_bootstrap_costs_a_node_nothing_but_its_own_rooms() -> None:
    with (
        prefill_engine(60) as prefill,
        decode_engine(60, settle_s=0.01) as decode,
        decode_engine(60, settle_s=0.01, node_id="other") as other,
        House(prefill=prefill, decode=decode, other=other) as house,
    ):
        right = house.run(house.answer())
        sent = 0

        async def batch(made: list[tuple[str, bytes]]) -> None:
            nonlocal sent
            for name, data in made:
                with contextlib.suppress(DecodeError):  # gRPC itself would end the session by that
                    house.said[house.hostile][name].send(pb.NodeCommand.FromString(data))
                    sent += 1
            await house.inspected(house.hostile)

        valid = tuple(commands(prefill, other))
        for number in range(ROUNDS):
            each(batches(valid), ROUND, 300 + number, lambda made: house.run(batch(made)))
            assert house.run(house.answer()) == right
        assert sent > 1000
        house.run(house.come_to_rest())
        assert house.run(house.answer()) == right
