"""Options of a unified node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.config import option
from engine.core.node_config import NodeConfig
from prefill_service.options import SchedulerConfig

__all__ = ["UnifiedConfig", "UnifiedOptions"]


@dataclass(frozen=True, slots=True)
class UnifiedOptions:
    """Unified decoding."""

    max_running: int = option(64, "requests that hold pages here at once: being prefilled, or decoding", low=1)
    mixed_chunk: bool = option(
        True, "decode in the forwards that compute prompts; else prompts go first, alone. Needs a chunk_size"
    )
    schedule_conservativeness: float = option(
        1.0, "more expects longer answers of what decodes: retracts less and admits less", low=0
    )


@dataclass(frozen=True, slots=True)
class UnifiedConfig:
    """Unified node."""

    node: NodeConfig = field(default_factory=NodeConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    unified: UnifiedOptions = field(default_factory=UnifiedOptions)

    @property
    def mixes(self) -> bool:
        """Prompts and answers share forwards."""
        return self.unified.mixed_chunk and self.scheduler.chunk_size is not None

    def problems(self) -> Iterable[str]:
        chunk, page, rows = self.scheduler.chunk_size, self.node.page_size, self.unified.max_running
        if self.unified.mixed_chunk and chunk is not None and chunk < rows + page:
            limit = f"at least {rows + page} with mixed_chunk: a page of a prompt beside max_running decoding requests"
            yield f"chunk_size is {chunk}; allowed: {limit}"
