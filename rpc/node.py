"""The process round an engine: session, health server, signals, drain. The same for both node kinds.

    start engine ─► canary passed ─► attach ─► SERVING ─► SIGTERM, SIGINT or Admin.Drain
                                                             │
    exit 0 ◄─ leave ◄─ idle, or the deadline ◄─ finish ◄─ NOT_SERVING, tell the bootstrap, take nothing new

A second signal skips the waiting. The engine thread's death or a refusal by the bootstrap ends the process with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import uvloop

from engine.core.errors import Refused
from engine.core.logs import setup_logging
from engine.core.loop import EngineLoop
from engine.core.messages import Drained, NodeStats, Registration
from engine.core.metrics import Metrics, NodeMetric, serve_metrics
from engine.core.node_config import NodeConfig
from engine.core.types import NodeIdentity, Role
from rpc.server import RpcServer
from rpc.session import Session, end

__all__ = ["run_node", "serve_node"]

log = logging.getLogger("kvrelay.node")

WATCH_S = 0.1
GOODBYE_S = 2.0  # for the last report to be read


def serve_node(
    role: Role,
    config: NodeConfig,
    build: Callable[[NodeIdentity, Metrics, ExitStack], tuple[EngineLoop[Any], Registration]],
) -> int:
    """Run a node's process; returns its exit code. Raises ConfigError when it cannot start.

    `build` makes the engine; what must be closed at the end it enters into the stack.
    """
    identity = NodeIdentity.new(config.name(role))
    setup_logging(config.logs, role=role, node=identity.node_id)
    metrics = Metrics(NodeMetric)
    with ExitStack() as stack:
        endpoint = stack.enter_context(closing(serve_metrics(metrics, config.metrics_listen)))
        log.info("metrics", extra={"port": endpoint.port})
        engine, registration = build(identity, metrics, stack)

        def observe(stats: NodeStats) -> None:
            metrics.set_node(identity.node_id, role, stats)

        return uvloop.run(run_node(engine, registration, config, observe))


async def run_node(
    engine: EngineLoop[Any],
    registration: Registration,
    config: NodeConfig,
    observe: Callable[[NodeStats], None],
) -> int:
    """Run the node until it is told to leave; returns the exit code. `observe` gets the stats every `WATCH_S`."""
    server = RpcServer(config.listen)
    await server.start()
    log.info("listening", extra={"port": server.port, "incarnation": registration.identity.incarnation})
    process = _NodeProcess(engine, registration, config, server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.signalled)
    engine.start()
    try:
        return await process.run(observe)
    finally:
        await asyncio.to_thread(engine.stop)
        await server.stop(1.0)


class _NodeProcess:
    def __init__(self, engine: EngineLoop[Any], registration: Registration, config: NodeConfig, server: RpcServer):
        self._engine = engine
        self._config = config
        self._server = server
        self._session = Session(config.bootstrap, registration, engine, self._drain_by)
        self._leave_by: float | None = None  # draining, until then at most; monotonic seconds
        self._signals = 0

    def signalled(self) -> None:
        self._signals += 1
        self._drain_by(self._config.drain_timeout if self._signals == 1 else 0.0)

    def _drain_by(self, deadline_s: float) -> None:
        deadline = time.monotonic() + min(deadline_s, self._config.drain_timeout)
        self._leave_by = deadline if self._leave_by is None else min(self._leave_by, deadline)

    async def run(self, observe: Callable[[NodeStats], None]) -> int:
        while not self._engine.ready and self._engine.failure is None and self._leave_by is None:
            await asyncio.sleep(WATCH_S)
        session = asyncio.create_task(self._session.run())
        serving = False
        try:
            while self._leave_by is None:
                if self._engine.failure is not None:
                    return 1
                if session.done():
                    return self._session_ended(session)
                observe(self._engine.stats())
                if serving != (useful := self._useful()):
                    serving = useful
                    await self._server.set_serving(serving)
                    log.info("serving" if serving else "not serving")
                await asyncio.sleep(WATCH_S)
            await self._server.set_serving(False)
            await self._drain(observe)
            return 0 if self._engine.failure is None else 1
        finally:
            await end(session)

    def _useful(self) -> bool:
        return self._engine.turning and bool(self._session.connections)

    @staticmethod
    def _session_ended(session: asyncio.Task[None]) -> int:
        error = session.exception()
        refusals = error.subgroup(Refused) if isinstance(error, BaseExceptionGroup) else None
        if refusals is None:
            log.critical("session failed", exc_info=error)
        else:
            log.critical("refused by the bootstrap", extra={"error": str(refusals.exceptions[0])})
        return 1

    async def _drain(self, observe: Callable[[NodeStats], None]) -> None:
        """Finish what the node has, until the deadline, which another drain or signal may bring forward."""
        assert self._leave_by is not None
        self._engine.begin_drain()
        log.info("draining", extra={"seconds": round(self._leave_by - time.monotonic(), 1)})
        finishing = asyncio.create_task(self._finish())
        while not finishing.done() and self._engine.failure is None and time.monotonic() < self._leave_by:
            observe(self._engine.stats())
            await asyncio.sleep(WATCH_S)
        if not finishing.done():
            log.warning("leaving with work left", extra={"stats": self._engine.stats()})
            await end(finishing)
            return
        log.info("drained")
        for connection in tuple(self._session.connections):
            connection.report(Drained())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._session.flush()

    async def _finish(self) -> None:
        """Return when the node is at rest and nothing new can come."""
        await self._session.flush()  # from here on no bootstrap sends anything new
        while True:
            turns = self._engine.turns  # at rest, and still so once the engine has taken in what had arrived by now
            while self._engine.turns < turns + 2:
                await asyncio.sleep(WATCH_S)
            if self._engine.stats().idle:
                return
