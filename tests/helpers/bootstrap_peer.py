"""The bootstrap side of Attach and Publish, played by a test: it accepts, refuses, falls silent, drops, comes back."""

# ruff: noqa: N802  (the .proto names the methods)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from engine.core.errors import KVRelayError
from engine.core.messages import Command, Registration, Report, StepOutput
from kvrelay.v1 import bootstrap_pb2 as pb
from kvrelay.v1 import bootstrap_pb2_grpc as pb_grpc
from rpc.server import RpcServer
from rpc.session import NODE_METADATA
from rpc.wire import command_to_wire, registration_from_wire, report_from_wire, step_output_from_wire
from tests.helpers.tiny_engine import until

__all__ = ["BootstrapPeer", "PeerSession", "bootstrap_peer"]

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R", bound=Report)


class PeerSession:
    """One Attach stream: what the node said on it, and what it is told."""

    def __init__(self, registration: Registration):
        self.registration = registration
        self.reports: list[Report] = []
        self.heartbeats = 0
        self.over = False
        self.messages: asyncio.Queue[pb.NodeCommand | Exception | None] = asyncio.Queue()
        self._acked = 0

    def send(self, *commands: Command | pb.NodeCommand) -> None:
        for command in commands:
            self.messages.put_nowait(command if isinstance(command, pb.NodeCommand) else command_to_wire(command))

    def acknowledge(self) -> None:
        """Answer every heartbeat that came so far."""
        while self._acked < self.heartbeats:
            self._acked += 1
            self.send(pb.NodeCommand(heartbeat_ack=self._acked))

    def end(self, error: Exception | None = None) -> None:
        """End the stream, in good order or with an error."""
        self.messages.put_nowait(error)

    def of(self, kind: type[R]) -> list[R]:
        return [report for report in self.reports if isinstance(report, kind)]


class BootstrapPeer(pb_grpc.BootstrapServicer):
    """Takes every node in, and acknowledges its heartbeats, unless told otherwise."""

    def __init__(self, heartbeat_s: float, lease_s: float):
        self.welcome = pb.NodeCommand(welcome=pb.Welcome(heartbeat_seconds=heartbeat_s, lease_seconds=lease_s))
        self.sessions: list[PeerSession] = []
        self.outputs: list[StepOutput] = []
        self.publishers: list[str] = []
        self.acknowledging = True
        self.dialled = 0
        self.on_attach: Callable[[Context], Any] | None = None  # awaited in place of the welcome
        self.on_publish: Callable[[Context], Any] | None = None
        self.port = 0
        self._server: RpcServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; again on the same port after `stop`."""
        self._server = RpcServer(
            f"127.0.0.1:{self.port}", add=lambda server: pb_grpc.add_BootstrapServicer_to_server(self, server)
        )
        self.port = self._server.port
        await self._server.start()

    async def stop(self) -> None:
        """The process is gone: streams break, the port is free."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def session(self, number: int = 1) -> PeerSession:
        """The `number`th session a node began."""
        await until(lambda: len(self.sessions) >= number, f"session {number}")
        return self.sessions[number - 1]

    async def Attach(self, reports: AsyncIterator[pb.NodeReport], context: Context) -> AsyncIterator[pb.NodeCommand]:
        self.dialled += 1
        register = (await anext(reports)).register
        if self.on_attach is not None:
            await self.on_attach(context)
            return
        session = PeerSession(registration_from_wire(register))
        reader = asyncio.create_task(self._read(session, reports))
        try:
            yield self.welcome
            self.sessions.append(session)
            while (message := await session.messages.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            session.over = True
            reader.cancel()

    async def _read(self, session: PeerSession, reports: AsyncIterator[pb.NodeReport]) -> None:
        try:
            async for message in reports:
                report = report_from_wire(message)
                assert report is not None
                session.reports.append(report)
                session.heartbeats += message.HasField("heartbeat")
                if self.acknowledging:
                    session.acknowledge()
        except (grpc.RpcError, KVRelayError):
            return

    async def Publish(self, steps: AsyncIterator[pb.StepOutput], context: Context) -> pb.PublishEnd:
        self.publishers.append(str(dict(context.invocation_metadata() or ())[NODE_METADATA]))
        if self.on_publish is not None:
            await self.on_publish(context)
        async for step in steps:
            self.outputs.append(step_output_from_wire(step))
        return pb.PublishEnd()


@asynccontextmanager
async def bootstrap_peer(heartbeat_s: float = 0.03, lease_s: float = 30.0) -> AsyncIterator[BootstrapPeer]:
    peer = BootstrapPeer(heartbeat_s, lease_s)
    await peer.start()
    try:
        yield peer
    finally:
        await peer.stop()
