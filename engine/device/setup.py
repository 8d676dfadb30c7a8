"""From options to a loaded model with its page pool: the start of every node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.core.errors import ConfigError
from engine.core.model_store import PreparedModel, ensure_prepared
from engine.core.node_config import Device, NodeConfig, host_memory
from engine.core.types import PageLayout, PoolMemory
from engine.device.kv_pool import KVPool, pages_for_budget
from engine.device.runner import Runner, TransformersRunner
from engine.device.weights import load_model, megabytes

__all__ = ["NodeDevice", "set_up_device", "set_up_ranks"]

log = logging.getLogger("kvrelay.device")


@dataclass(frozen=True, slots=True)
class NodeDevice:
    model: PreparedModel
    layout: PageLayout
    pool: KVPool
    runner: Runner
    max_context: int  # tokens, prompt and answer together
    host_pool: KVPool | None = None  # in host memory, for pages that leave `pool`

    @property
    def memory(self) -> PoolMemory:
        device = self.pool.device
        return PoolMemory(
            self.pool.base_address, self.pool.page_bytes, self.pool.num_pages, device.type, device.index or 0
        )

    @property
    def host_pages(self) -> int:
        return 0 if self.host_pool is None else self.host_pool.num_pages

    def bind(self) -> None:
        """Make this device the one that the calling thread launches kernels on."""
        if self.pool.device.type == "cuda":
            torch.cuda.set_device(self.pool.device)


def set_up_device(
    config: NodeConfig,
    report: Callable[[str], None] = log.info,
    *,
    host_kv_memory: int | None = None,
    host_untouched: bool = False,
) -> NodeDevice:
    """Prepare and load the model and allocate the pool. Raises ConfigError with the reason when that cannot be.

    host_kv_memory: bytes of a second pool, in host memory; None: there is none. host_untouched: see `KVPool`.
    """
    return next(set_up_ranks(config, 1, report, host_kv_memory=host_kv_memory, host_untouched=host_untouched))


def set_up_ranks(
    config: NodeConfig,
    ranks: int,
    report: Callable[[str], None] = log.info,
    *,
    host_kv_memory: int | None = None,
    host_untouched: bool = False,
) -> Iterator[NodeDevice]:
    """`set_up_device` for each rank of a process, as the caller asks for the next one.

    Ranks are dealt out over the CUDA devices that there are. Those on one device share one copy of the weights, and
    each has pools of its own, of the full size that was asked for.
    """
    model = ensure_prepared(config.model, config.model_dir, report)
    devices = _devices(config.device, ranks)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    layout = model.layout(config.page_size, config.page_dtype)
    num_pages = config.num_pages or pages_for_budget(layout, config.kv_memory)
    pool_bytes = num_pages * layout.page_bytes
    max_context = config.max_context or model.max_context
    weights: dict[torch.device, PreTrainedModel] = {}
    for device in devices:
        pools = devices.count(device)  # on this device
        memory = _memory(config, device)
        if pools * pool_bytes > memory:
            limit = "memory_limit" if memory == config.memory_limit else "the memory of this device"
            each = f", {pools} times" if pools > 1 else ""
            raise _pool_refused(num_pages, pool_bytes, f"does not fit in {megabytes(memory)}{each}, {limit}")
        on_host = pools * pool_bytes if device.type == "cpu" else 0
        host_pages = None if host_kv_memory is None else _host_pages(layout, host_kv_memory, ranks, on_host)
        if device not in weights:
            weights[device] = load_model(
                model,
                dtype=config.dtype,
                max_context=max_context,
                report=report,
                device=device,
                memory_budget=memory - pools * pool_bytes,
            )
        pool = _pool(layout, num_pages, device, report)
        host_pool = None if host_pages is None else _host_pool(layout, host_pages, device, report, host_untouched)
        yield NodeDevice(model, layout, pool, TransformersRunner(weights[device], pool), max_context, host_pool)


def _pool(layout: PageLayout, num_pages: int, device: torch.device, report: Callable[[str], None]) -> KVPool:
    size = num_pages * layout.page_bytes
    try:
        pool = KVPool(layout, num_pages, device)
    except RuntimeError as error:  # torch has no memory: others use it, or this process may not
        raise _pool_refused(num_pages, size, f"cannot be allocated: {str(error).splitlines()[0]}") from error
    report(
        f"page pool: {num_pages} pages of {layout.page_size} tokens, {layout.page_bytes} bytes each, "
        f"{megabytes(size)} on {device}"
    )
    return pool


def _host_pages(layout: PageLayout, budget: int, pools: int, taken: int) -> int:
    """Pages of a host pool of `budget` bytes, one of several, beside the `taken` bytes of page pools on the host."""
    there_is = (host_memory() - taken) // pools
    if not layout.page_bytes <= budget <= there_is:
        limit = f"{layout.page_bytes}, one page, to {there_is}, the memory of this host"
        raise ConfigError([f"host_kv_memory is {int(budget)} bytes; allowed: {limit}"])
    return budget // layout.page_bytes


def _host_pool(
    layout: PageLayout, num_pages: int, device: torch.device, report: Callable[[str], None], untouched: bool
) -> KVPool:
    size = megabytes(num_pages * layout.page_bytes)
    try:
        pool = KVPool(layout, num_pages, pinned=device.type == "cuda", untouched=untouched)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError([f"host_kv_memory: a pool of {size} cannot be allocated: {reason}"]) from error
    report(f"host pool: {num_pages} pages, {size} of host memory")
    return pool


def _pool_refused(num_pages: int, pool_bytes: int, why: str) -> ConfigError:
    pool = f"page pool of {megabytes(pool_bytes)} ({num_pages} pages)"
    return ConfigError([f"kv_memory, num_pages: a {pool} {why}"])


def _devices(device: Device, ranks: int) -> list[torch.device]:
    """The device of each rank."""
    available = torch.cuda.is_available()
    if device is Device.CUDA and not available:
        raise ConfigError(["device: cuda was asked for, but torch finds no CUDA device"])
    if not available or device is Device.CPU:
        return [torch.device("cpu")] * ranks
    return [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(ranks)]


def _memory(config: NodeConfig, device: torch.device) -> int:
    """Bytes that weights and page pool may take together."""
    there_is = int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_memory()
    return there_is if config.memory_limit is None else min(config.memory_limit, there_is)
