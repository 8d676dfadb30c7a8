"""What nodes call: one session stream and one output stream each."""

# ruff: noqa: N802  (the .proto names the methods)

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from bootstrap.config import BootstrapConfig
from bootstrap.front import FrontDoor
from bootstrap.registry import Node
from engine.core.errors import InvalidField, InvalidRequest, KVRelayError, Refused, Unavailable
from engine.core.messages import Command, Registration
from engine.core.types import RoomKey
from kvrelay.v1 import bootstrap_pb2 as pb
from kvrelay.v1 import bootstrap_pb2_grpc as pb_grpc
from rpc.session import NODE_METADATA
from rpc.wire import command_to_wire, registration_from_wire, report_from_wire, step_output_from_wire

__all__ = ["NodesServicer"]

Context = grpc.aio.ServicerContext[Any, Any]
log = logging.getLogger("kvrelay.bootstrap")

REGISTER_TIMEOUT_S = 10.0
MAX_UNREAD = 10_000  # messages to a node which it has not read yet; beyond that nothing is read of it


class _StreamLink:
    """What a node is to be sent, until its session ends."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[pb.NodeCommand | None] = asyncio.Queue()
        self._read = asyncio.Event()  # set whenever the node has read a message
        self._error: KVRelayError | None = None
        self._acknowledged = 0

    def send(self, command: Command) -> None:
        self._messages.put_nowait(command_to_wire(command))

    def acknowledge(self) -> None:
        """Answer a heartbeat. Behind everything that was sent before it was read."""
        self._acknowledged += 1
        self._messages.put_nowait(pb.NodeCommand(heartbeat_ack=self._acknowledged))

    def close(self, error: KVRelayError | None) -> None:
        self._error = error
        self._messages.put_nowait(None)

    async def caught_up(self) -> None:
        """Until the node has read most of what it was sent. One that never does is silent then, and its lease ends."""
        while self._messages.qsize() > MAX_UNREAD:
            self._read.clear()
            await self._read.wait()

    async def messages(self) -> AsyncIterator[pb.NodeCommand]:
        """Until closed; raises what it was closed with."""
        while (message := await self._messages.get()) is not None:
            yield message
            self._read.set()
        if self._error is not None:
            raise self._error


class NodesServicer(pb_grpc.BootstrapServicer):
    """kvrelay.v1.Bootstrap."""

    def __init__(self, config: BootstrapConfig, front: FrontDoor):
        self._front = front
        self._welcome = pb.Welcome(heartbeat_seconds=config.heartbeat_seconds, lease_seconds=config.lease_seconds)

    async def Attach(self, reports: AsyncIterator[pb.NodeReport], context: Context) -> AsyncIterator[pb.NodeCommand]:
        link = _StreamLink()
        node = self._front.join(await _registration(reports), link)
        # Runs however the call ends. A node whose session ended is gone: it drops what came over it.
        context.add_done_callback(lambda _: self._front.leave(node, "its session ended"))  # type: ignore[arg-type]
        reader = asyncio.create_task(self._take_reports(node, link, reports))
        try:
            yield pb.NodeCommand(welcome=self._welcome)
            async for message in link.messages():
                yield message
        finally:
            reader.cancel()

    async def MayAttach(self, request: pb.Register, context: Context) -> pb.MayAttachResponse:
        self._front.registry.check(_read(request))
        return pb.MayAttachResponse()

    async def Publish(self, steps: AsyncIterator[pb.StepOutput], context: Context) -> pb.PublishEnd:
        node = self._attached(context)
        async for message in steps:
            if self._front.registry.get(node.node_id) is not node:
                raise Unavailable(f"the session of {node.identity} has ended", reason="NOT_ATTACHED")
            try:
                self._front.on_output(node, step_output_from_wire(message))
            except Exception as error:  # one step must not end a node's session
                self._front.not_taken(node, _rooms(message), error)
        return pb.PublishEnd()

    async def _take_reports(self, node: Node, link: _StreamLink, reports: AsyncIterator[pb.NodeReport]) -> None:
        """Until the node's side of the stream ends, or cannot be read any more."""
        unreadable = None
        try:
            async for message in reports:
                try:
                    report = report_from_wire(message)
                    if report is not None:
                        self._front.on_report(node, report)
                except InvalidField:  # it is wrong about itself, and has to begin anew
                    raise
                except Exception as error:  # as above
                    self._front.not_taken(node, _rooms(message), error)
                if message.HasField("heartbeat"):
                    link.acknowledge()
                await link.caught_up()
        except (KVRelayError, grpc.RpcError) as error:
            log.info("session broke", extra={"node": node.node_id, "error": str(error)})
            unreadable = error if isinstance(error, KVRelayError) else None
        link.close(unreadable)

    def _attached(self, context: Context) -> Node:
        """The node that says it is calling. Raises Refused when it has no session."""
        metadata = dict(context.invocation_metadata() or ())
        name = str(metadata.get(NODE_METADATA, ""))
        for node in self._front.registry.nodes():
            if str(node.identity) == name:
                return node
        raise Refused(f"no session of node {name!r}: attach first", reason="NOT_ATTACHED", node=name)


async def _registration(reports: AsyncIterator[pb.NodeReport]) -> Registration:
    """What every session begins with. Raises InvalidRequest, or Refused."""
    with contextlib.suppress(StopAsyncIteration, TimeoutError):
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            message = await anext(reports)
        if message.HasField("register"):
            return _read(message.register)
    raise InvalidRequest("a session begins with `register`", reason="NOT_REGISTERED")


def _read(message: pb.Register) -> Registration:
    """Raises Refused for values that no other try would change."""
    try:
        return registration_from_wire(message)
    except InvalidField as error:
        refused = Refused(str(error))
        refused.metadata = error.metadata
        raise refused from error


def _rooms(message: Message) -> Iterator[RoomKey]:
    """Every room that a message names, wherever it does."""
    if isinstance(message, pb.Room):
        yield RoomKey(message.room, message.epoch)
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in (value,) if isinstance(value, Message) else value:
                yield from _rooms(part)
