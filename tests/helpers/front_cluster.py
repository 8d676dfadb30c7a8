"""A real bootstrap service on a free port, nodes played by the test, and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bootstrap.config import BootstrapConfig
from bootstrap.server import BootstrapServer
from bootstrap.text import TextModel
from engine.core.errors import KVRelayError
from engine.core.messages import Grant, NodeStats, Reserve, Submit
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey, TokenOutput
from kvrelay.v1 import admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from rpc.errors import from_rpc_error
from tests.helpers.front_door import SERVING, registration
from tests.helpers.stub_node import StubNode
from tests.helpers.tiny_tokenizer import prepared_model, write_model

__all__ = ["FrontCluster", "Reply", "assert_soon", "front_cluster", "text_tokens"]

HEARTBEAT_S, LEASE_S = 0.2, 1.0
PATIENCE_S = 10.0
GREEDY = {"temperature": 0.0}


async def assert_soon(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition()` holds; fail naming `what` when it does not in time."""
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {PATIENCE_S:g} s: {what}")


def text_tokens(text: TextModel, key: RoomKey, answer: str, finish: FinishReason | None = None) -> list[TokenOutput]:
    """The tokens that spell `answer`, from index 0 on, the last one with `finish`."""
    ids = text.encode(answer)
    ends = [None] * (len(ids) - 1) + [finish]
    return [TokenOutput(key, i, id, -0.5, end) for i, (id, end) in enumerate(zip(ids, ends, strict=True))]


@dataclass
class Reply:
    """One whole stream, taken apart as it comes."""

    call: Any
    started: generation_pb2.Started | None = None
    indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    deltas: int = 0
    finished: generation_pb2.Finished | None = None

    async def read(self) -> bool:
        """One message; False at the end of the stream. Raises the named error the call ended with."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                message = await self.call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            return False
        match message.WhichOneof("event"):
            case "started":
                self.started = message.started
            case "delta":
                assert self.started is not None
                self.deltas += 1
                self.indices += range(message.delta.index, message.delta.index + len(message.delta.token_ids))
                self.token_ids += message.delta.token_ids
                self.logprobs += message.delta.logprobs
                self.text += message.delta.text
            case "finished":
                self.finished = message.finished
                self.text += message.finished.text
        return True

    async def to_end(self) -> Reply:
        while await self.read():
            assert self.indices == list(range(len(self.indices))), "every index once, in order"
        assert self.finished is not None
        return self

    async def error(self) -> KVRelayError:
        """The error that this call must end with."""
        try:
            await self.to_end()
        except KVRelayError as error:
            return error
        raise AssertionError("the call succeeded")


class FrontCluster:
    def __init__(self, server: BootstrapServer, channel: grpc.aio.Channel, text: TextModel):
        self.server = server
        self.front = server.front
        self.text = text
        self.channel = channel
        self.generation: Any = generation_pb2_grpc.GenerationStub(channel)
        self.admin: Any = admin_pb2_grpc.AdminStub(channel)
        self.nodes: list[StubNode] = []

    async def join(self, role: Role, node_id: str = "", stats: NodeStats = SERVING, **fields: Any) -> StubNode:
        node = StubNode(self.channel, registration(role, node_id, **fields), stats, HEARTBEAT_S)
        self.nodes.append(node)
        await node.attach()
        return node

    async def pair(self) -> tuple[StubNode, StubNode]:
        return await self.join(Role.PREFILL), await self.join(Role.DECODE)

    def generate(self, prompt: str | None = "hello", timeout: float | None = PATIENCE_S, **fields: Any) -> Reply:
        """A call with the text `prompt`, or with whatever prompt `fields` hold."""
        fields.setdefault("sampling", GREEDY)
        request = generation_pb2.GenerateRequest(**fields)
        if prompt is not None:
            request.text = prompt
        return Reply(self.generation.Generate(request, timeout=timeout))

    async def bound(self, prefill: StubNode, decode: StubNode) -> RoomKey:
        """Play the next request as far as the grant."""
        key = (await prefill.expect(Submit)).task.key
        assert (await decode.expect(Reserve)).reservation.key == key
        await decode.report(Grant(key, (1, 2), 300))
        return key

    async def idle(self) -> None:
        """Until no request is live; then all books are right."""
        await assert_soon(lambda: not self.front.requests, "no request is live")
        self.front.check_integrity()

    async def close(self) -> None:
        for node in self.nodes:
            await node.leave()
        await assert_soon(lambda: not len(self.front.registry), "every node has left")
        await self.idle()
        await self.channel.close(None)
        await self.server.stop()


@asynccontextmanager
async def front_cluster(directory: Path, **options: Any) -> AsyncIterator[FrontCluster]:
    options = {"listen": "127.0.0.1:0", "heartbeat_seconds": HEARTBEAT_S, "lease_seconds": LEASE_S, **options}
    config = BootstrapConfig(**options)
    text = TextModel.load(write_model(directory))
    server = BootstrapServer(config, prepared_model(directory), text)
    await server.start()
    channel = grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}",
        options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
    )
    cluster = FrontCluster(server, channel, text)
    try:
        yield cluster
    finally:
        await cluster.close()
