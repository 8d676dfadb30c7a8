"""Options that prefill and decode nodes share."""

from __future__ import annotations

import enum
import os
import re
import secrets
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.access import NodeAccess
from engine.core.config import Bytes, address_problems, option
from engine.core.logs import LogConfig
from engine.core.model_store import default_cache_dir
from engine.core.types import NODE_NAME, NODE_NAME_RULE

__all__ = ["NodeConfig", "host_memory", "host_pool_problems"]


def host_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_pool_problems(size: Bytes | None) -> Iterator[str]:
    """What is wrong with a `host_kv_memory` whatever the model. Whether it holds a page of that one shows later."""
    if size is not None and size > (there_is := host_memory()):
        yield f"host_kv_memory is {size}; allowed: at most {there_is}, the memory of this host"


class Dtype(enum.StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Node."""

    bootstrap: tuple[str, ...] = option(("127.0.0.1:7070",), "bootstrap addresses, host:port; the node attaches to all")
    node_id: str = option(
        "", f"name of this node, unique in the cluster, {NODE_NAME_RULE}; empty: made from host name and role"
    )
    listen: str = option("127.0.0.1:0", "host:port of the health service; port 0 picks one and logs it")
    metrics_listen: str = option("127.0.0.1:0", "host:port of the Prometheus endpoint; port 0 picks one and logs it")
    model: str = option("smollm2-135m", "smollm2-135m, a Hugging Face directory or id, or a GGUF file")
    model_dir: Path = option(default_cache_dir(), "where prepared models are kept")
    device: Device = option(Device.AUTO, "where the model and the page pool live; auto: cuda where there is one")
    dtype: Dtype = option(Dtype.FLOAT32, "of weights and activations")
    kv_dtype: Dtype | None = option(None, "of the page pool; none: the same as dtype")
    page_size: int = option(16, "tokens a KV page; equal on all nodes of a cluster", low=1, high=256)
    kv_memory: Bytes = option(Bytes("1GiB"), "size of the page pool", low=1)
    num_pages: int | None = option(None, "size of the page pool in pages; overrides kv_memory", low=2)
    memory_limit: Bytes | None = option(
        None, "weights and page pool together take at most this; none: the memory of the device", low=1
    )
    max_context: int | None = option(
        None, "longest prompt and answer together, in tokens; none: what the model was trained for", low=2
    )
    threads: int | None = option(None, "torch threads of this process; none: torch's own choice", low=1)
    inflight_bytes: Bytes = option(Bytes("64MiB"), "posted and not yet terminal writes to one peer, at most", low=1)
    write_timeout: float = option(30.0, "a write that takes longer fails its request", unit="s", low=0.1)
    drain_timeout: float = option(120.0, "a draining node leaves after this long, done or not", unit="s", low=0)
    stall_timeout: float = option(60.0, "not serving while one engine pass takes longer than this", unit="s", low=1)
    access: NodeAccess = field(default_factory=NodeAccess)
    logs: LogConfig = field(default_factory=LogConfig)

    def problems(self) -> Iterable[str]:
        yield from address_problems("bootstrap", self.bootstrap)
        if self.node_id and not NODE_NAME.fullmatch(self.node_id):
            yield f"node_id is {self.node_id!r}; allowed: {NODE_NAME_RULE}"

    @property
    def page_dtype(self) -> str:
        """Of the KV pages."""
        return self.kv_dtype or self.dtype

    def name(self, role: str) -> str:
        """The node id: as given, or made so that several nodes of one host never take each other's place."""
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
        return self.node_id or f"{host}-{role}-{secrets.token_hex(2)}"
