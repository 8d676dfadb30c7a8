"""What every server does for its callers: errors with names, health, reflection, limits. Real gRPC on port 0."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

import rpc.server
from engine.core import errors as named
from engine.core.errors import ConfigError, InvalidField, KVRelayError
from rpc.errors import from_rpc_error
from rpc.server import RpcServer

SERVICE = "test.Kinds"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LIMIT = 20_000

ERRORS: dict[str, Exception] = {
    "InvalidRequest": named.InvalidRequest("no"),
    "InvalidField": InvalidField("sampling.top_p", 7, "above 0, at most 1"),
    "NotFound": named.NotFound("no model 'x'", model="x"),
    "AlreadyExists": named.AlreadyExists("a live request has that id", reason="DUPLICATE", request_id="r1"),
    "Refused": named.Refused("page_size is 8, here 16", field="page_size"),
    "Overloaded": named.Overloaded("the queue is full", retry_after=1.25),
    "DeadlineExceeded": named.DeadlineExceeded("too slow while decoding", phase="decoding", retry_after=0.000000001),
    "Cancelled": named.Cancelled("as you asked"),
    "Unavailable": named.Unavailable("no decode node is left", phase="queued", retry_after=3600.0),
    "KVRelayError": KVRelayError("ours", incident="12"),
    "in another script": named.NotFound("kein Modell »größe« 模型", model="größe"),
    "of two lines": named.NotFound("one\ntwo"),
    "ValueError": ValueError("a secret"),
    "AssertionError": AssertionError(),
    "KeyError": KeyError("a secret"),
}
NAMED = [name for name, error in ERRORS.items() if isinstance(error, KVRelayError)]
UNNAMED = [name for name, error in ERRORS.items() if not isinstance(error, KVRelayError)]


def fail(name: str) -> None:
    if name == "very long":
        raise named.NotFound("é" * 20_000, model="模" * 20_000)
    if name == "unwritten":
        raise NotImplementedError
    if name in ERRORS:
        raise ERRORS[name]


async def unary_unary(request: StringValue, context: Any) -> StringValue:
    if request.value == "wait":
        await asyncio.Event().wait()
    if request.value == "abort":
        await context.abort(grpc.StatusCode.DATA_LOSS, "said by the handler itself")
    fail(request.value)
    return request


async def unary_stream(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
    yield request
    fail(request.value)
    yield request


async def stream_unary(requests: AsyncIterator[StringValue], context: Any) -> StringValue:
    said = [request.value async for request in requests]
    fail(said[-1])
    return StringValue(value=" ".join(said))


async def stream_stream(requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
    async for request in requests:
        fail(request.value)
        yield request


async def writes_by_itself(request: StringValue, context: Any) -> None:
    """A streaming handler in the other style grpc knows: no generator."""
    await context.write(request)
    fail(request.value)


def add(server: grpc.aio.Server) -> None:
    behaviours: dict[str, Callable[..., Any]] = {kind: globals()[kind] for kind in KINDS}
    behaviours["unary_stream/writes_by_itself"] = writes_by_itself
    handlers = {
        name.rpartition("/")[2]: getattr(grpc, f"{name.partition('/')[0]}_rpc_method_handler")(
            behaviour, StringValue.FromString, StringValue.SerializeToString
        )
        for name, behaviour in behaviours.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    running = RpcServer("127.0.0.1:0", (SERVICE,), add, max_message_bytes=LIMIT)
    await running.start()
    yield running
    await running.stop(0)


@pytest.fixture
async def channel(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as open_channel:
        yield open_channel


async def call(channel: grpc.aio.Channel, kind: str, *said: bytes, method: str = "") -> list[str]:
    """Call a method with messages given as bytes; returns what came back."""
    invoke: Any = getattr(channel, kind)(f"/{SERVICE}/{method or kind}", None, StringValue.FromString)

    async def requests() -> AsyncIterator[bytes]:
        for one in said:
            yield one

    started = invoke(requests() if kind.startswith("stream") else said[0], timeout=10)
    if kind.endswith("stream"):
        return [reply.value async for reply in started]
    return [(await started).value]


def text(value: str) -> bytes:
    return StringValue(value=value).SerializeToString()


async def failure(calling: Awaitable[Any]) -> Any:
    """The grpc.RpcError that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        await calling
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_pass_through(channel: grpc.aio.Channel, kind: str) -> None:
    times = 2 if kind == "unary_stream" else 1
    assert await call(channel, kind, text("hello")) == ["hello"] * times


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMED)
async def test_named_errors_come_back_as_they_were_raised(channel: grpc.aio.Channel, kind: str, name: str) -> None:
    raised = ERRORS[name]
    assert isinstance(raised, KVRelayError)
    error = await failure(call(channel, kind, text(name)))
    back = from_rpc_error(error)
    assert type(back) is (named.InvalidRequest if name == "InvalidField" else type(raised))
    assert (str(back), back.code, back.reason) == (str(raised), raised.code, raised.reason)
    assert (back.metadata, back.retry_after) == (raised.metadata, raised.retry_after)
    assert error.code() is grpc.StatusCode[raised.code]
    details = {detail.TypeName() for detail in rpc_status.from_call(error).details}
    assert details == {"google.rpc.ErrorInfo"} | ({"google.rpc.RetryInfo"} if raised.retry_after is not None else set())


async def test_details_are_what_any_grpc_client_understands(channel: grpc.aio.Channel) -> None:
    status = rpc_status.from_call(await failure(call(channel, "unary_unary", text("Unavailable"))))
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.domain, info.reason, dict(info.metadata)) == ("kvrelay", "UNAVAILABLE", {"phase": "queued"})
    assert retry.retry_delay.ToSeconds() == 3600


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_too_long_for_a_status_is_cut(channel: grpc.aio.Channel, kind: str) -> None:
    back = from_rpc_error(await failure(call(channel, kind, text("very long"))))
    assert (back.code, back.reason, len(str(back)), len(back.metadata["model"])) == ("NOT_FOUND", "NOT_FOUND", 400, 128)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_method_that_nobody_wrote_is_unimplemented(channel: grpc.aio.Channel, kind: str) -> None:
    error = await failure(call(channel, kind, text("unwritten")))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNNAMED)
async def test_other_errors_tell_an_incident_and_nothing_else(
    channel: grpc.aio.Channel, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = await failure(call(channel, kind, text(name)))
    back = from_rpc_error(error)
    assert (back.code, back.reason) == ("INTERNAL", "INTERNAL")
    incident = back.metadata["incident"]
    assert str(back) == f"internal error; look for incident {incident} in the server's log"
    assert "secret" not in repr(error)
    (record,) = [record for record in caplog.records if record.name == "kvrelay.rpc"]
    assert vars(record)["incident"] == incident
    assert vars(record)["method"] == f"/{SERVICE}/{kind}"
    assert record.exc_info is not None
    assert record.exc_info[1] is ERRORS[name]


async def test_what_was_answered_before_an_error_arrives(channel: grpc.aio.Channel) -> None:
    stream: Any = channel.unary_stream(f"/{SERVICE}/unary_stream", None, StringValue.FromString)(text("NotFound"))
    assert (await stream.read()).value == "NotFound"
    error = await failure(stream.read())
    assert error.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(("said", "code"), [("hello", None), ("NotFound", "NOT_FOUND"), ("KeyError", "INTERNAL")])
async def test_streaming_handlers_that_write_by_themselves(
    channel: grpc.aio.Channel, said: str, code: str | None
) -> None:
    calling = call(channel, "unary_stream", text(said), method="writes_by_itself")
    if code is None:
        assert await calling == [said]
    else:
        assert from_rpc_error(await failure(calling)).code == code


async def test_a_handlers_own_status_is_left_alone(channel: grpc.aio.Channel) -> None:
    error = await failure(call(channel, "unary_unary", text("abort")))
    assert error.code() is grpc.StatusCode.DATA_LOSS
    back = from_rpc_error(error)
    assert (type(back), back.code, str(back)) == (KVRelayError, "DATA_LOSS", "said by the handler itself")


async def test_unknown_methods_are_unimplemented(channel: grpc.aio.Channel) -> None:
    back = from_rpc_error(await failure(call(channel, "unary_unary", text("x"), method="nothing")))
    assert back.code == "UNIMPLEMENTED"


async def test_a_cancelled_call_is_no_mistake_of_ours(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    invoke: Any = channel.unary_unary(f"/{SERVICE}/unary_unary", None, StringValue.FromString)
    late = from_rpc_error(await failure(invoke(text("wait"), timeout=0.05)))
    assert (type(late), late.reason) == (named.DeadlineExceeded, "DEADLINE_EXCEEDED")
    assert await call(channel, "unary_unary", text("next")) == ["next"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [b"\x0a\x7fshort", b"\xff\xff\xff", b"\x0a\x02\xff\xfe"], ids=["cut", "tag", "utf8"])
async def test_bytes_that_are_no_message(
    channel: grpc.aio.Channel, kind: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    said = (text("a good one"), data) if kind.startswith("stream") else (data,)
    back = from_rpc_error(await failure(call(channel, kind, *said)))
    assert (back.code, back.reason) == ("INVALID_ARGUMENT", "MALFORMED")
    assert await call(channel, "unary_unary", text("next")) == ["next"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_messages_up_to_the_limit(channel: grpc.aio.Channel) -> None:
    fits = "x" * (LIMIT - len(text("")) - 4)
    assert await call(channel, "unary_unary", text(fits)) == [fits]
    back = from_rpc_error(await failure(call(channel, "unary_unary", text(fits + "xxxx"))))
    assert type(back) is named.Overloaded
    assert await call(channel, "unary_unary", text("next")) == ["next"]


# ---- health and reflection ----


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return reply.status  # type: ignore[no-any-return]


async def test_health_of_the_process_and_of_each_service(server: RpcServer, channel: grpc.aio.Channel) -> None:
    assert [await check(channel), await check(channel, SERVICE)] == [NOT_SERVING, NOT_SERVING]
    server.set_serving(True)
    assert [await check(channel), await check(channel, SERVICE)] == [SERVING, SERVING]
    server.set_serving(False, SERVICE)
    assert [await check(channel), await check(channel, SERVICE)] == [SERVING, NOT_SERVING]
    back = from_rpc_error(await failure(check(channel, "test.Nothing")))
    assert back.code == "NOT_FOUND"


async def test_health_can_be_watched(server: RpcServer, channel: grpc.aio.Channel) -> None:
    watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=10)
    assert (await watch.read()).status == NOT_SERVING
    server.set_serving(True)
    assert (await watch.read()).status == SERVING
    watch.cancel()


async def test_a_watcher_that_does_not_read_holds_up_nobody(server: RpcServer, channel: grpc.aio.Channel) -> None:
    narrow = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", narrow) as deaf:
        asked = health_pb2.HealthCheckRequest(service="")
        health_pb2_grpc.HealthStub(deaf).Watch(asked)  # its window takes no whole answer
        assert await check(deaf) == NOT_SERVING, "it has arrived"
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(asked, timeout=10)
        for status in (NOT_SERVING, SERVING, NOT_SERVING):
            server.set_serving(status == SERVING)
            assert (await watch.read()).status == status
        watch.cancel()


async def test_calls_that_need_no_credentials_are_bounded(
    server: RpcServer, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether their messages come or not. Others that stay open do not make a process look dead."""
    monkeypatch.setattr(rpc.server, "MAX_OPEN_CALLS", 3)
    monkeypatch.setattr(rpc.server, "MAX_OPEN_CHECKS", 5)
    health, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()

    async def refusal() -> KVRelayError | None:
        """Of one more watcher."""
        watch: Any = health.Watch(asked, timeout=10)
        try:
            await watch.read()
        except grpc.RpcError as error:
            return from_rpc_error(error)
        watch.cancel()
        return None

    silent: Any = channel.stream_unary("/grpc.health.v1.Health/Check", None, None)
    staying: list[Any] = [health.Watch(asked), reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()]
    await staying[1].write(reflection_pb2.ServerReflectionRequest(list_services=""))
    for one in staying:
        await one.read()
    staying.append(silent())
    assert await check(channel) == NOT_SERVING
    async with asyncio.timeout(10):
        while (error := await refusal()) is None:  # until the server has heard of all that stay
            await asyncio.sleep(0.01)
    assert isinstance(error, named.Overloaded)
    assert (error.reason, error.metadata) == ("OPEN_CALLS", {"limit": "open_calls", "value": "3"})
    staying += [silent(), silent()]

    async def answered() -> None:
        while await check(channel) == NOT_SERVING:  # as above
            await asyncio.sleep(0.01)

    refused = await failure(asyncio.wait_for(answered(), 10))
    assert from_rpc_error(refused).reason == "OPEN_CALLS"
    assert await call(channel, "unary_unary", text("hello")) == ["hello"], "a service that is not open to all"
    for one in staying:
        one.cancel()
    async with asyncio.timeout(10):
        while await refusal():  # until the server has heard of that
            await asyncio.sleep(0.01)


async def test_what_a_caller_without_credentials_says_is_short(channel: grpc.aio.Channel) -> None:
    fits = "x" * (rpc.server.MAX_OPEN_BYTES - 3)
    assert from_rpc_error(await failure(check(channel, fits))).code == "NOT_FOUND"
    assert from_rpc_error(await failure(check(channel, fits + "x"))).code == "INVALID_ARGUMENT"


async def test_a_connection_has_so_many_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.server, "MAX_STREAMS", 2)
    server = RpcServer("127.0.0.1:0", (SERVICE,), add)
    await server.start()
    private = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", private) as one:
        await call(one, "unary_unary", text("hello"))  # the caller has heard of the limit
        invoke: Any = one.unary_unary(f"/{SERVICE}/unary_unary", None, StringValue.FromString)
        waiting = [invoke(text("wait")) for _ in range(2)]
        third = invoke(text("third"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", private) as other:
            assert await call(other, "unary_unary", text("hello")) == ["hello"]
        assert not third.done()
        waiting[0].cancel()
        assert (await third).value == "third"
        waiting[1].cancel()
    await server.stop(0)


async def test_stopping_is_said_before_it_is_done(server: RpcServer, channel: grpc.aio.Channel) -> None:
    server.set_serving(True)
    waiting: Any = channel.unary_unary(f"/{SERVICE}/unary_unary", None, StringValue.FromString)(text("wait"))
    watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == SERVING
    stopping = asyncio.create_task(server.stop(5.0))
    assert (await watch.read()).status == NOT_SERVING
    assert not waiting.done(), "live calls have their grace"
    watch.cancel()
    waiting.cancel()
    await stopping
    assert (await failure(call(channel, "unary_unary", text("late")))).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_handler_that_learns_late_of_the_stop_made_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    reading, stopped, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def late(requests: AsyncIterator[StringValue], context: Any) -> StringValue:
        try:
            await anext(requests)
            reading.set()
            while not stopped.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await stopped.wait()
            return await anext(requests)
        finally:
            ended.set()

    def add_late(server: grpc.aio.Server) -> None:
        handler = grpc.stream_unary_rpc_method_handler(late, StringValue.FromString, StringValue.SerializeToString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"late": handler}),))

    server = RpcServer("127.0.0.1:0", (SERVICE,), add_late)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel, asyncio.timeout(10):
        invoke: Any = channel.stream_unary(f"/{SERVICE}/late", None, StringValue.FromString)
        await invoke().write(text("first"))
        await reading.wait()
        await server.stop(0)
        stopped.set()
        await ended.wait()
    assert "handler failed" not in caplog.text


async def test_reflection_lists_what_is_served(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (reply,) = [reply async for reply in stub.ServerReflectionInfo(asked, timeout=5)]
    names = {service.name for service in reply.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


# ---- the address ----


async def test_a_path_that_is_no_text_costs_its_caller_alone(server: RpcServer, channel: grpc.aio.Channel) -> None:
    """No client library sends one, but whoever reaches the port may: an HTTP/2 preface, settings, and these headers."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    headers = {b":method": b"POST", b":scheme": b"http", b":path": b"/\xff", b":authority": b"x", b"te": b"trailers"}
    headers[b"content-type"] = b"application/grpc"
    plain = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in headers.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 5, 1, plain))
    async with asyncio.timeout(10):
        answer = b""
        while b"grpc-status" not in answer:
            more = await reader.read(65536)
            assert more, "an answer, and not the end of the connection"
            answer += more
    writer.close()
    assert await call(channel, "unary_unary", text("still here")) == ["still here"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]) as fresh:
        assert await call(fresh, "unary_unary", text("for others, too")) == ["for others, too"]


async def test_a_busy_port_is_the_operators_mistake(server: RpcServer) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"cannot bind '127.0.0.1:{server.port}'")):
        RpcServer(f"127.0.0.1:{server.port}")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="listen: cannot bind"):
            RpcServer(f"127.0.0.1:{port}")


@pytest.mark.parametrize("listen", ["203.0.113.1:0", "not an address", ""])
async def test_an_address_that_is_none_of_ours(listen: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"listen: cannot bind {listen!r}")):
        RpcServer(listen)


def test_this_file_has_a_handler_of_each_kind() -> None:
    assert all(inspect.isasyncgenfunction(globals()[kind]) == kind.endswith("_stream") for kind in KINDS)
