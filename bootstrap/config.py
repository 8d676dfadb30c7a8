"""Options of the bootstrap service."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.access import BootstrapAccess
from engine.core.config import Bytes, option
from engine.core.logs import LogConfig
from engine.core.model_store import DEMO_MODEL, default_cache_dir

__all__ = ["BootstrapConfig"]


@dataclass(frozen=True, slots=True)
class BootstrapConfig:
    """Bootstrap service."""

    listen: str = option("127.0.0.1:7070", "host:port for clients and nodes; port 0 picks one")
    model: str = option(DEMO_MODEL, f"{DEMO_MODEL}, a Hugging Face directory or id, or a GGUF file")
    model_dir: Path = option(default_cache_dir(), "where prepared models are kept")
    max_message_bytes: Bytes = option(Bytes("8MiB"), "largest message taken in; a larger one is refused", low=4096)
    default_max_new_tokens: int = option(512, "length of an answer when a request does not say", unit="tokens", low=1)
    max_queue: int = option(4096, "requests that wait for a decode node, or on unified nodes; more are refused", low=1)
    max_attempts: int = option(
        3, "times a request may fail without a new token; lost nodes are not counted while others serve", low=1
    )
    low_priority_first: bool = option(False, "smaller priority values run first")
    queue_timeout: float = option(
        60.0, "longest wait from arrival to a decode node's grant, or to a unified node's forward", unit="s", low=0.1
    )
    grant_timeout: float = option(
        5.0, "a decode node that has not granted for so long is given up when another has room", unit="s", low=0.1
    )
    prefill_timeout: float = option(
        300.0, "longest time from the grant to the first forward, and from there to the first token", unit="s", low=0.1
    )
    transfer_timeout: float = option(
        60.0, "longest time from the first token to the decode node's first one", unit="s", low=0.1
    )
    token_timeout: float = option(60.0, "longest time between two tokens of the node that decodes", unit="s", low=0.1)
    heartbeat_seconds: float = option(1.0, "nodes report their state this often", unit="s", low=0.05, high=60)
    lease_seconds: float = option(
        5.0, "a node not heard of for so long is gone; a node not answered for so long stops writing", unit="s", low=0.1
    )
    drain_timeout: float = option(120.0, "at shutdown, live requests get this long to end", unit="s", low=0)
    metrics_listen: str = option("127.0.0.1:0", "host:port of the Prometheus endpoint; port 0 picks one and logs it")
    access: BootstrapAccess = field(default_factory=BootstrapAccess)
    logs: LogConfig = field(default_factory=LogConfig)

    def problems(self) -> Iterable[str]:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            yield "lease_seconds: at least twice heartbeat_seconds, or one late heartbeat loses a node"
        yield from self.access.listen_problems(self.listen)
