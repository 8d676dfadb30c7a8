"""A front door without sockets: recorded links, a manual clock, and nodes played by the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from bootstrap.config import BootstrapConfig
from bootstrap.front import FrontDoor
from bootstrap.registry import Node, Registry
from bootstrap.requests import Ask, LiveRequest
from engine.core.clock import ManualClock
from engine.core.errors import KVRelayError
from engine.core.handoff import FailureCause
from engine.core.messages import (
    Command,
    Grant,
    Granted,
    Heartbeat,
    NodeStats,
    Registration,
    Report,
    Reserve,
    RoomFailed,
    StepOutput,
    Submit,
)
from engine.core.metrics import FrontDoorMetric, Metrics
from engine.core.sampling import FinishReason, SamplingParams, StoppingParams
from engine.core.types import NodeIdentity, PageLayout, PoolMemory, Role, RoomKey, TokenOutput

__all__ = ["FINGERPRINT", "MODEL", "PAGE", "House", "RecordingLink", "ask", "registration", "retracted", "token"]

MODEL, FINGERPRINT, PAGE = "tiny", "f" * 32, 4
SERVING = NodeStats(pages_total=100, pages_free=100, head_room=400, serving=True)

C = TypeVar("C", bound=Command)


class RecordingLink:
    """Keeps what a node was sent."""

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.closed: KVRelayError | None = None

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def close(self, error: KVRelayError) -> None:
        self.closed = error

    def of(self, kind: type[C]) -> list[C]:
        return [command for command in self.sent if isinstance(command, kind)]


def registration(
    role: Role,
    node_id: str = "",
    *,
    incarnation: str = "",
    num_pages: int = 100,
    page_size: int = PAGE,
    dtype: str = "float32",
    fingerprint: str = FINGERPRINT,
    model: str = MODEL,
    protocol_version: int = 1,
    reserved: int = 8,
    max_running: int = 0,
    max_context: int = 4096,
    device: str = "cpu",
    agent_metadata: bytes = b"agent",
) -> Registration:
    layout = PageLayout(page_size, 2, 1, 8, dtype, fingerprint)
    identity = NodeIdentity(node_id or str(role), incarnation or "1")
    page_bytes = 2 * 2 * 8 * 4 * page_size
    return Registration(
        identity=identity,
        role=role,
        model=model,
        layout=layout,
        memory=PoolMemory(4096, page_bytes, num_pages, device),
        agent_metadata=agent_metadata,
        max_context=max_context,
        reserved_decode_tokens=reserved if role is Role.DECODE else 0,
        max_running=max_running,
        protocol_version=protocol_version,
    )


def retracted(key: RoomKey) -> RoomFailed:
    """What a node without pages says of the room that has to give way."""
    return RoomFailed(key, "decoding", "retracted: out of pages", cause=FailureCause.RETRACTED)


def ask(
    request_id: str = "r1",
    token_ids: Sequence[int] = range(10),
    *,
    max_new_tokens: int = 4,
    priority: int | None = None,
    routing_key: str = "",
    deadline: float | None = None,
    sampling: SamplingParams | None = None,
) -> Ask:
    return Ask(
        request_id=request_id,
        token_ids=tuple(token_ids),
        sampling=sampling or SamplingParams(),
        stopping=StoppingParams(max_new_tokens=max_new_tokens),
        priority=priority,
        routing_key=routing_key,
        deadline=deadline,
    )


def token(key: RoomKey, index: int, finish: FinishReason | None = None) -> TokenOutput:
    """Token `1000 + index`, so that an answer shows what it is made of."""
    return TokenOutput(key, index, 1000 + index, -0.5, finish)


class House:
    """A front door and what a test does to it. Books are checked after every step."""

    def __init__(self, config: BootstrapConfig | None = None):
        self.clock = ManualClock(100.0)
        self.config = config or BootstrapConfig()
        self.metrics = Metrics(FrontDoorMetric)
        self.front = FrontDoor(self.config, Registry(MODEL, FINGERPRINT, self.clock), self.metrics, self.clock)
        self.links: dict[Node, RecordingLink] = {}

    def join(self, role: Role, node_id: str = "", stats: NodeStats = SERVING, **fields: object) -> Node:
        """A node attaches and says that it serves."""
        link = RecordingLink()
        node = self.front.join(registration(role, node_id, **fields), link)  # type: ignore[arg-type]
        self.links[node] = link
        self.front.on_report(node, Heartbeat(stats))
        self.check()
        return node

    def submit(self, wanted: Ask) -> LiveRequest:
        request = self.front.submit(wanted, lambda: None)
        self.check()
        return request

    def submitted(self, node: Node) -> list[Submit]:
        return self.links[node].of(Submit)

    def reserved(self, node: Node) -> list[Reserve]:
        return self.links[node].of(Reserve)

    def granted(self, node: Node) -> list[Granted]:
        return self.links[node].of(Granted)

    def grant(self, node: Node, key: RoomKey | None = None, head_room: int = 300) -> RoomKey:
        """The decode node grants a room: by default the last one it was asked for."""
        key = key or self.reserved(node)[-1].reservation.key
        self.front.on_report(node, Grant(key, (1, 2, 3), head_room))
        self.check()
        return key

    def output(self, node: Node, *tokens: TokenOutput, **reports: Any) -> None:
        self.front.on_output(node, StepOutput(tokens, **reports))
        self.check()

    def report(self, node: Node, report: Report) -> None:
        self.front.on_report(node, report)
        self.check()

    def advance(self, seconds: float, *alive: Node) -> None:
        """Time passes; the nodes in `alive` go on reporting what they said last."""
        self.clock.advance(seconds)
        for node in alive:
            self.front.on_report(node, Heartbeat(node.stats))
        self.front.tick()
        self.check()

    def late(self, kind: str) -> float:
        name = FrontDoorMetric.LATE.metric
        return self.metrics.registry.get_sample_value(name, {"kind": kind}) or 0.0

    def observed(self, metric: FrontDoorMetric, **labels: str) -> float:
        """How many values a histogram has seen."""
        return self.metrics.registry.get_sample_value(f"{metric.metric}_count", labels) or 0.0

    def check(self) -> None:
        self.front.check_integrity()
