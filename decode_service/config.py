"""Options of a decode node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.config import Bytes, option
from engine.core.errors import ConfigError
from engine.core.node_config import NodeConfig, host_pool_problems
from engine.core.room_budget import never_fits

__all__ = ["DecodeConfig", "DecodeOptions", "check_pool"]


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Decoding."""

    max_running: int = option(
        64, "requests that hold pages here at once: decoding, or with their pages on the way", low=1
    )
    reserved_decode_tokens: int = option(
        128, "set aside for each request on top of its prompt; more retracts less and admits less", unit="tokens", low=0
    )
    host_kv_memory: Bytes | None = option(
        Bytes("256MiB"),
        "host memory for the pages of retracted requests; none: they go back through a prefill node",
        low=1,
    )
    priority_scheduling: bool = option(False, "admit by the priority of requests first, then by arrival")
    low_priority_first: bool = option(False, "smaller priorities are admitted first")

    def problems(self) -> Iterable[str]:
        yield from host_pool_problems(self.host_kv_memory)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Decode node."""

    node: NodeConfig = field(default_factory=NodeConfig)
    decode: DecodeOptions = field(default_factory=DecodeOptions)


def check_pool(options: DecodeOptions, num_pages: int, page_size: int) -> None:
    """Raise ConfigError when not even the smallest request would ever be admitted into a pool of this size."""
    reserved, capacity = options.reserved_decode_tokens, num_pages * page_size
    if never_fits(1, 1, capacity, reserved, page_size) is not None:
        pool = f"{num_pages} pages of {page_size} tokens"
        limit = f"at most {capacity - page_size}, all but one page of the pool (num_pages, kv_memory: {pool})"
        raise ConfigError([f"reserved_decode_tokens is {reserved}; allowed: {limit}"])
