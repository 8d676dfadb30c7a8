"""The process round an engine, or several: when it serves, how it leaves, and with which exit code.

Here in the test's own loop.
"""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.core import loop
from engine.core.errors import ConfigError, Refused
from engine.core.messages import Abort, Drain, Drained, Heartbeat, LinkLost, LinkUp, NodeStats
from engine.core.node_config import NodeConfig
from engine.core.types import RoomKey
from rpc import node as node_module
from rpc import session as session_module
from rpc import signals
from rpc.node import Rank, run_node
from tests.helpers.bootstrap_peer import BootstrapPeer, PeerSession, bootstrap_peer
from tests.helpers.cluster import free_port
from tests.helpers.tiny_engine import TinyEngine, registration, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
BUSY = NodeStats(pages_total=8, pages_free=6, pages_held=2, running=1)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "WATCH_S", 0.01)
    monkeypatch.setattr(node_module, "GOODBYE_S", 0.1)
    monkeypatch.setattr(loop, "IDLE_WAIT_S", 0.01)
    monkeypatch.setattr(session_module, "FIRST_BACKOFF_S", 0.01)


@pytest.fixture
async def peer() -> AsyncIterator[BootstrapPeer]:
    async with bootstrap_peer() as running:
        yield running


class Node:
    """A node process without the process. `stop` what a test leaves running. `engine` is the first of its ranks."""

    def __init__(self, address: str, ranks: int = 1, **options: Any):
        stall_timeout_s = options.pop("stall_timeout", 60.0)
        self.engines = [TinyEngine(stall_timeout_s=stall_timeout_s) for _ in range(ranks)]
        self.engine = self.engines[0]
        self.port = free_port()
        self.config = NodeConfig(bootstrap=(address,), listen=f"127.0.0.1:{self.port}", **options)
        self.observed: dict[str, NodeStats] = {}  # what was seen of each rank last
        self._running: asyncio.Task[int] | None = None

    def start(self) -> None:
        ranks = [Rank(engine, registration(f"tiny.{rank}")) for rank, engine in enumerate(self.engines)]
        run = run_node(ranks, self.config, lambda identity, stats: self.observed.update({identity.node_id: stats}))
        self._running = asyncio.create_task(run)

    @property
    def left(self) -> bool:
        return self._running is not None and self._running.done()

    async def exit_code(self) -> int:
        assert self._running is not None
        async with asyncio.timeout(10):
            return await self._running

    async def serving(self) -> None:
        await self.health(SERVING)

    async def health(self, status: int) -> None:
        """Wait until the health service says so."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel, asyncio.timeout(10):
            watch: Any = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=""), wait_for_ready=True
            )
            while (await watch.read()).status != status:
                pass

    async def signal(self, number: int = signal.SIGTERM) -> None:
        await until(lambda: self.engine.turns > 0 or not self.engine.ready, "the process is up")
        assert not self.left
        signal.raise_signal(number)
        await asyncio.sleep(0)  # let the loop see it

    async def stop(self) -> None:
        if self._running is not None and not self.left:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)


@asynccontextmanager
async def node(
    peer: BootstrapPeer, setup: Callable[[Node], None] = lambda _: None, **options: Any
) -> AsyncIterator[Node]:
    one = Node(peer.address, **options)
    setup(one)
    one.start()
    try:
        yield one
    finally:
        await one.stop()


# ---- serving ----


async def test_it_serves_once_it_can_and_is_attached(peer: BootstrapPeer) -> None:
    passed = threading.Event()

    def canary(one: Node) -> None:
        one.engine.on_warm_up = lambda: passed.wait(10)

    async with node(peer, canary) as one:
        await one.health(NOT_SERVING)
        await asyncio.sleep(0.05)
        assert peer.dialled == 0, "nobody hears of a node that may not work"
        passed.set()
        await one.serving()
        session = await peer.session()
        await until(lambda: session.heartbeats > 0, "a heartbeat")
        assert session.of(Heartbeat)[-1].stats.serving
        assert one.observed["tiny.0"].serving


async def test_it_serves_only_while_it_is_attached(peer: BootstrapPeer) -> None:
    async with node(peer) as one:
        for _ in range(2):
            await one.serving()
            await peer.stop()
            await one.health(NOT_SERVING)
            await peer.start()
        await one.serving()
        assert not one.left


async def test_it_does_not_serve_while_a_pass_hangs(peer: BootstrapPeer) -> None:
    go_on = threading.Event()

    def hang() -> bool:
        go_on.wait(10)
        return False

    async with node(peer, stall_timeout=0.2) as one:
        await one.serving()
        session = await peer.session()
        one.engine.on_step = hang
        await one.health(NOT_SERVING)
        await until(lambda: not session.of(Heartbeat)[-1].stats.serving, "the bootstrap hears it, too")
        go_on.set()
        await one.serving()


async def test_a_busy_port_is_told_before_anything_is_begun(peer: BootstrapPeer) -> None:
    one = Node(peer.address)
    one.config = replace(one.config, listen=peer.address)
    one.start()
    with pytest.raises(ConfigError, match=re.escape(f"cannot bind '{peer.address}'")):
        await one.exit_code()
    assert not one.engine.alive
    assert peer.dialled == 0


# ---- leaving ----


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "Admin.Drain"])
async def test_it_finishes_what_it_has_then_leaves(peer: BootstrapPeer, how: str) -> None:
    async with node(peer) as one:
        await one.serving()
        session = await peer.session()
        one.engine.holds = BUSY
        if how == "Admin.Drain":
            session.send(Drain(float("inf")))
        else:
            await one.signal(signal.Signals[how])
        await one.health(NOT_SERVING)
        await until(lambda: session.of(Heartbeat)[-1].stats.draining, "the bootstrap hears that it drains")
        session.send(Abort(RoomKey(1, 0), "x"))
        await until(lambda: Abort(RoomKey(1, 0), "x") in one.engine.taken, "it still does what it is told")
        turns = one.engine.turns
        await until(lambda: one.engine.turns > turns + 10, "passes go by")
        assert not one.left
        assert Drained() not in session.reports
        one.engine.holds = NodeStats(pages_total=8, pages_free=8)
        assert await one.exit_code() == 0
        assert Drained() in session.reports
        assert session.of(Heartbeat)[-1].stats.idle
        assert one.engine.taken[-1] == LinkLost()
        assert not one.engine.alive
        await until(lambda: session.over, "the stream ended")


async def test_what_arrives_while_it_is_told_to_leave_is_not_lost(peer: BootstrapPeer) -> None:
    """It looks idle, but a command is on its way that the bootstrap sent before it knew."""
    taken = threading.Event()

    def work(item: object) -> None:
        one.engine.holds = BUSY
        taken.set()

    async with node(peer) as one:
        await one.serving()
        one.engine.on_handle = work
        peer.acknowledging = False
        session = await peer.session()
        before = session.heartbeats
        await one.signal()
        await until(lambda: session.heartbeats >= before + 3, "it says that it drains")
        session.send(Abort(RoomKey(1, 0), "stands for a new room"))
        peer.acknowledging = True
        await until(taken.is_set, "the room is taken in")
        turns = one.engine.turns
        await until(lambda: one.engine.turns > turns + 10, "passes go by")
        assert not one.left
        one.engine.holds = NodeStats()
        assert await one.exit_code() == 0


@pytest.mark.parametrize("deadline", ["its own", "the operator's"])
async def test_a_deadline_bounds_it(peer: BootstrapPeer, deadline: str) -> None:
    async with node(peer, drain_timeout=0.3 if deadline == "its own" else 600) as one:
        await one.serving()
        one.engine.holds = BUSY
        session = await peer.session()
        session.send(Drain(600 if deadline == "its own" else 0.3))
        assert await one.exit_code() == 0
        await until(lambda: session.over, "the stream ended")
        assert Drained() not in session.reports, "something is left"


async def test_a_later_order_may_bring_the_deadline_forward(peer: BootstrapPeer) -> None:
    async with node(peer) as one:
        await one.serving()
        one.engine.holds = BUSY
        session = await peer.session()
        session.send(Drain(600))
        await one.health(NOT_SERVING)
        session.send(Drain(700), Drain(0))
        assert await one.exit_code() == 0


@pytest.mark.parametrize("state", ["busy", "the bootstrap is silent", "a pass hangs"])
async def test_a_second_signal_leaves_at_once(peer: BootstrapPeer, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(signals, "SAME_S", 0.0)  # nobody is that fast but a test
    go_on, hangs = threading.Event(), threading.Event()

    def hang() -> bool:
        hangs.set()
        return go_on.wait(20)

    async with node(peer, drain_timeout=600) as one:
        await one.serving()
        peer.acknowledging = state != "the bootstrap is silent"
        one.engine.holds = BUSY if state == "busy" else one.engine.holds
        if state == "a pass hangs":
            one.engine.on_step = hang
            await until(hangs.is_set, "it hangs")
        await one.signal()
        await one.health(NOT_SERVING)
        assert not one.left
        await one.signal(signal.SIGINT)
        assert await one.exit_code() == 0
        go_on.set()


async def test_it_can_leave_before_it_ever_served(peer: BootstrapPeer) -> None:
    go_on = threading.Event()

    def canary(one: Node) -> None:
        one.engine.on_warm_up = lambda: go_on.wait(10)

    async with node(peer, canary, drain_timeout=600) as one:
        await one.health(NOT_SERVING)
        await one.signal()
        go_on.set()
        assert await one.exit_code() == 0


async def test_with_no_bootstrap_there_is_nobody_to_wait_for() -> None:
    async with node(BootstrapPeer(1, 1), drain_timeout=600) as one:
        await until(lambda: one.engine.turns > 0, "it runs")
        await one.signal()
        assert await one.exit_code() == 0
        assert LinkUp() not in one.engine.taken


# ---- what cannot go on ----


async def test_a_node_that_does_not_fit_ends_with_the_reason(
    peer: BootstrapPeer, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(_: Any) -> None:
        raise Refused("page_size is 8, here 16", field="page_size")

    peer.on_attach = refuse
    async with node(peer) as one:
        assert await one.exit_code() == 1
        (record,) = [r for r in caplog.records if r.message == "refused by the bootstrap"]
        assert vars(record)["error"] == "page_size is 8, here 16"
        assert not one.engine.alive


async def test_a_canary_that_fails_ends_it(peer: BootstrapPeer) -> None:
    def canary(one: Node) -> None:
        def fail() -> None:
            raise AssertionError("the canary's logits are not finite")

        one.engine.on_warm_up = fail

    async with node(peer, canary) as one:
        assert await one.exit_code() == 1


@pytest.mark.parametrize("draining", [False, True], ids=["serving", "draining"])
async def test_an_engine_that_fails_ends_it(peer: BootstrapPeer, draining: bool) -> None:
    def fail() -> bool:
        raise ValueError("broken")

    async with node(peer, drain_timeout=600) as one:
        await one.serving()
        if draining:
            one.engine.holds = BUSY
            await one.signal()
            await one.health(NOT_SERVING)
        one.engine.on_step = fail
        assert await one.exit_code() == 1
        assert isinstance(one.engine.failure, ValueError)


# ---- several ranks ----


async def sessions(peer: BootstrapPeer) -> list[PeerSession]:
    """Of two ranks, in their order."""
    await peer.session(2)
    return sorted(peer.sessions, key=lambda session: session.registration.identity.node_id)


async def test_each_rank_is_a_node_and_the_process_serves_when_all_do(peer: BootstrapPeer) -> None:
    passed, go_on = threading.Event(), threading.Event()

    def hang() -> bool:
        go_on.wait(10)
        return False

    def canary(one: Node) -> None:
        one.engines[1].on_warm_up = lambda: passed.wait(10)

    async with node(peer, canary, ranks=2, stall_timeout=0.2) as one:
        await one.health(NOT_SERVING)
        await until(lambda: one.engine.ready, "the first rank is ready")
        await asyncio.sleep(0.05)
        assert peer.dialled == 0, "nobody hears of a process that may not work"
        passed.set()
        await one.serving()
        assert [s.registration.identity.node_id for s in await sessions(peer)] == ["tiny.0", "tiny.1"]
        await until(lambda: one.observed.keys() == {"tiny.0", "tiny.1"}, "the metrics tell them apart")
        one.engines[1].on_step = hang
        await one.health(NOT_SERVING)
        go_on.set()
        await one.serving()


async def test_each_rank_gets_its_own_commands(peer: BootstrapPeer) -> None:
    async with node(peer, ranks=2) as one:
        await one.serving()
        first, second = await sessions(peer)
        first.send(Abort(RoomKey(1, 0), "x"))
        second.send(Abort(RoomKey(2, 0), "x"))
        for rank, engine in enumerate(one.engines):
            await until(lambda engine=engine: len(engine.taken) == 2, "a command came")  # type: ignore[misc]
            assert engine.taken == [LinkUp(), Abort(RoomKey(rank + 1, 0), "x")]


@pytest.mark.parametrize("how", ["SIGTERM", "Admin.Drain"])
async def test_ranks_leave_together(peer: BootstrapPeer, how: str) -> None:
    async with node(peer, ranks=2) as one:
        await one.serving()
        first, second = await sessions(peer)
        one.engines[0].holds = BUSY
        if how == "Admin.Drain":
            second.send(Drain(float("inf")))
        else:
            await one.signal()
        await one.health(NOT_SERVING)
        for session in (first, second):
            await until(lambda s=session: s.of(Heartbeat)[-1].stats.draining, "it says so")  # type: ignore[misc]
        turns = one.engines[1].turns
        await until(lambda: one.engines[1].turns > turns + 10, "passes go by")
        assert not one.left
        assert Drained() not in second.reports, "it waits for the other"
        one.engines[0].holds = NodeStats()
        assert await one.exit_code() == 0
        for session in (first, second):
            assert Drained() in session.reports
        assert not any(engine.alive for engine in one.engines)


async def test_a_rank_that_fails_ends_all(peer: BootstrapPeer) -> None:
    def fail() -> bool:
        raise ValueError("broken")

    async with node(peer, ranks=2) as one:
        await one.serving()
        one.engines[1].on_step = fail
        assert await one.exit_code() == 1
        assert not any(engine.alive for engine in one.engines)


async def test_a_rank_that_is_refused_ends_all(peer: BootstrapPeer) -> None:
    async def refuse(_: Any) -> None:
        if peer.dialled == 2:
            raise Refused("page_size is 8, here 16", field="page_size")
        await asyncio.sleep(10)

    peer.on_attach = refuse
    async with node(peer, ranks=2) as one:
        assert await one.exit_code() == 1
