"""A node's session with a bootstrap that accepts, refuses, falls silent, drops it and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

import rpc.session
from engine.core.access import NodeAccess
from engine.core.errors import Overloaded, Refused, Unavailable
from engine.core.loop import Link
from engine.core.messages import Abort, Drain, Drained, Grant, Heartbeat, LinkLost, LinkUp, RoomFailed, StepOutput
from engine.core.types import RoomKey, TokenOutput
from kvrelay.v1 import bootstrap_pb2 as pb
from rpc.session import FIRST_BACKOFF_S, MAX_BACKOFF_S, Session, end
from tests.helpers.bootstrap_peer import BootstrapPeer, PeerSession, bootstrap_peer
from tests.helpers.cluster import free_port
from tests.helpers.tiny_engine import TinyEngine, registration, until

KEY = RoomKey(7, 0)
ABORTS = [Abort(RoomKey(i, 0), "x") for i in range(200)]
REGISTRATION = registration()


@pytest.fixture
async def peer() -> AsyncIterator[BootstrapPeer]:
    async with bootstrap_peer() as running:
        yield running


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.session, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(rpc.session, "MAX_BACKOFF_S", 0.05)


class Node:
    """A session with its engine, and the task it runs in."""

    def __init__(self, *addresses: str):
        self.engine = TinyEngine()
        self.drains: list[float] = []
        self.session = Session(addresses, REGISTRATION, self.engine, self.drains.append, NodeAccess())
        self.running: asyncio.Task[None] = asyncio.create_task(self.session.run())

    def links(self) -> list[Link]:
        """Every link the engine was told of, in order."""
        pairs = zip(self.engine.came_over, self.engine.taken, strict=True)
        return [link for link, item in pairs if isinstance(item, LinkUp) and link is not None]

    async def link(self, number: int = 1) -> Link:
        await until(lambda: len(self.links()) >= number, f"link {number}")
        return self.links()[number - 1]


@asynccontextmanager
async def node(*addresses: str) -> AsyncIterator[Node]:
    one = Node(*addresses)
    one.engine.start()
    try:
        yield one
    finally:
        await end(one.running)
        await asyncio.to_thread(one.engine.stop)


async def taken(one: Node, count: int) -> list[Any]:
    """The first `count` things the engine was handed, once there are as many; no more may have come."""
    await until(lambda: len(one.engine.taken) >= count, f"{count} items: {one.engine.taken}")
    assert len(one.engine.taken) == count
    return list(one.engine.taken)


# ---- while all is well ----


async def test_a_node_introduces_itself_and_both_sides_talk(peer: BootstrapPeer) -> None:
    async with node(peer.address) as one:
        session = await peer.session()
        assert session.registration == REGISTRATION
        session.send(*ABORTS)
        assert await taken(one, 1 + len(ABORTS)) == [LinkUp(), *ABORTS]
        link = await one.link()
        assert set(one.engine.came_over) == {link} == set(one.session.connections)
        said = [Grant(KEY, (i,), -i) for i in range(200)]
        for report in said:
            await asyncio.to_thread(link.report, report)
        await until(lambda: session.of(Grant) == said, "every report, in order")
        steps = [StepOutput((TokenOutput(KEY, i, 5, -0.5),)) for i in range(200)]
        for step in steps:
            link.publish(step)
        await until(lambda: peer.outputs == steps, "every output, in order")
        assert peer.publishers == [str(REGISTRATION.identity)]
        assert link.lease_valid()
        heartbeats = session.heartbeats
        await until(lambda: session.heartbeats > heartbeats + 2, "heartbeats go on")


async def test_heartbeats_say_what_the_engine_holds_now(peer: BootstrapPeer) -> None:
    async with node(peer.address) as one:
        session = await peer.session()
        one.engine.begin_drain()
        await one.session.flush()
        assert session.reports[-1] == Heartbeat(one.engine.stats())
        assert one.engine.stats().draining


async def test_drain_is_for_the_process_not_for_the_engine(peer: BootstrapPeer) -> None:
    async with node(peer.address) as one:
        (await peer.session()).send(Drain(4.5), ABORTS[0], Drain(float("inf")))
        assert await taken(one, 2) == [LinkUp(), ABORTS[0]]
        await until(lambda: one.drains == [4.5, float("inf")], "both were passed on")


async def test_what_cannot_be_read_is_skipped(peer: BootstrapPeer) -> None:
    unknown = pb.NodeCommand.FromString(b"\xa2\x06\x02hi")  # field 100: of a newer version
    unreadable = pb.NodeCommand(submit=pb.Submit(page_keys=b"123"))
    async with node(peer.address) as one:
        session = await peer.session()
        session.send(unknown, pb.NodeCommand(), unreadable, peer.welcome, ABORTS[1])
        assert await taken(one, 2) == [LinkUp(), ABORTS[1]]
        assert not session.over


# ---- connections end ----


@pytest.mark.parametrize("ending", ["in good order", "with an error", "the process dies"])
async def test_each_connection_is_told_up_and_lost_once(peer: BootstrapPeer, ending: str) -> None:
    async with node(peer.address) as one:
        for round_ in range(1, 4):
            session = await peer.session(round_)
            session.send(ABORTS[round_])
            await taken(one, 3 * round_ - 1)
            if ending == "the process dies":
                await peer.stop()
                await peer.start()
            else:
                session.end(None if ending == "in good order" else Unavailable("shutting down"))
            await peer.session(round_ + 1)
        told = await taken(one, 10)
        assert told == [*(item for i in (1, 2, 3) for item in (LinkUp(), ABORTS[i], LinkLost())), LinkUp()]
        links = one.links()
        assert one.engine.came_over == [link for link in links[:3] for _ in range(3)] + links[3:]
        assert len(set(links)) == 4
        assert one.engine.links == {links[3]}
        assert set(one.session.connections) == {links[3]}


async def test_a_dead_link_says_nothing(peer: BootstrapPeer) -> None:
    async with node(peer.address) as one:
        (await peer.session()).end()
        dead, living = await one.link(), await one.link(2)
        assert (dead.lease_valid(), living.lease_valid()) == (False, True)
        dead.report(RoomFailed(KEY, "decoding", "late"))
        dead.publish(StepOutput((TokenOutput(KEY, 0, 1, 0.0),)))
        living.report(Drained())
        await one.session.flush()
        session = await peer.session(2)
        assert session.of(Drained)
        assert not session.of(RoomFailed)
        assert not peer.outputs


async def test_a_bootstrap_that_comes_up_later_is_found() -> None:
    peer = BootstrapPeer(0.03, 30)
    peer.port = free_port()
    async with node(peer.address) as one:
        await asyncio.sleep(0)
        assert not one.session.connections
        await peer.start()
        await one.link()
        await peer.stop()
        await until(lambda: not one.session.connections, "the loss is noticed")
        await peer.start()
        await one.link(2)
    await peer.stop()


async def test_two_bootstraps_do_not_disturb_each_other(peer: BootstrapPeer) -> None:
    async with bootstrap_peer() as other, node(peer.address, other.address) as one:
        first, second = await peer.session(), await other.session()
        await one.link(2)
        for _ in range(3):
            await other.stop()
            await other.start()
            await until(lambda: len(one.session.connections) == 2, "it is back")
        assert not first.over
        assert second.over
        first.send(ABORTS[0])
        await until(lambda: ABORTS[0] in one.engine.taken, "the first session goes on")
        await one.session.flush()


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name not in ("OK", "FAILED_PRECONDITION")])
async def test_any_other_status_than_a_refusal_means_try_again(peer: BootstrapPeer, code: grpc.StatusCode) -> None:
    async def turn_away(context: Any) -> None:
        await context.abort(code, "not now")

    peer.on_attach = turn_away
    async with node(peer.address) as one:
        await until(lambda: peer.dialled >= 2, "it dials again")
        assert not one.engine.taken
        peer.on_attach = None
        await one.link()
        peer.on_attach = turn_away
        session = await peer.session()
        session.end(_status(code))
        dialled = peer.dialled
        await until(lambda: peer.dialled >= dialled + 2, "it dials again after a session, too")
        peer.on_attach = None
        await one.link(2)
        assert not one.running.done()


def _status(code: grpc.StatusCode) -> Exception:
    error = Overloaded("not now")
    error.code = code.name
    return error


async def test_an_answer_that_is_no_welcome(peer: BootstrapPeer) -> None:
    good, peer.welcome = peer.welcome, pb.NodeCommand(heartbeat_ack=1)
    async with node(peer.address) as one:
        await until(lambda: peer.dialled >= 3, "it dials again")
        assert not one.engine.taken
        peer.welcome = good
        await one.link()


async def test_a_bootstrap_that_never_answers(peer: BootstrapPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.session, "ANSWER_TIMEOUT_S", 0.05)

    async def say_nothing(_: Any) -> None:
        await asyncio.Event().wait()

    peer.on_attach = say_nothing
    async with node(peer.address) as one:
        await until(lambda: peer.dialled >= 2, "it dials again")
        peer.on_attach = None
        monkeypatch.undo()
        await one.link()


@pytest.mark.parametrize("when", ["before there is any", "while it is being written"])
async def test_output_that_is_not_taken_ends_the_session_but_not_the_node(peer: BootstrapPeer, when: str) -> None:
    """To be refused by Publish is no refusal of the node: its session may just have ended on the other side."""
    written = asyncio.Event()

    async def not_attached(_: Any) -> None:
        if when == "while it is being written":
            await written.wait()
        raise Refused("no session of this node: attach first", reason="NOT_ATTACHED")

    peer.on_publish = not_attached
    async with node(peer.address) as one:
        link = await one.link()
        await until(lambda: bool(peer.publishers), "Publish began")
        peer.on_publish = None
        large = StepOutput((TokenOutput(KEY, 0, 1, 0.0),) * 10_000)  # more than fits into the pipe unread
        for _ in range(4):
            link.publish(large)
        await one.session.flush()
        written.set()
        await one.link(2)
        assert not link.lease_valid()
        assert one.engine.taken == [LinkUp(), LinkLost(), LinkUp()]
        assert not one.running.done()


async def refuse(_: Any) -> None:
    raise Refused("page_size is 8, here 16", field="page_size")


async def test_a_node_that_was_never_taken_in_gives_up_with_the_reason(peer: BootstrapPeer) -> None:
    peer.on_attach = refuse
    async with node(f"127.0.0.1:{free_port()}", peer.address) as one:
        with pytest.raises(ExceptionGroup) as caught:
            await one.running
        (refusal,) = caught.value.exceptions
        assert isinstance(refusal, Refused)
        assert (str(refusal), refusal.metadata) == ("page_size is 8, here 16", {"field": "page_size"})
        assert peer.dialled == 1
        assert not one.engine.taken


@pytest.mark.parametrize("refused_by", ["the same", "another"])
async def test_a_node_that_was_taken_in_once_tries_again(peer: BootstrapPeer, refused_by: str) -> None:
    """Its cluster may have changed, and may change back."""
    other = BootstrapPeer(0.03, 30)
    other.port = free_port()
    async with node(peer.address, other.address) as one:
        session, refusing = await peer.session(), peer if refused_by == "the same" else other
        refusing.on_attach = refuse
        if refusing is peer:
            session.end(Refused("page_size is 8, here 16", field="page_size"))
        else:
            await other.start()
        dialled = refusing.dialled
        await until(lambda: refusing.dialled >= dialled + 2, "it tries again")
        assert session.over == (refusing is peer)
        refusing.on_attach = None
        await one.link(2)
        assert not one.running.done()
    await other.stop()


async def test_replaced_by_a_newer_process(peer: BootstrapPeer) -> None:
    async with node(peer.address) as one:
        (await peer.session()).end(Refused("replaced by a new session", reason="NODE_REPLACED"))
        with pytest.raises(ExceptionGroup, match="unhandled errors") as caught:
            await one.running
        assert [error.reason for error in caught.value.exceptions if isinstance(error, Refused)] == ["NODE_REPLACED"]
        assert await taken(one, 2) == [LinkUp(), LinkLost()]


async def test_leaving_ends_the_stream_and_the_link(peer: BootstrapPeer) -> None:
    async with node(peer.address) as one:
        session, link = await peer.session(), await one.link()
        await end(one.running)
        assert await taken(one, 2) == [LinkUp(), LinkLost()]
        assert not link.lease_valid()
        await until(lambda: session.over, "the other side sees it")
        assert peer.dialled == 1


async def test_it_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    delays: list[float] = []
    sleep = asyncio.sleep

    async def note(delay: float) -> None:
        delays.append(delay)
        await sleep(0)

    one = Session([f"127.0.0.1:{free_port()}"], REGISTRATION, TinyEngine(), lambda _: None, NodeAccess())
    monkeypatch.setattr(asyncio, "sleep", note)
    running = asyncio.create_task(one.run())
    while len(delays) < 8:
        await sleep(0.001)
    await end(running)
    for i, delay in enumerate(delays):
        most = min(FIRST_BACKOFF_S * 2**i, MAX_BACKOFF_S)
        assert most / 2 <= delay <= most


# ---- heartbeats are answered, or not ----


async def test_without_answers_the_lease_runs_out() -> None:
    async with bootstrap_peer(heartbeat_s=0.02, lease_s=0.25) as peer, node(peer.address) as one:
        link, session = await one.link(), await peer.session()
        for _ in range(2):
            assert link.lease_valid()
            peer.acknowledging = False
            await until(lambda: not link.lease_valid(), "the lease runs out")
            assert not session.over, "silence alone does not end a session"
            peer.acknowledging = True
            await until(link.lease_valid, "and is good again")
        assert one.engine.taken == [LinkUp()]


async def flushing(one: Node, session: PeerSession) -> asyncio.Task[None]:
    """A flush whose heartbeat has been read, and which still waits."""
    before = session.heartbeats
    task = asyncio.create_task(one.session.flush())
    await until(lambda: session.heartbeats >= before + 3, "heartbeats, that of the flush among them")
    assert not task.done()
    return task


async def test_flush_returns_once_all_that_was_said_has_been_read(peer: BootstrapPeer) -> None:
    async with node(peer.address) as one:
        session, link = await peer.session(), await one.link()
        for _ in range(3):
            link.report(Drained())
            await one.session.flush()
            assert session.reports[-1] != Drained()
            assert Drained() in session.reports
            session.reports.clear()
        peer.acknowledging = False
        task = await flushing(one, session)
        peer.acknowledging = True
        await task


async def test_an_answer_to_an_earlier_heartbeat_does_not_end_a_flush(peer: BootstrapPeer) -> None:
    peer.welcome.welcome.heartbeat_seconds = 3600
    peer.acknowledging = False
    async with node(peer.address) as one:
        session = await peer.session()
        await until(lambda: session.heartbeats == 1, "the first heartbeat")
        task = asyncio.create_task(one.session.flush())
        await until(lambda: session.heartbeats == 2, "that of the flush")
        session.send(pb.NodeCommand(heartbeat_ack=1), ABORTS[0])
        await until(lambda: ABORTS[0] in one.engine.taken, "what came behind the first answer")
        assert not task.done()
        session.send(pb.NodeCommand(heartbeat_ack=2))
        await task


@pytest.mark.parametrize("ending", ["dropped", "left"])
async def test_flush_does_not_outlive_its_connection(peer: BootstrapPeer, ending: str) -> None:
    async with node(peer.address) as one:
        await one.link()
        session = await peer.session()
        peer.acknowledging = False
        task = await flushing(one, session)
        if ending == "dropped":
            session.end()
        else:
            await end(one.running)
        await task


async def test_flush_waits_for_every_bootstrap(peer: BootstrapPeer) -> None:
    async with bootstrap_peer() as other, node(peer.address, other.address) as one:
        await one.link(2)
        session = await other.session()
        other.acknowledging = False
        task = await flushing(one, session)
        session.acknowledge()
        await task


async def test_flush_with_nobody_attached_returns_at_once() -> None:
    async with node(f"127.0.0.1:{free_port()}") as one:
        await one.session.flush()
