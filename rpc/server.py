"""A gRPC server with what every process offers: grpc.health.v1, reflection, error mapping, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.core.config import MAX_PORT
from engine.core.errors import ConfigError, Overloaded
from rpc.errors import ErrorInterceptor
from rpc.health import HealthServicer
from rpc.security import Guard, Handler, refusal

__all__ = ["DEFAULT_MAX_MESSAGE_BYTES", "RpcServer"]

DEFAULT_MAX_MESSAGE_BYTES = 8 << 20
MAX_STREAMS = 10_000  # live calls of one connection; its caller holds back more
OPEN = (health.SERVICE_NAME, reflection.SERVICE_NAME)  # services that need no credentials
MAX_OPEN_CALLS, MAX_OPEN_CHECKS = 4_000, 10_000  # live calls of these, of all callers together
MAX_OPEN_BYTES = 4096  # of a message of one


class RpcServer:
    """One listening server. `services` are the full names of what `add` adds: they are reflected and health-checked.

    Health is NOT_SERVING until `set_serving`. `guard` sees every call first; `credentials` are for TLS. Raises
    ConfigError when the address cannot be bound.
    """

    def __init__(
        self,
        listen: str,
        services: Sequence[str] = (),
        add: Callable[[grpc.aio.Server], None] = lambda server: None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        credentials: grpc.ServerCredentials | None = None,
        guard: Guard | None = None,
    ):
        port = listen.rpartition(":")[2]
        if not port.isdecimal() or int(port) > MAX_PORT:  # grpc would listen on the rest modulo 65536
            raise ConfigError([f"listen: cannot bind {listen!r}; allowed: host:port, a port of 0 to {MAX_PORT}"])
        self._names = ("", *services)
        self._health = HealthServicer(self._names)
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor(), _OpenCalls(), *([guard] if guard else [])],
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                # Calls that nobody has looked at yet. Beyond the first number some of them are cut off, whoever's they
                # are, and beyond the second all: one connection alone must not bring that about.
                ("grpc.server.max_pending_requests", MAX_STREAMS),
                ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_STREAMS),
                ("grpc.so_reuseport", 0),  # two servers on one port is a mistake, not load balancing
                # A client whose host vanished is noticed, and its requests are cancelled.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # of the same pings; a minute, unless said here, too
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*services, *OPEN), self._server)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(listen)
            else:
                self.port = self._server.add_secure_port(listen, credentials)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ConfigError([f"listen: cannot bind {listen!r} (address in use, or not one of this machine's)"])

    async def start(self) -> None:
        await self._server.start()

    def set_serving(self, serving: bool, *names: str) -> None:
        """Health of the named services from now on, of all of them and of the process ("") when none is named."""
        self._health.set(names or self._names, serving)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give live ones `grace` seconds, then cut them."""
        self.set_serving(False)
        await self._server.stop(grace)


class _OpenCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Bounds what callers who have shown nothing can have kept for them.

    Streams are refused long before `Check`, so that watchers who forget to close theirs make no process look dead.
    """

    def __init__(self) -> None:
        self._live = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        service, _, method = handler_call_details.method.removeprefix("/").partition("/")
        if service not in OPEN:
            return await continuation(handler_call_details)
        most = MAX_OPEN_CHECKS if method == "Check" else MAX_OPEN_CALLS
        if self._live >= most:
            told = f"{self._live} calls that need no credentials are live"
            return refusal(Overloaded(told, reason="OPEN_CALLS", limit="open_calls", value=str(most)))
        self._live += 1
        call = asyncio.current_task()  # ends when the call does, whether its message has come or not
        assert call is not None
        call.add_done_callback(self._ended)
        handler: Any = await continuation(handler_call_details)
        return handler and handler._replace(request_deserializer=_short(handler.request_deserializer))  # type: ignore[no-any-return]

    def _ended(self, call: asyncio.Task[object]) -> None:
        self._live -= 1


def _short(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        if len(data) > MAX_OPEN_BYTES:
            raise DecodeError(f"it has {len(data)} bytes; allowed: {MAX_OPEN_BYTES}")
        return deserialize(data)

    return read
