"""An engine loop with no engine in it, and the two ends of a link: what they are told and how they answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from engine.core.clock import Clock, monotonic
from engine.core.loop import EngineLoop, Link
from engine.core.messages import Command, LinkLost, LinkUp, NodeStats, Registration, Report, StepOutput
from engine.core.metrics import Metrics, NodeMetric
from engine.core.types import NodeIdentity, PageLayout, PoolMemory, Role, RoomKey, TokenOutput

__all__ = ["RecordingLink", "TinyEngine", "registration", "until"]

PATIENCE_S = 10.0
R = TypeVar("R", bound=Report)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another task, thread or process is about to do; fail naming it when it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        await asyncio.sleep(0.005)


class RecordingLink:
    """A `Link` that keeps what an engine says on it."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.outputs: list[StepOutput] = []
        self.lease = True

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def publish(self, output: StepOutput) -> None:
        self.outputs.append(output)

    def lease_valid(self) -> bool:
        return self.lease

    def of(self, kind: type[R]) -> list[R]:
        return [report for report in self.reports if isinstance(report, kind)]

    def tokens(self, key: RoomKey) -> list[TokenOutput]:
        return [token for output in self.outputs for token in output.tokens if token.key == key]


class TinyEngine(EngineLoop[str]):
    """Keeps what it is handed, in order, and does in each pass what the test put into `on_step`. Events are text."""

    def __init__(self, clock: Clock = monotonic, stall_timeout_s: float = 60.0):
        super().__init__("tiny-engine", Metrics(NodeMetric), stall_timeout_s, clock)
        self.taken: list[Command | LinkUp | LinkLost | str] = []
        self.came_over: list[Link | None] = []
        self.on_warm_up: Callable[[], object] = lambda: None
        self.on_handle: Callable[[Command | str], None] = lambda item: None
        self.on_step: Callable[[], bool] = lambda: False
        self.on_check: Callable[[], None] = lambda: None
        self.incidents: list[str] = []
        self.unhandled: list[tuple[Command | str, str]] = []  # and the incident
        self.checks = 0
        self.holds = NodeStats(pages_total=8, pages_free=8)

    def integrity_count(self) -> float:
        return self.metrics.registry.get_sample_value(NodeMetric.INTEGRITY.metric) or 0.0

    def warm_up(self) -> None:
        self.on_warm_up()

    def handle(self, link: Link | None, item: Command | str) -> None:
        self._take(link, item)
        self.on_handle(item)

    def handling_failed(self, link: Link | None, item: Command | str, incident: str) -> None:
        self.unhandled.append((item, incident))

    def link_of(self, key: RoomKey) -> Link | None:
        return None

    def abort(self, key: RoomKey, why: str) -> None:
        raise AssertionError(f"there is no room {key} here")

    def link_up(self, link: Link) -> None:
        self._take(link, LinkUp())

    def link_lost(self, link: Link) -> None:
        self._take(link, LinkLost())

    def _take(self, link: Link | None, item: Command | LinkUp | LinkLost | str) -> None:
        self.came_over.append(link)
        self.taken.append(item)

    def step(self) -> bool:
        return self.on_step()

    def step_failed(self, incident: str) -> None:
        self.incidents.append(incident)

    def collect_stats(self) -> NodeStats:
        return replace(self.holds)

    def check_integrity(self) -> None:
        self.checks += 1
        self.on_check()


def registration(node_id: str = "tiny", role: Role = Role.PREFILL) -> Registration:
    layout = PageLayout(4, 2, 1, 8, "float32", "f" * 32)
    memory = PoolMemory(4096, layout.page_bytes, 8)
    return Registration(NodeIdentity.new(node_id), role, "tiny", layout, memory, b"agent", 512)
