"""A node for tests of the front door: speaks Attach and Publish, and says exactly what the test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

import grpc

from engine.core.messages import Command, Heartbeat, NodeStats, Registration, Report, StepOutput
from engine.core.types import TokenOutput
from kvrelay.v1 import bootstrap_pb2 as pb
from kvrelay.v1 import bootstrap_pb2_grpc as pb_grpc
from rpc.session import NODE_METADATA
from rpc.wire import command_from_wire, registration_to_wire, report_to_wire, step_output_to_wire

__all__ = ["StubNode"]

PATIENCE_S = 10.0
C = TypeVar("C", bound=Command)


class StubNode:
    """Attached from `attach` to `leave`. Commands are kept until a test asks for them."""

    def __init__(self, channel: grpc.aio.Channel, registration: Registration, stats: NodeStats, beat_s: float):
        self._stub = pb_grpc.BootstrapStub(channel)
        self.registration = registration
        self.stats = stats
        self._beat_s = beat_s
        self._commands: list[Command] = []
        self._arrived = asyncio.Condition()
        self._acks = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._writing = asyncio.Lock()

    async def attach(self) -> pb.Welcome:
        """Returns once the front door has read that this node serves. Raises grpc.RpcError when it is refused."""
        self._session: Any = self._stub.Attach()
        await self._session.write(pb.NodeReport(register=registration_to_wire(self.registration)))
        first = await self._session.read()
        assert first.HasField("welcome"), "the first message is the welcome"
        self._output: Any = self._stub.Publish(metadata=((NODE_METADATA, str(self.registration.identity)),))
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]
        async with self._arrived, asyncio.timeout(PATIENCE_S):
            await self._arrived.wait_for(lambda: self._acks > 0)
        return first.welcome  # type: ignore[no-any-return]

    async def leave(self) -> None:
        """The process is gone: both streams break."""
        self._session.cancel()
        self._output.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ended(self) -> grpc.aio.AioRpcError:
        """How the front door ended the session."""
        async with asyncio.timeout(PATIENCE_S):
            code, details = await self._session.code(), await self._session.details()
            trailing = await self._session.trailing_metadata()
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None)

    async def expect(self, kind: type[C]) -> C:
        """The next command of this kind, taken out; others stay."""
        async with self._arrived:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._arrived.wait_for(lambda: any(isinstance(c, kind) for c in self._commands))
            except TimeoutError:
                raise AssertionError(f"{self.registration.identity} got no {kind.__name__}: {self._commands}") from None
            found = next(c for c in self._commands if isinstance(c, kind))
            self._commands.remove(found)
            return found

    async def has_no(self, kind: type[Command]) -> bool:
        """Whether none of this kind is there, after everything sent until now has arrived."""
        await self.beat()
        return not any(isinstance(command, kind) for command in self._commands)

    async def report(self, report: Report) -> None:
        await self.write(report_to_wire(report))

    async def write(self, message: pb.NodeReport) -> None:
        async with self._writing:
            await self._session.write(message)

    async def publish(self, tokens: Iterable[TokenOutput] = (), **reports: Any) -> None:
        await self._output.write(step_output_to_wire(StepOutput(tuple(tokens), **reports)))

    async def beat(self) -> None:
        """Send a heartbeat, return when it is answered."""
        target = self._acks + 1
        await self.report(Heartbeat(self.stats))
        async with self._arrived, asyncio.timeout(PATIENCE_S):
            await self._arrived.wait_for(lambda: self._acks >= target)

    async def _beat(self) -> None:
        while True:
            await self.report(Heartbeat(self.stats))
            await asyncio.sleep(self._beat_s)

    async def _receive(self) -> None:
        while (message := await self._session.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            async with self._arrived:
                command = command_from_wire(message)
                if command is not None:
                    self._commands.append(command)
                self._acks += message.HasField("heartbeat_ack")
                self._arrived.notify_all()
