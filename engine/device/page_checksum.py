"""Checksums of pages, equal on every device and node: they tell a receiver whether pages came as they were sent."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["page_checksums"]

# Words worked on at a time: what fits a core's cache, or what fills a device. Twelve bytes of temporary memory each.
SLICE_WORDS = {"cpu": 1 << 16, "cuda": 1 << 24}


def page_checksums(pool: Tensor, pages: Sequence[int]) -> tuple[int, ...]:
    """One unsigned 64-bit number for each of these pages of a contiguous pool ``[num_pages, ...]``, from its raw bytes.

    The sum of a page's 32-bit words (bytes, if those are not whole), each times a weight of its place, modulo 2^64:
    multilinear hashing as in Lemire and Kaser, "Strongly universal string hashing is fast", 2014, without the last
    shift. The weights are odd, so a change within one word never goes unseen. Of any other two pages, be it words that
    changed places or a page of zeros, one in 2^32 choices of weights at the most sees no difference: two words differ
    by a multiple of 2^31 at the most, which leaves 32 random bits of an odd weight. The weights are known to all, so
    this finds faults, not forgeries. It says nothing of which page it is: that follows from the order.
    Raises IndexError for a page outside the pool, RuntimeError when a device fails.
    """
    rows = pool.view(len(pool), -1)
    words = rows.view(torch.int32 if rows[0].nbytes % 4 == 0 else torch.uint8)
    weights = _weights(words.shape[1])
    wanted = np.array(pages, dtype=np.int64)
    sums = np.zeros_like(wanted)
    if pool.device.type == "cpu":
        # Not torch: it would share each slice out among as many threads as compute, which are busy computing.
        _add_up(words.numpy(), wanted, weights, sums, SLICE_WORDS["cpu"])
    else:
        # Not the stream of the forward: the pages are written, and what is queued behind them is nothing to wait for.
        with torch.cuda.stream(_stream(pool.device)):
            there = torch.from_numpy(sums).to(pool.device)
            indices = torch.from_numpy(wanted).to(pool.device)
            _add_up(words, indices, _weights_on(pool.device, len(weights)), there, SLICE_WORDS["cuda"])
            sums = there.cpu().numpy()
    found: list[int] = sums.view(np.uint64).tolist()
    return tuple(found)


def _add_up(words: Any, wanted: Any, weights: Any, sums: Any, most: int) -> None:
    """Add the weighted words ``[num_pages, width]`` of the wanted pages to `sums`, `most` at a time.

    All of numpy or all of torch.
    """
    width = len(weights)
    height = max(1, most // width)
    for left in range(0, width, most):
        columns = slice(left, left + most)
        for top in range(0, len(wanted), height):
            few = slice(top, top + height)
            sums[few] += (words[wanted[few], columns] * weights[columns]).sum(1)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _weights_on(device: torch.device, count: int) -> Tensor:
    return torch.from_numpy(_weights(count)).to(device)


@functools.cache
def _weights(count: int) -> NDArray[np.int64]:
    """``[count]`` odd numbers: SplitMix64 (Steele, Lea and Flood, 2014) from state 0, with the lowest bit set."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return mixed.view(np.int64)
