"""Options of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.config import option
from engine.core.node_config import NodeConfig
from prefill_service.options import SchedulerConfig

__all__ = ["PrefillConfig", "RankConfig"]


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Data-parallel ranks."""

    dp_size: int = option(
        1, "engines in this process, each a node to the cluster; kv_memory, num_pages, host_kv_memory: of each", low=1
    )
    max_delay_passes: int = option(
        30, "ranks hold prompts back for fewer passes in a row than this, until all have some; 1: never", low=1
    )
    delay_max_running: int | None = option(
        None, "hold back while of so many places a rank has fewer left than its largest batch took; none: off", low=1
    )
    delay_queue_ratio: float | None = option(
        None,
        "hold back while the longest queue is below this part of what is admitted on a rank; none: off",
        low=0,
    )
    delay_low_watermark: float | None = option(
        None, "hold nothing back while a rank uses less than this part of its pages; none: off", low=0, high=1
    )
    delay_self_set: bool = option(
        False, "bound the holding back by arrival rate and ttft_target, instead of passes and 5 seconds in the queue"
    )


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Prefill node."""

    node: NodeConfig = field(default_factory=NodeConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ranks: RankConfig = field(default_factory=RankConfig)
    kv_checksum: bool = option(
        False, "send a checksum with every page; decode nodes check it, and a page that differs fails the attempt"
    )
