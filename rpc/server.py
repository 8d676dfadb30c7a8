"""A gRPC server with what every process offers: grpc.health.v1, reflection, error mapping, message limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.core.errors import ConfigError
from rpc.errors import ErrorInterceptor
from rpc.security import Guard

__all__ = ["DEFAULT_MAX_MESSAGE_BYTES", "RpcServer"]

DEFAULT_MAX_MESSAGE_BYTES = 8 << 20
MAX_PORT = 65535


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
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._names = ("", *services)
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor(), *([guard] if guard else [])],
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
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
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
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
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool, *names: str) -> None:
        """Health of the named services from now on, of all of them and of the process ("") when none is named."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in names or self._names:
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give live ones `grace` seconds, then cut them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
