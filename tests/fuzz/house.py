"""A bootstrap service that serves good clients with good nodes, while a test lets anybody say anything to it.

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

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
    Reserve,
    RoomQuiesced,
    Submit,
)
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey, TokenOutput
from kvrelay.v1 import bootstrap_pb2
from rpc.errors import from_rpc_error
from rpc.session import NODE_METADATA
from rpc.wire import command_from_wire
from tests.fuzz.hostile import Call
from tests.helpers.front_cluster import FrontCluster, Reply, assert_soon, front_cluster
from tests.helpers.front_door import SERVING, registration
from tests.helpers.stub_node import StubNode

__all__ = ["INCARNATION", "MAX_MESSAGE", "OWN_ROOM", "House", "Play"]

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
MAX_MESSAGE = 1 << 18
HANG_S = 15.0
SLACK_TASKS = 16  # of the good clients, who go on
CLIENTS_OWN = "Internal error from Core"  # grpc.aio's client, of a message it had not sent when the call ended
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
INCARNATION = "incarnation"  # in them too: stands for one of its own for each session


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
