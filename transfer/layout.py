"""Page pools as NIXL descriptors: one descriptor a page, so that a page's index is its descriptor's index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.core.types import PoolMemory

__all__ = ["PageChecksums", "memory_type", "page_descriptors", "pool_region"]

PageChecksums: TypeAlias = Callable[[Sequence[int]], tuple[int, ...]]  # of pages of this node's pool, in their order


def memory_type(memory: PoolMemory) -> str:
    """NIXL's name for the kind of memory."""
    return "VRAM" if memory.device == "cuda" else "DRAM"


def pool_region(memory: PoolMemory) -> list[tuple[int, int, int, str]]:
    """The whole pool as one region to register: address, bytes, device, note."""
    return [(memory.base_address, memory.page_bytes * memory.num_pages, memory.device_index, "")]


def page_descriptors(memory: PoolMemory) -> NDArray[np.uint64]:
    """All pages as one strided row ``[1, 5]``: address, bytes a page, device, stride, number of pages.

    NIXL merges descriptors that are adjacent on both sides of a write into one copy.
    """
    row = (memory.base_address, memory.page_bytes, memory.device_index, memory.page_bytes, memory.num_pages)
    return np.array([row], dtype=np.uint64)
