"""Hostile messages at every gRPC entry of a real bootstrap service, while it serves others.

Each call must end with a status that says whose fault it was, within a deadline; whatever comes, those who behave get
their answers, token for token; and when it is over nothing is left: no request, no node, no task, no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st

from engine.core.errors import KVRelayError
from engine.core.loop import room_of
from engine.core.messages import (
    Abort,
    AdmitReport,
    Explain,
    Explanation,
    Grant,
    Granted,
    Inspect,
    Inspection,
    NodeStats,
    Reserve,
    RoomQuiesced,
    Submit,
)
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey, TokenOutput
from kvrelay.v1 import admin_pb2, bootstrap_pb2, generation_pb2
from rpc.errors import from_rpc_error
from rpc.session import NODE_METADATA
from rpc.wire import command_from_wire, registration_to_wire, stats_to_wire
from tests.faults.hostile import Call, calls, each, near, payloads
from tests.helpers.front_cluster import FrontCluster, Reply, assert_soon, front_cluster
from tests.helpers.front_door import SERVING, registration
from tests.helpers.stub_node import StubNode

pytestmark = pytest.mark.timeout(600)  # 20 s of work each, on a machine that others may use
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
MAX_MESSAGE = 1 << 18
HANG_S = 15.0
AT_ONCE, ROUND = 24, 30  # calls, examples
SLACK_TASKS = 16  # of the good clients, who go on
CLIENTS_OWN = "Internal error from Core"  # grpc.aio's client, of a message it had not sent when the call ended
RSS_GROWTH = 64 << 20
OURS = (generation_pb2, bootstrap_pb2, admin_pb2, health_pb2, reflection_pb2)
FINE = {
    "OK",
    "CANCELLED",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
}
OWN_ROOM = RoomKey(0x5A4B3C2D1E0F6978, 0)  # in messages of hostile nodes: a room that the node was given
SMALL = 4  # pages of a hostile node: too few for what the good clients ask


# ---- those who behave ----


def right_token(request_id: str, index: int) -> int:
    return zlib.crc32(f"{request_id}/{index}".encode()) % 256


class GoodNode(StubNode):
    """Does its part of every request at once. Both halves know a token by the request's id and the index."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._ids: dict[RoomKey, Submit | Reserve] = {}

    async def _receive(self) -> None:
        while (message := await self._session.read()) is not EOF:
            async with self._arrived:
                self._acks += message.HasField("heartbeat_ack")
                self._arrived.notify_all()
            command = command_from_wire(message)
            if command is not None:
                with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                    await self._play(command)

    async def _play(self, command: object) -> None:
        match command:
            case Submit(task):
                self._ids[task.key] = command
            case Granted(key) if isinstance(submit := self._ids.pop(key, None), Submit):
                task = submit.task
                await self.publish(admitted=(AdmitReport(key, 0),))
                await self.publish(
                    self._tokens(key, task.request_id, task.first_index, 1, task.stopping.max_new_tokens)
                )
            case Reserve(reservation):
                key, most = reservation.key, reservation.stopping.max_new_tokens
                await self.report(Grant(key, (1, 2), SERVING.head_room))
                await self.publish(self._tokens(key, reservation.request_id, reservation.first_index + 1, most, most))
            case Abort(key):
                self._ids.pop(key, None)
                if self.registration.role is Role.PREFILL:
                    await self.report(RoomQuiesced(key))
            case Inspect(inspection_id):
                await self.report(Inspection(inspection_id, self.stats, ()))
            case Explain(inspection_id):
                await self.report(Explanation(inspection_id, ()))

    @staticmethod
    def _tokens(key: RoomKey, request_id: str, first: int, count: int, most: int) -> Iterator[TokenOutput]:
        for index in range(first, min(first + count, most)):
            finish = FinishReason.LENGTH if index + 1 == most else None
            yield TokenOutput(key, index, right_token(request_id, index), -0.5, finish)


class Traffic:
    """Good clients, each with one request after the other. `modest` ones take what would fit a hostile node, too."""

    def __init__(self, cluster: FrontCluster, clients: int, modest: int):
        self._cluster = cluster
        self.answered = 0
        self.modest = Counter[str]()
        self._over = False
        self._tasks = [asyncio.create_task(self._client(i, i < modest)) for i in range(clients + modest)]

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int, modest: bool) -> None:
        for count in itertools.count():
            if self._over:
                return
            request_id, new = f"good-{number}-{count}", 2 if modest else 6
            reply = self._cluster.generate(
                None,
                timeout=HANG_S,
                request_id=request_id,
                token_ids={"ids": range(3 if modest else 40)},
                stopping={"max_new_tokens": new, "ignore_eos": True},
                response={"text": False},
            )
            right = [right_token(request_id, i) for i in range(new)]
            if modest:
                await self._modest(reply, right)
            else:
                await reply.to_end()
                assert reply.token_ids == right, "a good client got another answer"
                self.answered += 1
            await asyncio.sleep(0.15)

    async def _modest(self, reply: Reply, right: list[int]) -> None:
        """It may meet a hostile node, and then end in any way, but it must end; and by itself."""
        error = await _error(reply)
        if error is not None:
            assert error.code in FINE or error.reason == "ROOM_FAILED", repr(error)
            assert error.metadata, f"by the client's own deadline: {error!r}"
            self.modest[error.code] += 1
            return
        assert reply.finished is not None
        timing = reply.finished.timing
        if timing.attempts == 1 and all(n.startswith("good") for n in (timing.prefill_node, timing.decode_node)):
            assert reply.token_ids == right
        self.modest["OK"] += 1


@dataclass(frozen=True, slots=True)
class Play:
    """What a hostile node says: at once, and then whenever it is given something to do."""

    register: bytes
    reports: tuple[bytes, ...]
    answers: tuple[tuple[str, bytes], ...]  # on which stream, and what: taken in turn
    at_once: int  # answers to one command
    publish_as: str
    life: float  # seconds
    orderly: bool  # it ends its streams, instead of cancelling them

    def __repr__(self) -> str:
        said = [one[:200].hex() for one in (self.register, *self.reports, *(data for _, data in self.answers))]
        return f"Play(as {self.publish_as}, {said})"


def pack(key: RoomKey) -> bytes:
    """As a fixed64 on the wire."""
    return key.room.to_bytes(8, "little")


async def _error(reply: Reply) -> KVRelayError | None:
    """What a call ended with; None when it was answered."""
    try:
        await reply.to_end()
    except KVRelayError as error:
        return error
    return None


# ---- the house, and what is left of it ----


@dataclass(frozen=True, slots=True)
class Footprint:
    tasks: int
    threads: int
    files: int
    rss: int  # bytes

    @classmethod
    def now(cls) -> Footprint:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # Without those by which grpc.aio's client waits for ever for calls that were cancelled before they began.
        tasks = [
            one for one in asyncio.all_tasks() if "_AioCall" not in str(getattr(one.get_coro(), "__qualname__", ""))
        ]
        return cls(len(tasks), threading.active_count(), len(os.listdir("/proc/self/fd")), resident)

    def within(self, before: Footprint) -> bool:
        """Whether everything is back that can be counted."""
        tasks = self.tasks <= before.tasks + SLACK_TASKS
        return tasks and self.threads <= before.threads and self.files <= before.files


class Mishaps(logging.Handler):
    """What the service logs with a traceback, or as an error: in this test, each is a bug."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (record.levelno >= logging.ERROR or record.exc_info) and len(self.seen) < 20:
            self.seen.append(logging.Formatter().format(record))


@contextmanager
def mishaps() -> Iterator[Mishaps]:
    """In place of every other handler, which would keep all that is said here."""
    handler = Mishaps()
    loggers = [logging.getLogger(name) for name in ("kvrelay", "grpc", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield handler
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True


class House:
    """A bootstrap service with two good nodes of each kind and good clients, in an event loop that a test turns."""

    def __init__(self, directory: Path, modest: int = 0):
        self._directory = directory
        self._modest = modest
        self._runner = asyncio.Runner()
        self._incarnations = itertools.count()
        self.messages = self.given = 0
        self.codes = Counter[tuple[str, str]]()

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def __enter__(self) -> House:
        self._log = contextlib.ExitStack()
        self.mishaps = self._log.enter_context(mishaps())
        self.run(self._open())
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self.run(self._end())
            assert not self.mishaps.seen, "\n".join(self.mishaps.seen)
        finally:
            self._runner.close()
            self._log.close()

    async def _open(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self.cluster = cluster = await self._stack.enter_async_context(
            front_cluster(
                self._directory,
                lease_seconds=5.0,
                max_message_bytes=MAX_MESSAGE,
                grant_timeout=0.3,
                prefill_timeout=0.5,
                transfer_timeout=0.5,
                token_timeout=0.5,
                queue_timeout=5.0,
            )
        )
        for role in (Role.PREFILL, Role.DECODE):
            for number in (1, 2):
                node = GoodNode(cluster.channel, registration(role, f"good-{role}-{number}"), SERVING, 0.2)
                cluster.nodes.append(node)
                await node.attach()
        self._good = cluster.front.registry.nodes()
        self.channel: Any = await self._stack.enter_async_context(
            grpc.aio.insecure_channel(
                f"127.0.0.1:{cluster.server.port}",
                options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
            )
        )
        self.traffic = Traffic(cluster, 2, self._modest)

    async def rest(self, before: Footprint | None = None) -> Footprint:
        """Once nobody hostile is left and only the good clients go on: what the process takes, no more than before."""
        await assert_soon(lambda: len(self.cluster.front.registry) <= len(self._good), "hostile nodes are gone")
        assert self.cluster.front.registry.nodes() == self._good, "a good node lost its session"

        def ours() -> list[str]:
            return [name for _, name in self.cluster.front.requests if not name.startswith("good-")]

        await assert_soon(lambda: not ours(), "hostile requests have ended")
        self.cluster.front.check_integrity()
        assert not self.cluster.server._admin._awaited, "questions of operators are forgotten"
        if before is not None:
            await assert_soon(lambda: Footprint.now().within(before), f"no more than {before}")
        gc.collect()
        return Footprint.now()

    async def _end(self) -> None:
        await self.traffic.end()
        await self._stack.aclose()  # which checks that no request and no node is left, and the books

    # ---- a call ----

    async def call(self, call: Call) -> None:
        """Make it, see it end, and judge how."""
        self.messages += len(call.payloads)
        stream = self.channel.stream_stream(call.method)(metadata=call.metadata)
        try:
            async with asyncio.timeout(HANG_S if call.patience is None else call.patience):
                await self._talk(stream, call)
        except TimeoutError:
            assert call.patience is not None, f"it hangs: {call}"
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass
        finally:
            stream.cancel()
        await self.judge(stream, call)

    async def judge(self, stream: Any, what: object) -> None:
        async with asyncio.timeout(HANG_S):
            code = (await stream.code()).name
            if code not in FINE and not str(await stream.details()).startswith(CLIENTS_OWN):
                trailing, details = await stream.trailing_metadata(), await stream.details()
                found = grpc.aio.AioRpcError(await stream.code(), grpc.aio.Metadata(), trailing, details, None)
                error = from_rpc_error(found)
                assert error.reason == "ROOM_FAILED", f"{code}, {error} {error.metadata}: {what}"
        self.codes[str(getattr(what, "method", "")), code] += 1

    # ---- a node ----

    async def play(self, play: Play) -> None:
        """Attach as a node, say what it says, and judge how its streams end."""
        incarnation = f"{next(self._incarnations):0{len(INCARNATION)}}".encode()
        streams = {"attach": self.channel.stream_stream("/kvrelay.v1.Bootstrap/Attach")()}
        writing = asyncio.Lock()  # not for the server's sake: a client's call takes one writer at a time
        talk = asyncio.create_task(self._act(play, incarnation, streams, writing))
        await asyncio.wait([talk], timeout=play.life)
        if play.orderly:
            for stream in tuple(streams.values()):
                with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                    async with writing:
                        await stream.done_writing()
            await asyncio.wait([talk], timeout=HANG_S)
            assert talk.done(), f"it hangs: {play}"
        talk.cancel()
        (ended,) = await asyncio.gather(talk, return_exceptions=True)
        assert ended is None or isinstance(ended, asyncio.CancelledError), ended
        for stream in streams.values():
            stream.cancel()
            await self.judge(stream, play)

    async def _act(self, play: Play, incarnation: bytes, streams: dict[str, Any], writing: asyncio.Lock) -> None:
        attach, given = streams["attach"], pack(OWN_ROOM)

        async def say(stream: Any, data: bytes) -> None:
            self.messages += 1
            async with writing:
                await stream.write(data.replace(INCARNATION.encode(), incarnation).replace(pack(OWN_ROOM), given))

        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await say(attach, play.register)
            await attach.read()
            identity = play.publish_as.replace(INCARNATION, incarnation.decode())
            publish = self.channel.stream_stream("/kvrelay.v1.Bootstrap/Publish")
            streams["publish"] = publish(metadata=((NODE_METADATA, identity),))
            for report in play.reports:
                await say(attach, report)
            answers = itertools.cycle(play.answers)
            while (data := await attach.read()) is not EOF:
                room = room_of(command_from_wire(bootstrap_pb2.NodeCommand.FromString(data)))
                if room is None:
                    continue
                given = pack(room)
                self.given += 1
                for name, answer in itertools.islice(answers, play.at_once):
                    with contextlib.suppress(asyncio.InvalidStateError):  # the other stream may go on
                        await say(streams[name], answer)

    @staticmethod
    async def _talk(stream: Any, call: Call) -> None:
        for payload in call.payloads:
            await stream.write(payload)
        if call.half_close:
            await stream.done_writing()
        while await stream.read() is not EOF:
            pass


# ---- what is sent ----

INCARNATION = "incarnation"  # stands for one of its own for each session
NODES = [
    registration(role, f"hostile-{role}-{n}", incarnation=INCARNATION, num_pages=SMALL, reserved=0)
    for role in Role.PREFILL.pools
    for n in range(3)
]
ROOM = {"room": OWN_ROOM.room, "epoch": OWN_ROOM.epoch}
STATS = stats_to_wire(NodeStats(pages_total=SMALL, pages_free=SMALL, head_room=SMALL * 4, serving=True))
TOKENS: list[dict[str, Any]] = [{"room": ROOM, "index": i, "token_id": 65 + i, "finish": i // 2 * 2} for i in range(3)]


def node_report(**fields: Any) -> bootstrap_pb2.NodeReport:
    return bootstrap_pb2.NodeReport(**fields)


REPORTS = [
    node_report(heartbeat=STATS),
    node_report(grant={"room": ROOM, "pages": [0, 1], "head_room": 8}),
    node_report(room_failed={"room": ROOM, "phase": "prefilling", "reason": "x", "retriable": True}),
    node_report(room_failed={"room": ROOM, "phase": "decoding", "reason": "retracted: x", "retriable": True}),
    node_report(room_failed={"room": ROOM, "phase": "queued", "reason": "x", "code": "INVALID_ARGUMENT"}),
    node_report(room_quiesced=ROOM),
    node_report(room_fenced={"room": ROOM, "writer": {"node_id": "good-prefill-1", "incarnation": "1"}}),
    node_report(cache_delta={"reset": True, "added": [b"k" * 16]}),
    node_report(inspection={"inspection_id": 1, "stats": STATS}),
    node_report(explanation={"inspection_id": 1, "rooms": [{"room": 1, "passes": [{}], "events": [{}]}]}),
    node_report(register=registration_to_wire(NODES[0])),
    node_report(drained=True),
]
STEPS = [
    bootstrap_pb2.StepOutput(tokens=TOKENS),
    bootstrap_pb2.StepOutput(tokens=TOKENS[:1], prefilled=[{"room": ROOM, "chunks": 1}], admitted=[{"room": ROOM}]),
    bootstrap_pb2.StepOutput(tokens=TOKENS[1:], relayed=[{"room": ROOM}], decoded=[{"room": ROOM}]),
]
CHAT = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
VALID: dict[str, Sequence[Message]] = {
    "GenerateRequest": [
        generation_pb2.GenerateRequest(text="hello", sampling={"temperature": 0.0}, stopping={"max_new_tokens": 3}),
        generation_pb2.GenerateRequest(token_ids={"ids": [1, 2, 3]}, stopping={"stop": ["x"]}, request_id="hostile"),
        generation_pb2.GenerateRequest(
            chat={"messages": [{"role": "user", "content": "hi"}]}, response={"logprobs": True}
        ),
    ],
    "AbortRequest": [generation_pb2.AbortRequest(request_id="hostile")],
    "TokenizeRequest": [
        generation_pb2.TokenizeRequest(text="hello"),
        generation_pb2.TokenizeRequest(chat=CHAT),
    ],
    "DetokenizeRequest": [generation_pb2.DetokenizeRequest(token_ids=[1, 2, 3])],
    "DrainRequest": [admin_pb2.DrainRequest(node_id="nobody", deadline_seconds=1)],
    "ExplainRequest": [admin_pb2.ExplainRequest(request_id="hostile")],
    "WatchRequest": [admin_pb2.WatchRequest(interval_seconds=0.1)],
    "ListNodesRequest": [admin_pb2.ListNodesRequest(inspect=True)],
    "NodeReport": [node_report(register=registration_to_wire(one)) for one in NODES] + REPORTS,
    "StepOutput": list(STEPS),
    "HealthCheckRequest": [health_pb2.HealthCheckRequest(service="kvrelay.v1.Generation")],
    "ServerReflectionRequest": [
        reflection_pb2.ServerReflectionRequest(list_services="*"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvrelay.v1.Generation"),
    ],
}
METHODS: list[MethodDescriptor] = [
    method for module in OURS for service in module.DESCRIPTOR.services_by_name.values() for method in service.methods
]
NOWHERE = ("/kvrelay.v1.Generation/Nothing", "/kvrelay.v1.Nothing/Generate", "/x", "//", "/" + "x" * 3000)


def calls_of(method: MethodDescriptor) -> st.SearchStrategy[Call]:
    kind = message_factory.GetMessageClass(method.input_type)
    payload = payloads(kind, VALID.get(method.input_type.name, ()), oversized=MAX_MESSAGE)
    path = f"/{method.containing_service.full_name}/{method.name}"
    return calls(path, payload, streams=method.client_streaming, endless=method.name in ("Watch", "Attach"))


CALLS = [calls_of(method) for method in METHODS] + [
    calls(path, payloads(health_pb2.HealthCheckRequest), streams=True) for path in NOWHERE
]


@st.composite
def any_calls(draw: st.DrawFn) -> list[Call]:
    return [draw(CALLS[draw(st.integers(0, len(CALLS) - 1))]) for _ in range(AT_ONCE)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootstrap.servicers.admin.ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr("bootstrap.servicers.nodes.REGISTER_TIMEOUT_S", 0.3)


@st.composite
def plays(draw: st.DrawFn) -> Play:
    node = draw(st.sampled_from(NODES))
    register = node_report(register=registration_to_wire(node))
    if draw(st.integers(0, 3)) == 0:
        register = draw(near(register))
        memory = register.register.memory
        memory.num_pages = min(memory.num_pages, SMALL)  # it is to get its own requests only
    report = payloads(bootstrap_pb2.NodeReport, REPORTS)
    step = payloads(bootstrap_pb2.StepOutput, STEPS)
    useful = [("attach", one.SerializeToString()) for one in REPORTS[1:2]] + [("publish", STEPS[1].SerializeToString())]
    answer = st.one_of(
        st.tuples(st.just("attach"), report), st.tuples(st.just("publish"), step), st.sampled_from(useful)
    )
    others = (str(node.identity),) * 6 + ("good-prefill-1:1", "good-decode-1:1", "")
    return Play(
        register.SerializeToString(),
        (REPORTS[0].SerializeToString(), *draw(st.lists(report, max_size=3))),
        tuple(draw(st.lists(answer, min_size=1, max_size=6))),
        draw(st.integers(1, 4)),
        draw(st.sampled_from(others)),
        draw(st.sampled_from((0.02, 0.1, 0.3))),
        draw(st.booleans()),
    )


@st.composite
def companies(draw: st.DrawFn) -> list[Play | Call]:
    """Some nodes, and clients whose requests they may get."""
    generate = draw(st.lists(CALLS[0], min_size=6, max_size=6))
    return [*(draw(plays()) for _ in range(12)), *generate]


def fuzz(house: House, start: int, rounds: int, batches: st.SearchStrategy[list[Any]], one: Any) -> None:
    """Rounds of ROUND examples, each a list of what goes on at once. What the process takes must not grow."""

    def batch(made: list[Any]) -> None:
        async def all_at_once() -> None:
            await asyncio.gather(*map(one, made))

        house.run(all_at_once())

    before = house.run(house.rest())
    for number in range(rounds):
        each(batches, ROUND, start + number, batch)
        if number < 2:  # warm
            before = house.run(house.rest())
    after = house.run(house.rest(before))
    assert after.rss < before.rss + RSS_GROWTH, f"{(after.rss - before.rss) >> 20} MiB more"


def test_whatever_is_called_ends_with_a_status_and_leaves_nothing(tmp_path: Path) -> None:
    with House(tmp_path) as house:
        fuzz(house, 100, 7, any_calls(), house.call)
        assert house.messages > 5000
        assert house.traffic.answered > 100


def test_a_hostile_node_hurts_its_own_rooms_only(tmp_path: Path) -> None:
    with House(tmp_path, modest=4) as house:

        async def one(made: Play | Call) -> None:
            await (house.play(made) if isinstance(made, Play) else house.call(made))

        fuzz(house, 200, 4, companies(), one)
        assert house.messages > 4000
        assert house.traffic.answered > 100
        assert house.traffic.modest["OK"] > 100
        assert house.given > 100, "hostile nodes were given little to do"
