"""What front doors are told of a prefix cache: all of it once, and from then on what changes."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.loop import Link
from engine.core.messages import CacheDelta
from prefill_service.prefix_cache import PrefixCache

__all__ = ["announce_all", "announce_changes"]

KEYS_A_MESSAGE = 100_000  # about 2 MB, well below the front door's message limit


def announce_all(cache: PrefixCache, link: Link) -> None:
    keys = cache.keys()
    for start in range(0, max(1, len(keys)), KEYS_A_MESSAGE):  # parents first, so any cut is a good one
        link.report(CacheDelta(keys[start : start + KEYS_A_MESSAGE], (), reset=start == 0))


def announce_changes(cache: PrefixCache, links: Iterable[Link]) -> None:
    delta = cache.drain_changes()
    if delta.added or delta.removed:
        for link in links:
            link.report(delta)
