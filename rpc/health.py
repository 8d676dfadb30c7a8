"""grpc.health.v1. No caller waits for another: the library's own servicer holds a lock while it writes to a watcher.

One that does not read would keep the lock, and with it every change of health and the shutdown behind it.
"""

# ruff: noqa: N802  (the .proto names the methods)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.core.errors import NotFound

__all__ = ["HealthServicer"]

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped
    """Every service is NOT_SERVING until `set`."""

    def __init__(self, services: Iterable[str]):
        self._statuses: dict[str, int] = dict.fromkeys(services, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._news = asyncio.Event()

    def set(self, services: Iterable[str], serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        self._statuses.update(dict.fromkeys(services, response.SERVING if serving else response.NOT_SERVING))
        self._news.set()
        self._news = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            raise NotFound(f"no service {request.service[:128]!r} here", service=request.service[:128])
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Its status now and whenever that changes; of a service that is not here, that it is unknown."""
        told = None
        while True:
            news = self._news  # before the status is read, so that no change is missed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await news.wait()
