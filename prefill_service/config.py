"""Options of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.node_config import NodeConfig
from prefill_service.options import SchedulerConfig

__all__ = ["PrefillConfig"]


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    node: NodeConfig = field(default_factory=NodeConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
