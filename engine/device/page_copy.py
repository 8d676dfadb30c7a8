"""Copies of whole pages from one pool to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.device.kv_pool import KVPool

__all__ = ["copy_pages"]


def copy_pages(source: KVPool, sources: Sequence[int], target: KVPool, targets: Sequence[int]) -> None:
    """Copy page sources[i] of one pool to page targets[i] of another of the same layout, on any devices.

    When it returns the pages are written: they may be handed to a transfer that knows no device streams. A page is one
    contiguous range, so it is one copy, with no third place in between; that to or from pinned memory is asynchronous.
    Raises IndexError for a page outside its pool, RuntimeError when a device fails.
    """
    assert source.layout == target.layout
    for this, that in zip(sources, targets, strict=True):
        target.data[that].copy_(source.data[this], non_blocking=True)
    for pool in (source, target):
        if sources and pool.device.type == "cuda":
            torch.cuda.current_stream(pool.device).synchronize()
