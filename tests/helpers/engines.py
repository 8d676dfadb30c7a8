"""Real engines, with a real device and real transfer, whose engine thread is the test itself.

`turn` does what the thread does in one round, then checks the books; so a test decides what comes between two rounds.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from transformers import PreTrainedModel

from decode_service.config import DecodeConfig, DecodeOptions
from decode_service.loop import DecodeEngine
from engine.core.clock import Clock, monotonic
from engine.core.loop import EngineLoop, Link
from engine.core.messages import Command, LinkEvent, PeerJoined
from engine.core.metrics import Metrics, NodeMetric
from engine.core.node_config import NodeConfig
from engine.core.types import NodeIdentity, PeerInfo, Role
from engine.device.kv_pool import KVPool
from engine.device.runner import TransformersRunner
from engine.device.setup import NodeDevice
from engine.device.weights import load_model
from prefill_service.config import PrefillConfig
from prefill_service.loop import PrefillEngine
from prefill_service.options import SchedulerConfig
from prefill_service.ranks import Ranks
from tests.helpers.models import prepared_tiny
from transfer.agent import TransferAgent
from transfer.receiver import ReceiverEvent
from transfer.sender import SenderEvent
from unified_service.config import UnifiedConfig, UnifiedOptions
from unified_service.loop import UnifiedEngine

__all__ = [
    "PAGE",
    "Driven",
    "DrivenAlone",
    "decode_engine",
    "introduce",
    "prefill_engine",
    "tiny_device",
    "unified_engine",
]

PAGE = 4
PATIENCE_S = 10.0
E = TypeVar("E", bound=EngineLoop[Any])


@functools.cache
def _weights() -> PreTrainedModel:
    return load_model(prepared_tiny(), dtype="float32", max_context=512, report=lambda line: None)


def tiny_device(num_pages: int, host_pages: int | None = None) -> NodeDevice:
    """A tiny model with a pool of `num_pages` pages of PAGE tokens, and a host pool. All devices share the weights."""
    model = prepared_tiny()
    layout = model.layout(PAGE, "float32")
    pool = KVPool(layout, num_pages)
    host = None if host_pages is None else KVPool(layout, host_pages)
    return NodeDevice(model, layout, pool, TransformersRunner(_weights(), pool), max_context=512, host_pool=host)


class DrivenAlone(Generic[E]):
    """An engine with its helper threads running and its own thread played by the test."""

    def __init__(self, engine: E, device: NodeDevice):
        self.engine = engine
        self.device = device
        self.incidents: list[str] = []

    def tell(self, link: Link | None, *items: Command | LinkEvent | SenderEvent | ReceiverEvent) -> None:
        """Hand over what a session or a helper thread would post, and let the engine take it in. Runs no pass."""
        for item in items:
            self.engine.post(link, item)
        self.take_in()

    def take_in(self) -> None:
        self.engine._take_in(wait=False)
        self.engine.check_integrity()

    def turn(self) -> bool:
        """One round of the engine thread. True when another may have work to do at once."""
        self.take_in()
        try:
            busy = self.engine.step()
        except Exception:
            incident = secrets.token_hex(6)
            self.incidents.append(incident)
            self.engine.step_failed(incident)
            busy = True
        self.engine.check_integrity()
        return busy

    def until(self, condition: Callable[[], bool], what: str, *, passes: bool = True) -> None:
        """Rounds until a condition holds; without `passes` it only takes in what comes."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"did not happen: {what}"
            if not passes:
                self.take_in()
            if not passes or not self.turn():
                time.sleep(0.001)

    @property
    def stats(self) -> Any:
        """Counts as of now."""
        return self.engine.collect_stats()

    def failures(self) -> float:
        """Rooms that failed on this node, by its own metric."""
        samples = [s for family in self.engine.metrics.registry.collect() for s in family.samples]
        return sum(s.value for s in samples if s.name == NodeMetric.FAILED.metric)


class Driven(DrivenAlone[E]):
    """One that transfers pages."""

    def __init__(self, engine: E, device: NodeDevice, agent: TransferAgent, role: Role):
        super().__init__(engine, device)
        self.agent = agent
        self.peer = PeerInfo(agent.identity, role, device.memory, agent.metadata)


@contextmanager
def decode_engine(
    num_pages: int,
    *,
    host_pages: int | None = None,
    settle_s: float | None = None,
    clock: Clock = monotonic,
    node_id: str = "d",
    **options: Any,
) -> Iterator[Driven[DecodeEngine]]:
    """`options` are those of DecodeOptions; nothing is reserved unless they say so. Settling may take less time, as
    between two nodes of one process there are no buffers for anything to lie in.
    """
    device = tiny_device(num_pages, host_pages)
    agent = TransferAgent(NodeIdentity.new(node_id), device.memory)
    config = DecodeConfig(NodeConfig(), DecodeOptions(**({"reserved_decode_tokens": 0} | options)))
    engine = DecodeEngine(device, config, agent, Metrics(NodeMetric), clock)
    if settle_s is not None:
        engine._receiver._settle = settle_s
    engine._receiver.start()
    try:
        engine.warm_up()
        yield Driven(engine, device, agent, Role.DECODE)
    finally:
        engine.stop()
        agent.close()
    assert engine._receiver.failure is None


@contextmanager
def prefill_engine(
    num_pages: int,
    *,
    host_pages: int | None = None,
    ranks: Ranks | None = None,
    kv_checksum: bool = False,
    **options: Any,
) -> Iterator[Driven[PrefillEngine]]:
    """`options` are those of SchedulerConfig. ranks: which it is one of."""
    device = tiny_device(num_pages, host_pages)
    agent = TransferAgent(NodeIdentity.new("p"), device.memory)
    config = PrefillConfig(NodeConfig(write_timeout=5.0), SchedulerConfig(**options), kv_checksum=kv_checksum)
    engine = PrefillEngine(device, config, agent, Metrics(NodeMetric), ranks=ranks)
    engine._sender.start()
    try:
        engine.warm_up()
        yield Driven(engine, device, agent, Role.PREFILL)
    finally:
        engine.stop()
        agent.close()
    assert engine._sender.failure is None


@contextmanager
def unified_engine(
    num_pages: int, *, scheduler: SchedulerConfig, options: UnifiedOptions, host_pages: int | None = None
) -> Iterator[DrivenAlone[UnifiedEngine]]:
    device = tiny_device(num_pages, host_pages)
    config = UnifiedConfig(NodeConfig(page_size=PAGE), scheduler, options)
    assert not list(config.problems())
    engine = UnifiedEngine(device, config, Metrics(NodeMetric))
    engine.warm_up()
    yield DrivenAlone(engine, device)
    engine.stop()


def introduce(link: Link, *nodes: Driven[Any]) -> None:
    """Each node hears of every other."""
    for node in nodes:
        node.tell(link, *(PeerJoined(other.peer) for other in nodes if other is not node))
