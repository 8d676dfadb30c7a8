"""The KV pages of a node: one tensor, and the addresses inside it.

Which page belongs to whom is the page allocator's business; what its content means is the prefix cache's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.core.types import PageLayout

__all__ = ["KVPool", "pages_for_budget"]

# NIXL registers whole memory pages; an aligned pool shares none of them with other data.
_ALIGNMENT = 4096


def pages_for_budget(layout: PageLayout, budget: int) -> int:
    """Pages that fit into `budget` bytes. Raises ConfigError when not even one does."""
    pages = budget // layout.page_bytes
    if pages < 1:
        raise ConfigError([f"kv_memory is {budget}; allowed: at least {layout.page_bytes}, the bytes of one page"])
    return pages


class KVPool:
    """K and V of `num_pages` pages, page-first: ``[num_pages, layers, 2, kv_heads, page_size, head_dim]``.

    All layers of a page lie together, so page p is the `page_bytes` bytes from `base_address + p * page_bytes`.
    pinned: in host memory that a CUDA device copies to and from at full speed, which the system cannot swap out.
    untouched: leave it to the first writes to take the memory from the system, unless it is pinned.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        device: torch.device | str = "cpu",
        *,
        pinned: bool = False,
        untouched: bool = False,
    ):
        assert num_pages > 0
        self.layout = layout
        self.num_pages = num_pages
        self.page_bytes = layout.page_bytes
        self.nbytes = num_pages * layout.page_bytes
        raw = torch.empty(self.nbytes + _ALIGNMENT, dtype=torch.uint8, device=device, pin_memory=pinned)
        raw = raw[-raw.data_ptr() % _ALIGNMENT :][: self.nbytes]
        if not untouched:
            raw.zero_()  # so that the kernel's page faults happen now and not inside the first requests
        shape = (num_pages, layout.layers, 2, layout.kv_heads, layout.page_size, layout.head_dim)
        self.data: Tensor = raw.view(getattr(torch, layout.dtype)).view(shape)
        self.base_address = self.data.data_ptr()
        self.device = self.data.device
        self._layers = self.data.unbind(1)

    def layer(self, index: int) -> Tensor:
        """K (at 0) and V (at 1) of one layer: ``[num_pages, 2, kv_heads, page_size, head_dim]``, a view."""
        return self._layers[index]

    def check_integrity(self) -> None:
        """Peers hold `base_address`: assert that the memory is where and as large as they were told."""
        assert self.data.data_ptr() == self.base_address
        assert self.base_address % _ALIGNMENT == 0
        assert self.data.is_contiguous()
        assert self.data.nbytes == self.nbytes == self.num_pages * self.page_bytes
