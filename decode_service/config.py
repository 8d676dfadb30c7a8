"""Options of a decode node."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.config import option
from engine.core.node_config import NodeConfig

__all__ = ["DecodeConfig", "DecodeOptions"]


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Decoding."""

    max_running: int = option(
        64, "requests that hold pages here at once: decoding, or with their pages on the way", low=1
    )
    reserved_decode_tokens: int = option(
        128, "set aside for each request on top of its prompt; more retracts less and admits less", unit="tokens", low=0
    )
    priority_scheduling: bool = option(False, "admit by the priority of requests first, then by arrival")
    low_priority_first: bool = option(False, "smaller priorities are admitted first")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    node: NodeConfig = field(default_factory=NodeConfig)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
