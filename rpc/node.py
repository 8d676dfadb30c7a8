"""The process round one engine or several: sessions, health server, signals, drain. The same for all node kinds.

    start engine ─► canary passed ─► attach ─► SERVING ─► SIGTERM, SIGINT or Admin.Drain
                                                             │
    exit 0 ◄─ leave ◄─ idle, or the deadline ◄─ finish ◄─ NOT_SERVING, tell the bootstrap, take nothing new

A second signal skips the waiting. The engine thread's death or a refusal by the bootstrap ends the process with 1.

Each engine is a node of its own to the bootstrap, a *rank* of this process. Ranks come and leave together: the process
serves when all of them do, an order to drain one drains all, and the end of one ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import uvloop

from engine.core.access import is_loopback
from engine.core.logs import setup_logging
from engine.core.loop import EngineLoop
from engine.core.messages import Drained, NodeStats, Registration
from engine.core.metrics import Metrics, NodeMetric, serve_metrics
from engine.core.node_config import NodeConfig
from engine.core.types import NodeIdentity, Role
from rpc.security import server_credentials
from rpc.server import RpcServer
from rpc.session import Session, end, is_refusal
from rpc.signals import StopSignals

__all__ = ["Rank", "rank_ids", "run_node", "serve_node"]

log = logging.getLogger("kvrelay.node")

WATCH_S = 0.1
GOODBYE_S = 2.0  # for the last report to be read

Observe = Callable[[NodeIdentity, NodeStats], None]


@dataclass(frozen=True, slots=True)
class Rank:
    """An engine, and how it introduces itself."""

    engine: EngineLoop[Any]
    registration: Registration

    @property
    def identity(self) -> NodeIdentity:
        return self.registration.identity


def rank_ids(name: str, ranks: int) -> tuple[str, ...]:
    """Node ids of the ranks of a process of this name."""
    return (name,) if ranks == 1 else tuple(f"{name}.{rank}" for rank in range(ranks))


def serve_node(
    role: Role,
    config: NodeConfig,
    build: Callable[[NodeIdentity, Metrics, ExitStack], tuple[EngineLoop[Any], Registration]],
    ranks: int = 1,
) -> int:
    """Run a node's process; returns its exit code. Raises ConfigError when it cannot start.

    `build` makes the engine of one rank after the other; what must be closed at the end it enters into the stack.
    """
    name = config.name(role)
    setup_logging(config.logs, role=role, node=name)
    if config.access.join_token and config.access.tls.tls_ca is None and not all(map(is_loopback, config.bootstrap)):
        log.warning("the join token goes over the network without TLS", extra={"bootstrap": ",".join(config.bootstrap)})
    metrics = Metrics(NodeMetric)
    with ExitStack() as stack:
        endpoint = stack.enter_context(closing(serve_metrics(metrics, config.metrics_listen)))
        log.info("metrics", extra={"port": endpoint.port})
        built = [Rank(*build(NodeIdentity.new(node_id), metrics, stack)) for node_id in rank_ids(name, ranks)]

        def observe(identity: NodeIdentity, stats: NodeStats) -> None:
            metrics.set_node(identity.node_id, role, stats)

        return uvloop.run(run_node(built, config, observe))


async def run_node(ranks: Sequence[Rank], config: NodeConfig, observe: Observe) -> int:
    """Run a process until it is told to leave; returns the exit code. `observe` gets the stats every `WATCH_S`."""
    tls = config.access.tls
    server = RpcServer(config.listen, credentials=server_credentials(tls.tls_cert, tls.tls_key, None))
    await server.start()
    incarnations = ",".join(rank.identity.incarnation for rank in ranks)
    log.info("listening", extra={"port": server.port, "incarnation": incarnations})
    process = _NodeProcess(ranks, config, server, observe)
    StopSignals(lambda: process.drain_by(config.drain_timeout), lambda: process.drain_by(0.0)).install()
    for rank in ranks:
        rank.engine.start()
    try:
        return await process.run()
    finally:
        await asyncio.gather(*(asyncio.to_thread(rank.engine.stop) for rank in ranks))
        await server.stop(1.0)


class _NodeProcess:
    def __init__(self, ranks: Sequence[Rank], config: NodeConfig, server: RpcServer, observe: Observe):
        self._ranks = ranks
        self._engines = [rank.engine for rank in ranks]
        self._sessions = [
            Session(config.bootstrap, r.registration, r.engine, self.drain_by, config.access) for r in ranks
        ]
        self._config = config
        self._server = server
        self._observer = observe
        self._leave_by: float | None = None  # draining, until then at most; monotonic seconds

    def drain_by(self, deadline_s: float) -> None:
        deadline = time.monotonic() + min(deadline_s, self._config.drain_timeout)
        self._leave_by = deadline if self._leave_by is None else min(self._leave_by, deadline)

    async def run(self) -> int:
        while not all(engine.ready for engine in self._engines) and not self._failed and self._leave_by is None:
            await asyncio.sleep(WATCH_S)
        # A full collection looks at all that torch and transformers have loaded, and stops every thread for 250 ms.
        gc.collect()
        gc.freeze()  # what is here now stays for good, and is looked at no more
        sessions = [asyncio.create_task(session.run()) for session in self._sessions]
        serving = False
        try:
            while self._leave_by is None:
                if self._failed:
                    return 1
                for session in sessions:
                    if session.done():
                        return self._session_ended(session)
                self._observe()
                if serving != (useful := self._useful()):
                    serving = useful
                    self._server.set_serving(serving)
                    log.info("serving" if serving else "not serving")
                await asyncio.sleep(WATCH_S)
            self._server.set_serving(False)
            await self._drain()
            return 1 if self._failed else 0
        finally:
            await asyncio.gather(*(end(session) for session in sessions))

    @property
    def _failed(self) -> bool:
        return any(engine.failure is not None for engine in self._engines)

    def _useful(self) -> bool:
        attached = all(session.connections for session in self._sessions)
        return attached and all(engine.turning for engine in self._engines)

    def _observe(self) -> None:
        for rank in self._ranks:
            self._observer(rank.identity, rank.engine.stats())

    @staticmethod
    def _session_ended(session: asyncio.Task[None]) -> int:
        error = session.exception()
        refusals = error.subgroup(is_refusal) if isinstance(error, BaseExceptionGroup) else None
        if refusals is None:
            log.critical("session failed", exc_info=error)
        else:
            log.critical("refused by the bootstrap", extra={"error": str(refusals.exceptions[0])})
        return 1

    async def _drain(self) -> None:
        """Finish what the node has, until the deadline, which another drain or signal may bring forward."""
        assert self._leave_by is not None
        for engine in self._engines:
            engine.begin_drain()
        log.info("draining", extra={"seconds": round(max(0.0, self._leave_by - time.monotonic()), 1)})
        finishing = asyncio.create_task(self._finish())
        while not finishing.done() and not self._failed and time.monotonic() < self._leave_by:
            self._observe()
            await asyncio.sleep(WATCH_S)
        if not finishing.done():
            for rank in (rank for rank in self._ranks if not rank.engine.stats().idle):
                left = {"rank": rank.identity.node_id, "stats": rank.engine.stats()}
                log.warning("leaving with work left", extra=left)
            await end(finishing)
            return
        log.info("drained")
        for session in self._sessions:
            for connection in tuple(session.connections):
                connection.report(Drained())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._flush()

    async def _finish(self) -> None:
        """Return when every rank is at rest and nothing new can come."""
        await self._flush()  # from here on no bootstrap sends anything new
        for engine in self._engines:  # one that is at rest by now stays so
            await self._come_to_rest(engine)

    async def _flush(self) -> None:
        await asyncio.gather(*(session.flush() for session in self._sessions))

    @staticmethod
    async def _come_to_rest(engine: EngineLoop[Any]) -> None:
        while True:
            turns = engine.turns  # at rest, and still so once the engine has taken in what had arrived by now
            while engine.turns < turns + 2:
                await asyncio.sleep(WATCH_S)
            if engine.stats().idle:
                return
