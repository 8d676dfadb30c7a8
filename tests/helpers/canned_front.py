"""A real gRPC server that plays a front door: its answers are canned."""

# ruff: noqa: N802  # methods of a servicer are named as in the .proto

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from engine.core.errors import InvalidField, NotFound, Overloaded
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, types_pb2
from kvrelay.v1 import generation_pb2 as pb
from rpc.server import RpcServer

__all__ = ["Capture", "Front", "Run"]

Run = Callable[..., int]
Capture = pytest.CaptureFixture[str]


class CannedGeneration(generation_pb2_grpc.GenerationServicer):
    """Echoes the last message or text, word by word. Some prompts do something else."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.hurry = threading.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        prompt = request.text or (request.chat.messages[-1].content if request.chat.messages else "ids here")
        if prompt == "fail":
            raise InvalidField("sampling.top_p", 7.0, "above 0, at most 1")
        if prompt == "busy":
            raise Overloaded("the queue is full", retry_after=1.5, phase="queued")
        if request.model == "other":
            raise NotFound("model 'other' is not served here")
        yield pb.GenerateResponse(started=pb.Started(request_id=request.request_id or "r-1", prompt_tokens=3))
        if prompt == "slow":
            await asyncio.to_thread(self.hurry.wait, 10)
        for index, word in enumerate(prompt.split()):
            yield pb.GenerateResponse(delta=pb.Delta(index=index, token_ids=[100 + index], text=f"{word} "))
        if prompt == "for ever":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        yield pb.GenerateResponse(
            finished=pb.Finished(
                reason=types_pb2.FINISH_REASON_STOP,
                stop_token=2,
                text="end",
                usage=pb.Usage(prompt_tokens=3, cached_tokens=1, output_tokens=7),
                timing=pb.Timing(total=0.5, prefill=0.25, decode=0.1, relayed_bytes=2_000_000, relay=0.001, attempts=1),
            )
        )

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(name="tiny", max_context=2048, page_size=16)


class CannedAdmin(admin_pb2_grpc.AdminServicer):
    def __init__(self) -> None:
        self.drains: list[admin_pb2.DrainRequest] = []
        self.problems: list[str] = []
        self.set_aside: list[str] = []
        self.explanation = explanation()
        self.known_id = "r-7"
        self.busy = False

    def listing(self, *, running: int = 1, draining: bool = False, gone: bool = False) -> admin_pb2.ListNodesResponse:
        stats = types_pb2.NodeStats(
            pages_total=64, pages_free=50, pages_cached=14, running=running, serving=not draining, draining=draining,
            cached_tokens_total=30, computed_tokens_total=90, relayed_bytes_total=1_500_000,
        )  # fmt: skip
        node = admin_pb2.Node(node_id="prefill-0", incarnation="abc", role=types_pb2.ROLE_PREFILL, stats=stats)
        node.problems.extend(self.problems)
        node.set_aside.extend(self.set_aside)
        nodes = [] if gone else [node]
        if self.busy:
            numbers = {f.name: 12345 for f in stats.DESCRIPTOR.fields if f.name not in ("serving", "draining")}
            stats = types_pb2.NodeStats(serving=True, **numbers)  # type: ignore[arg-type]  # all are numbers
            nodes.append(admin_pb2.Node(node_id="decode-0", role=types_pb2.ROLE_DECODE, stats=stats))
        return admin_pb2.ListNodesResponse(nodes=nodes, queued_requests=2, live_requests=5)

    async def ListNodes(self, request: admin_pb2.ListNodesRequest, context: Any) -> admin_pb2.ListNodesResponse:
        return self.listing()

    async def ListRequests(self, request: Any, context: Any) -> admin_pb2.ListRequestsResponse:
        live = admin_pb2.LiveRequest(
            request_id=self.known_id, state="decoding", prefill_node="prefill-0", output_tokens=9
        )
        return admin_pb2.ListRequestsResponse(requests=[live])

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        self.drains.append(request)
        return admin_pb2.DrainResponse()

    async def Explain(self, request: admin_pb2.ExplainRequest, context: Any) -> admin_pb2.ExplainResponse:
        if request.request_id != self.known_id:
            raise NotFound("nobody here knows of a request", request_id=request.request_id)
        return self.explanation

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[admin_pb2.ListNodesResponse]:
        yield self.listing(running=2, draining=True)
        yield self.listing(running=1, draining=True)
        yield self.listing(gone=True)


def explanation() -> admin_pb2.ExplainResponse:
    """Of a request that waited for memory, was computed in two chunks, and whose first decode node was lost."""
    full = types_pb2.PassAccounts(rem_input=16384, rem_chunk=2048, total=1920, current=1920)
    before = types_pb2.PassAccounts(rem_input=16384, rem_chunk=2048, total=9000, current=9000)
    after = types_pb2.PassAccounts(rem_input=14336, rem_chunk=0, total=6936, current=6936)
    passes = [
        types_pb2.Considered(
            count=329, first_number=12, first_time=0.5, number=340, time=1.5, policy="lpm", in_effect="fcfs",
            position=3, waiting=17, wanted=2064, verdict="NO_TOKEN", refusal="memory", need=2080, left=1920,
            before=full, after=full,
        ),
        types_pb2.Considered(
            count=1, first_number=341, first_time=2, number=341, time=2, policy="lpm", in_effect="lpm", position=1,
            waiting=2, prefix=16, loaded=16, wanted=2064, extend=2048, chunked=True, verdict="OTHER",
            before=before, after=after,
        ),
        types_pb2.Considered(
            count=1, first_number=342, first_time=3, number=342, time=3, policy="lpm", in_effect="lpm",
            waiting=4, prefix=2064, wanted=16, extend=16, verdict="CONTINUE", before=before, after=before,
        ),
    ]  # fmt: skip

    def room(times: dict[str, float], epoch: int, outcome: str, **fields: Any) -> types_pb2.RoomRecord:
        events = [types_pb2.EventTime(event=name, time=at, count=1) for name, at in times.items()]
        return types_pb2.RoomRecord(
            room=9,
            epoch=epoch,
            prompt_tokens=2080,
            arrived=1e9 + epoch,
            age=9,
            outcome=outcome,
            events=events,
            **fields,
        )

    prefill = room(
        {"arrived": 0, "granted": 0.25, "admitted": 2, "token_0": 3.25, "last_write": 3.5, "ended": 3.5},
        0,
        "finished",
        chunks=[
            types_pb2.ChunkForward(end=2064, tokens=2048, time=2.5),
            types_pb2.ChunkForward(end=2080, tokens=16, time=3.25),
        ],
        passes=passes,
        not_reached=7,
        left_out=2,
    )
    lost = room({"arrived": 0, "granted": 0.25, "ended": 1}, 0, "aborted: a node was lost")
    again = room({"arrived": 0, "granted": 0.5, "complete": 4, "first_step": 4.25}, 1, "")
    return admin_pb2.ExplainResponse(
        nodes=[
            admin_pb2.ExplainedNode(node_id="prefill-0", role=types_pb2.ROLE_PREFILL, rooms=[prefill]),
            admin_pb2.ExplainedNode(node_id="decode-0", role=types_pb2.ROLE_DECODE, rooms=[lost, again]),
        ],
        silent=["decode-1"],
        attempts=[
            admin_pb2.AttemptRecord(
                room=9, epoch=0, prefill_node="prefill-0", decode_node="decode-0", started=1e9 - 0.5, seconds=1.5,
                phase="transferring", outcome="decode node decode-0 was lost while transferring: its session ended",
            ),
            admin_pb2.AttemptRecord(
                room=9, epoch=1, prefill_node="prefill-0", decode_node="decode-0", first_index=12, started=1e9 + 1,
                seconds=8, phase="decoding",
            ),
        ],
    )  # fmt: skip


class Front:
    """The server, in a thread with an event loop of its own."""

    def __init__(self) -> None:
        self.generation = CannedGeneration()
        self.admin = CannedAdmin()
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _add(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServicer_to_server(self.generation, server)
        admin_pb2_grpc.add_AdminServicer_to_server(self.admin, server)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = RpcServer("127.0.0.1:0", ["kvrelay.v1.Generation"], self._add)
        await server.start()
        server.set_serving(True)
        self.address = f"127.0.0.1:{server.port}"
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        await server.stop(0)

    def __enter__(self) -> Front:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
