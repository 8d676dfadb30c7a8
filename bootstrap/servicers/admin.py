"""What operators call."""

# ruff: noqa: N802  (the .proto names the methods)

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from bootstrap import wire
from bootstrap.broadcast import Broadcast, wait_for
from bootstrap.front import FrontDoor
from bootstrap.registry import Node
from engine.core.clock import Clock
from engine.core.errors import InvalidField, NotFound
from engine.core.messages import Command, Explain, Explanation, Inspect, Inspection
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import admin_pb2_grpc as pb_grpc

__all__ = ["AdminServicer"]

Context = grpc.aio.ServicerContext[Any, Any]
Answer = Inspection | Explanation

ANSWER_TIMEOUT_S = 5.0
MIN_INTERVAL_S, MAX_INTERVAL_S, DEFAULT_INTERVAL_S = 0.1, 60.0, 1.0


class AdminServicer(pb_grpc.AdminServicer):
    """kvrelay.v1.Admin."""

    def __init__(self, front: FrontDoor, changes: Broadcast, clock: Clock):
        self._front = front
        self._changes = changes
        self._clock = clock
        self._inspections = itertools.count(1)
        self._awaited: dict[int, asyncio.Future[Answer]] = {}
        front.answered = self._answered

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        """With inspect, every node counts and checks its books first."""
        answers = await self._ask(Inspect) if request.inspect else {}
        silent = (f"did not answer an inspection within {ANSWER_TIMEOUT_S:g} s",)
        return self._nodes(
            {node: one.problems if isinstance(one, Inspection) else silent for node, one in answers.items()}
        )

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        now = self._clock()
        live = self._front.requests.values()
        return pb.ListRequestsResponse(requests=[wire.live_request_to_wire(one, now) for one in live])

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        # A node keeps the lesser of this and its own deadline.
        deadline = request.deadline_seconds if request.HasField("deadline_seconds") else math.inf
        if not deadline >= 0:
            raise InvalidField("deadline_seconds", deadline, "at least 0")
        self._front.drain_node(request.node_id, deadline)
        return pb.DrainResponse()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.ListNodesResponse]:
        interval = request.interval_seconds if request.HasField("interval_seconds") else DEFAULT_INTERVAL_S
        if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
            raise InvalidField("interval_seconds", interval, f"{MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}")
        while True:
            news = self._changes.news
            yield self._nodes({})
            await wait_for(news, interval)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        request_id = request.request_id
        answers = await self._ask(lambda inspection_id: Explain(inspection_id, request_id))
        told = {node: one.rooms for node, one in answers.items() if isinstance(one, Explanation) and one.rooms}
        silent = [node.node_id for node, one in answers.items() if one is None]
        live = [one.attempt for one in self._front.of_id(request_id) if one.attempt]
        attempts = self._front.attempts.history.explain(request_id, live)
        if not told and not attempts:
            unasked = f"; {', '.join(silent)} did not answer within {ANSWER_TIMEOUT_S:g} s" if silent else ""
            raise NotFound(f"nobody here knows of a request {request_id[:128]!r}{unasked}", request_id=request_id[:128])
        zero = time.time() - self._clock()  # of the clock, since 1970
        return pb.ExplainResponse(
            nodes=[wire.explained_to_wire(node, rooms) for node, rooms in told.items()],
            silent=silent,
            attempts=[wire.attempt_to_wire(one, zero + one.started) for one in attempts],
        )

    def _nodes(self, problems: Mapping[Node, tuple[str, ...]]) -> pb.ListNodesResponse:
        now = self._clock()
        nodes, pairs = self._front.registry.nodes(), self._front.attempts.pairs
        return pb.ListNodesResponse(
            nodes=[wire.node_to_wire(node, now, problems.get(node, ()), pairs.peers(node.identity)) for node in nodes],
            queued_requests=len(self._front.attempts.queue),
            live_requests=len(self._front.requests),
        )

    async def _ask(self, question: Callable[[int], Command]) -> dict[Node, Answer | None]:
        """Ask every node; what each answered, None for those that did not in time. question: of an inspection id."""
        asked: dict[Node, asyncio.Future[Answer]] = {}
        for node, inspection_id in zip(self._front.registry.nodes(), self._inspections, strict=False):
            asked[node] = self._awaited[inspection_id] = asyncio.get_running_loop().create_future()
            node.link.send(question(inspection_id))
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=ANSWER_TIMEOUT_S)
        finally:  # also when the caller has gone meanwhile
            self._awaited = {key: answer for key, answer in self._awaited.items() if answer not in asked.values()}
        return {node: answer.result() if answer.done() else None for node, answer in asked.items()}

    def _answered(self, answer: Answer) -> None:
        awaited = self._awaited.get(answer.inspection_id)
        if awaited is not None and not awaited.done():
            awaited.set_result(answer)
