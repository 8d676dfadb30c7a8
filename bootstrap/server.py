"""The bootstrap process: start, serve, drain, stop.

load tokenizer ─► listen ─► SIGTERM or SIGINT ─► NOT_SERVING, take nothing new in
                                                    │
    exit 0 ◄─ close ◄─ fail what is left ◄─ live requests end, or drain_timeout, or a second signal
"""

from __future__ import annotations

import asyncio
import logging

import grpc
import uvloop

from bootstrap.broadcast import Broadcast, wait_for
from bootstrap.config import BootstrapConfig
from bootstrap.front import FrontDoor
from bootstrap.limits import ClientLimits
from bootstrap.registry import Registry
from bootstrap.servicers.admin import AdminServicer
from bootstrap.servicers.generation import GenerationServicer
from bootstrap.servicers.nodes import NodesServicer
from bootstrap.text import TextModel
from engine.core.access import is_loopback
from engine.core.clock import monotonic
from engine.core.errors import Unavailable
from engine.core.logs import setup_logging
from engine.core.metrics import FrontDoorMetric, Metrics, serve_metrics
from engine.core.model_store import PreparedModel, ensure_prepared
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, bootstrap_pb2, bootstrap_pb2_grpc, generation_pb2, generation_pb2_grpc
from rpc.security import Caller, Guard, server_credentials
from rpc.server import RpcServer
from rpc.signals import StopSignals

__all__ = ["BootstrapServer", "main", "serve"]

log = logging.getLogger("kvrelay.bootstrap")

GRPC_LOG = logging.getLogger("grpc._cython.cygrpc")
TICK_S = 0.1
CLOSING_S = 1.0  # for the last messages to leave
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
CALLERS = {
    GENERATION: Caller.CLIENT,
    bootstrap_pb2.DESCRIPTOR.services_by_name["Bootstrap"].full_name: Caller.NODE,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name: Caller.OPERATOR,
}
SERVICES = tuple(CALLERS)


class BootstrapServer:
    """Everything of one bootstrap service but the process. Make it, and use it, in the event loop's thread."""

    def __init__(self, config: BootstrapConfig, model: PreparedModel, text: TextModel):
        self._config = config
        self._changes = Broadcast()
        self.metrics = Metrics(FrontDoorMetric)
        registry = Registry(model.name, model.fingerprint, monotonic)
        self.front = FrontDoor(config, registry, self.metrics, monotonic, self._changes.notify)
        access = config.access
        guard = Guard(access, CALLERS)
        limits = ClientLimits(access.client_rate, access.client_burst, access.client_concurrency, monotonic)
        self._generation = GenerationServicer(config, model, text, self.front, monotonic, guard, limits)
        self._nodes = NodesServicer(config, self.front)
        self._admin = AdminServicer(self.front, self._changes, monotonic)
        self._rpc = RpcServer(
            config.listen,
            SERVICES,
            self._add,
            config.max_message_bytes,
            server_credentials(access.tls_cert, access.tls_key, access.tls_client_ca),
            guard,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.port = self._rpc.port
        GRPC_LOG.addFilter(_is_news)  # once, however many servers there are

    def _add(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServicer_to_server(self._generation, server)
        bootstrap_pb2_grpc.add_BootstrapServicer_to_server(self._nodes, server)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin, server)

    async def start(self) -> None:
        await self._rpc.start()
        self._rpc.set_serving(True)
        self._rpc.set_serving(False, GENERATION)
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._follow_pools())]
        log.info("listening", extra={"port": self.port})

    async def drain(self, hurry: asyncio.Event) -> None:
        """Take nothing new in; return when every live request has ended, in time or by an error."""
        self.front.draining = True
        self._rpc.set_serving(False)
        log.info("draining", extra={"live": len(self.front.requests)})
        by = monotonic() + self._config.drain_timeout
        while self.front.requests and not hurry.is_set() and monotonic() < by:
            await wait_for(hurry, TICK_S)
        self.front.fail_all(lambda: Unavailable("this front door has shut down", reason="DRAINING", phase="shutdown"))

    async def stop(self) -> None:
        """Close everything. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self.front.registry.nodes():
            node.link.close(Unavailable("this front door has shut down", reason="DRAINING"))
        await self._rpc.stop(CLOSING_S)
        self._generation.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.front.tick()
            except Exception:  # the clock must go on for all other requests
                log.exception("tick failed")

    async def _follow_pools(self) -> None:
        while not self.front.draining:
            news = self._changes.news
            self._rpc.set_serving(self.front.ready, GENERATION)
            await news.wait()


def _is_news(record: logging.LogRecord) -> bool:
    """False for a message that did not get through because its client is gone, which is no error of anybody's.

    gRPC itself keeps quiet about it, unless it hears of the failed write before it hears of the client's end. Its
    other errors (a batch of operations that it would not even start) read differently, and are shown.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, grpc.aio.InternalError) and str(error).startswith('Failed "execute_batch"'))


async def serve(config: BootstrapConfig, model: PreparedModel, text: TextModel) -> None:
    """Serve until told to stop by a signal. Raises ConfigError when an address cannot be had."""
    server = BootstrapServer(config, model, text)
    endpoint = serve_metrics(server.metrics, config.metrics_listen)
    log.info("metrics", extra={"port": endpoint.port})
    told, hurry = asyncio.Event(), asyncio.Event()
    StopSignals(told.set, hurry.set).install()
    try:
        await server.start()
        await told.wait()
        await server.drain(hurry)
    finally:
        await server.stop()
        endpoint.close()
    log.info("stopped")


def main(config: BootstrapConfig) -> int:
    """Run the process; returns its exit code. Raises ConfigError for what the operator has to mend."""
    setup_logging(config.logs, role="bootstrap")
    access = config.access
    if (access.join_token or access.api_keys) and access.tls_cert is None and not is_loopback(config.listen):
        log.warning("join token and API keys come over the network without TLS", extra={"listen": config.listen})
    model = ensure_prepared(
        config.model, config.model_dir, lambda line: log.info("preparing model", extra={"progress": line})
    )
    text = TextModel.load(model.path)
    log.info("text ready", extra={"model": model.name, "fingerprint": model.fingerprint, "chat": text.has_chat})
    uvloop.run(serve(config, model, text))
    return 0
