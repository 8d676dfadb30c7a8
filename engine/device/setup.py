"""From options to a loaded model with its page pool: the start of every node."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.core.errors import ConfigError
from engine.core.model_store import PreparedModel, ensure_prepared
from engine.core.node_config import Device, NodeConfig
from engine.core.types import PageLayout, PoolMemory
from engine.device.kv_pool import KVPool, layout_for, pages_for_budget
from engine.device.runner import Runner, TransformersRunner
from engine.device.weights import load_model

__all__ = ["NodeDevice", "set_up_device"]

log = logging.getLogger("kvrelay.device")


@dataclass(frozen=True, slots=True)
class NodeDevice:
    model: PreparedModel
    layout: PageLayout
    pool: KVPool
    runner: Runner
    max_context: int  # tokens, prompt and answer together

    @property
    def memory(self) -> PoolMemory:
        device = self.pool.device
        return PoolMemory(
            self.pool.base_address, self.pool.page_bytes, self.pool.num_pages, device.type, device.index or 0
        )


def set_up_device(config: NodeConfig, report: Callable[[str], None] = log.info) -> NodeDevice:
    """Prepare and load the model and allocate the pool. Raises ConfigError with the reason when that cannot be."""
    model = ensure_prepared(config.model, config.model_dir, report)
    device = _pick(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    layout = layout_for(model, config.page_size, config.kv_dtype or config.dtype)
    num_pages = config.num_pages or pages_for_budget(layout, config.kv_memory)
    pool_bytes = num_pages * layout.page_bytes
    max_context = config.max_context or model.max_context
    loaded = load_model(
        model,
        dtype=config.dtype,
        max_context=max_context,
        report=report,
        device=device,
        memory_budget=_memory(config, device) - pool_bytes,
    )
    pool = KVPool(layout, num_pages, device)
    report(
        f"page pool: {num_pages} pages of {layout.page_size} tokens, {layout.page_bytes} bytes each, "
        f"{pool_bytes / 1e6:,.0f} MB on {device}"
    )
    return NodeDevice(model, layout, pool, TransformersRunner(loaded, pool), max_context)


def _pick(device: Device) -> torch.device:
    available = torch.cuda.is_available()
    if device is Device.CUDA and not available:
        raise ConfigError(["device: cuda was asked for, but torch finds no CUDA device"])
    return torch.device("cuda" if available and device is not Device.CPU else "cpu")


def _memory(config: NodeConfig, device: torch.device) -> int:
    """Bytes that weights and page pool may take together."""
    if config.memory_limit is not None:
        return config.memory_limit
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
