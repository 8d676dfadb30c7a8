"""A node's side of Attach and Publish: one task a bootstrap address, dialling again with back-off for ever.

A `Connection` is the `Link` of one stream's life. The engine keeps the link a request came over and answers on it;
when the stream ends the link is dead for good, the engine is told, and the next stream brings a new link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from engine.core.access import NodeAccess
from engine.core.errors import KVRelayError, Refused, Unauthenticated, Unavailable
from engine.core.loop import EngineLoop
from engine.core.messages import Drain, Heartbeat, LinkLost, LinkUp, Registration, Report, StepOutput
from kvrelay.v1 import bootstrap_pb2 as pb
from kvrelay.v1 import bootstrap_pb2_grpc as pb_grpc
from rpc.errors import from_rpc_error
from rpc.security import CHANNEL_OPTIONS, JOIN_TOKEN_METADATA, JOIN_TOKEN_REASONS, open_channel_aio
from rpc.wire import command_from_wire, registration_to_wire, report_to_wire, step_output_to_wire

__all__ = ["NODE_METADATA", "Session", "is_refusal", "join_token"]

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
log = logging.getLogger("kvrelay.session")

NODE_METADATA = "kvrelay-node"  # on Publish: "<node id>:<incarnation>"
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 3.0
ANSWER_TIMEOUT_S = 10.0
SAY_AGAIN_S = 30.0  # between log lines of an address that cannot be reached
REPLACED = "NODE_REPLACED"  # reason of the refusal that ends a node whose id a newer process has registered


def is_refusal(error: BaseException) -> bool:
    """Whether a bootstrap said that it will not have this node: it does not fit, or lacks the cluster's join token."""
    return isinstance(error, Refused) or (isinstance(error, Unauthenticated) and error.reason in JOIN_TOKEN_REASONS)


def join_token(access: NodeAccess) -> tuple[tuple[str, str], ...]:
    """Metadata of every call to a bootstrap."""
    return () if access.join_token is None else ((JOIN_TOKEN_METADATA, access.join_token),)


class Connection:
    """Queues into one Attach and one Publish stream. `report`, `publish` and `lease_valid` work on any thread."""

    def __init__(self, address: str, welcome: pb.Welcome):
        self.address = address
        self.heartbeat_s = welcome.heartbeat_seconds
        self._lease_s = welcome.lease_seconds
        self._loop = asyncio.get_running_loop()
        self._acked_at = time.monotonic()
        self._heartbeats = self._acks = 0
        self._acked = asyncio.Condition()
        self.alive = True
        self.reports: asyncio.Queue[pb.NodeReport] = asyncio.Queue()
        self.outputs: asyncio.Queue[pb.StepOutput] = asyncio.Queue()

    def report(self, report: Report) -> None:
        if self.alive:
            self._loop.call_soon_threadsafe(self._enqueue, report_to_wire(report))

    def publish(self, output: StepOutput) -> None:
        if self.alive:
            self._loop.call_soon_threadsafe(self.outputs.put_nowait, step_output_to_wire(output))

    def lease_valid(self) -> bool:
        return self.alive and time.monotonic() - self._acked_at < self._lease_s

    def _enqueue(self, message: pb.NodeReport) -> None:
        self._heartbeats += message.HasField("heartbeat")
        self.reports.put_nowait(message)

    async def acknowledged(self) -> None:
        """A heartbeat was answered. Heartbeats are answered in order, so counting is enough."""
        self._acked_at = time.monotonic()
        async with self._acked:
            self._acks += 1
            self._acked.notify_all()

    async def flush(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat; return once it is answered, and with it everything sent before it was read."""
        self._enqueue(report_to_wire(heartbeat))
        target = self._heartbeats
        async with self._acked:
            await self._acked.wait_for(lambda: self._acks >= target or not self.alive)


class Session:
    """Keeps the node attached to every bootstrap address. Feeds the engine and carries what it reports.

    `on_drain(deadline_s)` is called when an operator asks this node to drain.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        registration: Registration,
        engine: EngineLoop[Any],
        on_drain: Callable[[float], None],
        access: NodeAccess,
    ):
        self._addresses = addresses
        self._registration = registration
        self._engine = engine
        self._on_drain = on_drain
        self._tls = access.tls
        self._token = join_token(access)
        self._welcomes: Counter[str] = Counter()  # times each bootstrap has taken this node in
        self.connections: set[Connection] = set()

    async def run(self) -> None:
        """Runs until cancelled. Raises a refusal when a bootstrap will not have this node and none ever had.

        Also when a new process has taken this node's id.
        """
        async with asyncio.TaskGroup() as group:
            for address in self._addresses:
                group.create_task(self._keep_attached(address))

    async def flush(self) -> None:
        """Return once every attached bootstrap has read the engine's present stats and all reports before them."""
        heartbeat = Heartbeat(self._engine.stats())
        await asyncio.gather(*(connection.flush(heartbeat) for connection in tuple(self.connections)))

    async def _keep_attached(self, address: str) -> None:
        backoff, said_at = FIRST_BACKOFF_S, -SAY_AGAIN_S
        while True:
            began, welcomes = time.monotonic(), self._welcomes[address]
            try:
                await self._attach(address)
            except KVRelayError as error:
                # A cluster that has changed under a node that served it may change back; a node never taken in, or
                # one whose place another process has taken, is of no use.
                if is_refusal(error) and (not self._welcomes.total() or error.reason == REPLACED):
                    raise
                if self._welcomes[address] > welcomes:
                    said_at = -SAY_AGAIN_S  # a new failure, not the same one again
                    if time.monotonic() - began > MAX_BACKOFF_S:
                        backoff = FIRST_BACKOFF_S
                if time.monotonic() - said_at >= SAY_AGAIN_S:
                    said_at = time.monotonic()
                    log.warning("no bootstrap; trying again", extra={"address": address, "error": str(error)})
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _attach(self, address: str) -> None:
        """One connection's life. Always ends with a KVRelayError."""
        async with open_channel_aio(address, self._tls, CHANNEL_OPTIONS) as channel:
            stub = pb_grpc.BootstrapStub(channel)
            attach = stub.Attach(metadata=self._token)
            try:
                with contextlib.suppress(asyncio.InvalidStateError):  # turned away already: reading says why
                    await attach.write(pb.NodeReport(register=registration_to_wire(self._registration)))
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    first = await attach.read()
                if first is EOF or not first.HasField("welcome"):
                    raise Unavailable(f"{address} ended the session before it began")
                await self._converse(address, first.welcome, attach, stub)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            except TimeoutError as error:
                raise Unavailable(f"{address} did not answer within {ANSWER_TIMEOUT_S:g} s") from error
            except asyncio.InvalidStateError as error:  # a write on a stream the server has ended
                raise Unavailable(f"{address} ended the session") from error
            finally:
                attach.cancel()

    async def _converse(self, address: str, welcome: pb.Welcome, attach: Any, stub: pb_grpc.BootstrapStub) -> None:
        connection = Connection(address, welcome)
        publish = stub.Publish(metadata=((NODE_METADATA, str(self._registration.identity)), *self._token))
        self._welcomes[address] += 1
        self.connections.add(connection)
        self._engine.post(connection, LinkUp())
        log.info("attached", extra={"address": address})
        tasks = [
            asyncio.create_task(self._receive(connection, attach)),
            asyncio.create_task(self._publish(connection, publish)),
            asyncio.create_task(self._beat(connection)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            connection.alive = False
            self.connections.discard(connection)
            self._engine.post(connection, LinkLost())
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            publish.cancel()
            await connection.acknowledged()  # wakes a flush that waits on this dead connection
        for result in results:
            if isinstance(result, Exception):
                raise result
        raise Unavailable(f"{address} ended the session")

    async def _beat(self, connection: Connection) -> None:
        while True:
            connection.report(Heartbeat(self._engine.stats()))
            await asyncio.sleep(connection.heartbeat_s)

    async def _publish(self, connection: Connection, publish: Any) -> None:
        """Send output until that stream ends, which is noticed also while there is none."""
        async with _writing(connection.outputs, publish):
            try:
                await publish
            except grpc.RpcError as error:  # whatever the status: output refused is not the node refused
                raise Unavailable(f"{connection.address} takes no output: {from_rpc_error(error)}") from error

    async def _receive(self, connection: Connection, attach: Any) -> None:
        async with _writing(connection.reports, attach):
            while (message := await attach.read()) is not EOF:
                if message.HasField("heartbeat_ack"):
                    await connection.acknowledged()
                    continue
                try:
                    self._take(connection, message)
                except Exception:  # one command must not end the session, and with it every room it carries
                    log.exception("command not taken in", extra={"kind": message.WhichOneof("command")})

    def _take(self, connection: Connection, message: pb.NodeCommand) -> None:
        try:
            command = command_from_wire(message)
        except KVRelayError as error:
            log.error("unreadable command", extra={"address": connection.address, "error": str(error)})
            return
        match command:
            case None:
                log.warning("unknown command", extra={"kind": message.WhichOneof("command")})
            case Drain(deadline_s):
                self._on_drain(deadline_s)
            case _:
                self._engine.post(connection, command)


@contextlib.asynccontextmanager
async def _writing(queue: asyncio.Queue[Any], call: Any) -> AsyncIterator[None]:
    """Meanwhile, write to the call what comes into the queue."""
    writer = asyncio.create_task(_write(queue, call))
    try:
        yield
    finally:
        await end(writer)


async def _write(queue: asyncio.Queue[Any], call: Any) -> None:
    try:
        while True:
            await call.write(await queue.get())
    except (grpc.RpcError, asyncio.InvalidStateError):
        return  # the call has ended: whoever reads it learns why
    except Exception:
        log.exception("not written")
        call.cancel()


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for it, however it ends or has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
