"""The golden cases: inputs with the answers of the reference behaviour (tests/data/golden/README.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.core.lifetime import Timeline
from engine.core.page_keys import page_keys
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import PrefillTask, RoomKey
from engine.device.page_allocator import PageAllocator
from prefill_service.prefix_cache import PrefixCache
from prefill_service.request import PrefillRequest, sibling_key

__all__ = ["Json", "cases", "expand", "fill_cache", "make_request", "make_task"]

Json = dict[str, Any]
_DIRECTORY = Path(__file__).parent.parent / "data" / "golden"


def cases(name: str) -> list[Any]:
    """Parameters (args, want) of a file, for pytest.mark.parametrize."""
    lines = (_DIRECTORY / f"{name}.jsonl").read_text().splitlines()
    loaded = [json.loads(line) for line in lines]
    return [pytest.param(case["args"], case["want"], id=case["case"]) for case in loaded]


def expand(runs: Iterable[tuple[int, int]]) -> list[int]:
    """Token ids of a run-length coded list."""
    return [start + i for start, count in runs for i in range(count)]


def make_task(spec: Json, page_size: int) -> PrefillTask:
    out = expand(spec.get("out", []))
    tokens = tuple(expand(spec["ids"]) + out)
    extra_key = spec.get("extra_key", "")
    return PrefillTask(
        request_id=spec["rid"],
        key=RoomKey.new(0),
        token_ids=tokens,
        first_index=len(out),
        page_keys=page_keys(tokens, page_size, extra_key),
        sampling=SamplingParams(),
        stopping=StoppingParams(spec.get("max_new", 1), ignore_eos=spec.get("ignore_eos", False)),
        priority=spec.get("priority"),
        routing_key=spec.get("routing_key", ""),
        extra_key=extra_key,
    )


def make_request(spec: Json, cache: PrefixCache, page_size: int) -> PrefillRequest:
    task = make_task(spec, page_size)
    return PrefillRequest(
        task=task,
        keys=task.page_keys,
        sibling=sibling_key(task, 32),
        priority=task.priority,
        node=cache.root,
        times=Timeline(),
        queue_time=spec.get("entry", 0.0),
        arrival_tokens=spec.get("arrival_tokens", 0),
    )


def fill_cache(
    cache: PrefixCache, allocator: PageAllocator, prefixes: Iterable[Iterable[tuple[int, int]]], page_size: int
) -> None:
    """Cache the whole pages of some sequences."""
    for runs in prefixes:
        keys = page_keys(expand(runs), page_size)
        node = cache.match(keys)
        pages = cache.pages(node) + allocator.allocate(len(keys) - node.depth, "filler")
        cache.insert(node, keys, pages, "filler")
