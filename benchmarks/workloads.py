"""What is replayed: a burst that shares a system prompt, and a public trace; and what a forward costs.

The trace names a prompt's tokens by one id for each 512 of them, and equal ids mean equal prompts up to there. Tokens
are made from the ids, so that the scheduler sees prompts that share exactly what those of the trace shared.
"""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.replay import Arrival, CostModel, pairs
from engine.core.page_keys import page_keys

__all__ = ["BLOCK", "GPU_LIKE", "TARGET", "Trace", "burst", "measure_cost", "read_trace"]

BLOCK = 512  # tokens an id of the trace stands for
TARGET = 10.0  # to the first token, in times that the prompt takes alone with nothing cached

GPU_LIKE = CostModel(
    fixed=0.008,
    per_token=4e-5,
    per_pair=1.3e-9,
    token_bytes=131_072,
    link_bytes=25e9,
    source="calculated, not measured: 8 billion parameters in bfloat16 at 400 TFLOP/s, keys and values of 8 heads in "
    "32 layers, a link of 200 Gbit/s",
)


def burst(requests: int, shared: int, own: int, page_size: int) -> list[Arrival]:
    """`requests` that arrive together: the same `shared` tokens, then `own` tokens that no other has."""
    head = tuple(range(shared))
    arrivals = []
    for number in range(requests):
        tokens = head + tuple(range((number + 1) * 100_000, (number + 1) * 100_000 + own))
        arrivals.append(Arrival(0.0, lambda t=tokens: t, page_keys(tokens, page_size)))  # type: ignore[misc]
    return arrivals


@dataclass(frozen=True, slots=True)
class _Line:
    milliseconds: int
    length: int
    output: int
    ids: tuple[int, ...]

    def tokens(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable([i] * BLOCK for i in self.ids))[: self.length]

    @property
    def pages(self) -> tuple[int, ...]:
        return self.ids[: self.length // BLOCK]


@dataclass(frozen=True, slots=True)
class Trace:
    """`ideal` figures are those of a cache that never evicts, of requests that are served one after another."""

    lines: tuple[_Line, ...]
    prompt_tokens: int
    ideal_cached: int  # tokens
    ideal_blocks: float  # share of all blocks that were there before, partly filled ones included
    distinct_pages: int

    @property
    def ideal_hit_rate(self) -> float:
        return self.ideal_cached / self.prompt_tokens

    @property
    def longest(self) -> int:
        return max(line.length for line in self.lines)

    def arrivals(self, cost: CostModel, load: float, chunk: int, *, turns: bool) -> list[Arrival]:
        """In stretched or squeezed time: forwards would take `load` of it if the cache never evicted.

        turns: a prompt that goes on where another has ended comes when that has been answered, if it would come before.
        """
        busy, seen = 0.0, set[int]()
        for line in self.lines:
            busy += cost.of_prompt(_reusable(line, seen), line.length, chunk)
            seen.update(line.pages)
        first = self.lines[0].milliseconds
        scale = busy / load / (self.lines[-1].milliseconds - first)
        return [
            Arrival(
                (line.milliseconds - first) * scale,
                line.tokens,
                tuple(i.to_bytes(16, "big") for i in line.pages),
                max_new_tokens=max(1, line.output),
                target=TARGET * cost.of_prompt(0, line.length, chunk),
                after=before if turns else None,
            )
            for line, before in zip(self.lines, self._turns_before(), strict=True)
        ]

    def _turns_before(self) -> Iterator[int | None]:
        """For each prompt the last one all of whose pages it begins with, where those are more than a system prompt."""
        ends: dict[int, int] = {}  # last page -> place of the prompt; ids of pages tell all that is before them
        for place, line in enumerate(self.lines):
            yield next((ends[i] for i in reversed(line.pages[1:]) if i in ends), None)
            if line.pages:
                ends[line.pages[-1]] = place


def _reusable(line: _Line, seen: set[int]) -> int:
    """Tokens of the whole pages that are in `seen`, at least one token less than all."""
    found = sum(1 for _ in itertools.takewhile(seen.__contains__, line.pages))
    return min(found, (line.length - 1) // BLOCK) * BLOCK


def read_trace(path: Path, requests: int | None) -> Trace:
    """The first `requests` of a trace; None: all."""
    with gzip.open(path) as file:
        rows = [json.loads(row) for row in itertools.islice(file, requests)]
    lines = tuple(
        _Line(row["timestamp"], row["input_length"], row["output_length"], tuple(row["hash_ids"])) for row in rows
    )
    pages, blocks = set[int](), set[int]()
    cached = hits = 0
    for line in lines:
        cached += _reusable(line, pages)
        pages.update(line.pages)
        hits += sum(1 for i in line.ids if i in blocks)
        blocks.update(line.ids)
    return Trace(
        lines,
        prompt_tokens=sum(line.length for line in lines),
        ideal_cached=cached,
        ideal_blocks=hits / sum(len(line.ids) for line in lines),
        distinct_pages=len(pages),
    )


def measure_cost(model: str, rounds: int) -> CostModel:
    """Time real forwards of a real model on one thread, and fit. Takes a few minutes."""
    import numpy as np

    from engine.core.node_config import Device, NodeConfig
    from engine.device.batch import Row, build_batch
    from engine.device.setup import set_up_device

    longest = 8_192
    config = NodeConfig(model=model, device=Device.CPU, threads=1, num_pages=longest // 16)
    device = set_up_device(config, lambda line: None)
    table = range(device.pool.num_pages)
    points = [(tokens, start) for tokens in (16, 64, 256, 1024) for start in (0, 2048, 6144)]
    took: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for number in range(rounds + 1):
        for tokens, start in points:
            batch = build_batch([Row([number] * tokens, start, table, True)], config.page_size)
            began = time.process_time()
            device.runner.forward(batch)
            if number:  # the first warms up
                took[tokens, start].append(time.process_time() - began)
    seconds = np.array([statistics.median(took[point]) for point in points])
    terms = np.array([(1.0, tokens, pairs(start, start + tokens)) for tokens, start in points])
    # A short forward counts as much as a long one: what is fitted is the relative error.
    fit, *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(points)), rcond=None)
    errors = np.abs(terms @ fit / seconds - 1)
    fixed, per_token, per_pair = (float(f"{value:.4g}") for value in fit)
    return CostModel(
        fixed,
        per_token,
        per_pair,
        token_bytes=device.layout.token_bytes,
        link_bytes=4e9,
        source=f"python -m benchmarks.cache_order --measure: {model}, one thread, {len(points)} kinds of forward of 16 "
        f"to 1,024 tokens after 0 to 6,144, off by {errors.mean():.0%} on average and {errors.max():.0%} at most; the "
        "link as in benchmarks/handoff.py",
    )
