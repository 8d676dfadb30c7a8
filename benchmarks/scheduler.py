"""What the prefill scheduler's decisions cost: no model, no transfer, only its own time.

    python benchmarks/scheduler.py [--quick]

    order     one sort of the waiting queue, each policy: 128, 2,048 and 10,000 requests of 2,000 tokens, half of which
              share their first 1,000. Each time in the order of arrival, the worst case of a sort that is stable; the
              cache knows 10,000 prompts at any length of the queue
                empty   nothing is cached, no match is known
                cold    of each prompt its first 1,000 tokens are cached, no match is known: all are searched for
                warm    the same, and the matches of the pass before are known, as in every pass but the first
    cache     one operation on chains of 2,000 tokens, with 1,000, 10,000 and 100,000 pages cached, each eviction order
    pass      `next_batch` as a whole (order, touch, admit, allocate): of everything that waits, and of one chunk while
              the rest goes on waiting; and the adder alone

Printed are medians over interleaved rounds of processor time, so that others on the machine disturb little. The garbage
collector runs, as it does in a node. Beside an aim stands PASS, or `over` where it is missed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import platform
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.core.lifetime import Timeline
from engine.core.page_keys import page_keys
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import PrefillTask, RoomKey
from engine.device.page_allocator import PageAllocator
from prefill_service.adder import Adder
from prefill_service.options import SchedulerConfig
from prefill_service.policy import Policy, QueueOrder
from prefill_service.prefix_cache import Eviction, PrefixCache
from prefill_service.request import PrefillRequest, sibling_key
from prefill_service.scheduler import Scheduler

PAGE = 16
PROMPT = 2_000
SHARED = 1_000
CHAIN = PROMPT // PAGE
KNOWN = SHARED // PAGE  # pages of each prompt that are cached
CHUNK = 2_048
VOCABULARY = 50_000
ROUTES = 16

ORDER_MS, MATCH_US, EVICT_US, ADMIT_US = 10.0, 10.0, 5.0, 30.0  # aims
AT = 2_048  # requests, for which ORDER_MS is the aim


@dataclass(frozen=True, slots=True)
class Sizes:
    requests: tuple[int, ...]
    cached: tuple[int, ...]
    passes: tuple[int, ...]
    rounds: int


FULL = Sizes((128, AT, 10_000), (1_000, 10_000, 100_000), (128, AT), 5)
QUICK = Sizes((128, AT), (1_000, 10_000), (128,), 3)


def verdict(value: float, aim: float) -> str:
    return "PASS" if value < aim else "over"


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def make_tasks(count: int, rng: random.Random) -> list[PrefillTask]:
    """Every other one begins with the same tokens."""
    shared = rng.choices(range(VOCABULARY), k=SHARED)
    tasks = []
    for number in range(count):
        head = shared if number % 2 else rng.choices(range(VOCABULARY), k=SHARED)
        tokens = (*head, *rng.choices(range(VOCABULARY), k=PROMPT - SHARED))
        tasks.append(
            PrefillTask(
                request_id=f"r{number}",
                key=RoomKey(number, 0),
                token_ids=tokens,
                first_index=0,
                page_keys=page_keys(tokens, PAGE),
                sampling=SamplingParams(),
                stopping=StoppingParams(rng.randrange(1, 500)),
                routing_key=f"route {number % ROUTES}",
            )
        )
    return tasks


def waiting_requests(tasks: Iterable[PrefillTask], cache: PrefixCache) -> list[PrefillRequest]:
    return [
        PrefillRequest(
            task=task,
            keys=task.page_keys,
            sibling=sibling_key(task, 32),
            priority=None,
            node=cache.root,
            times=Timeline(),
            arrival_tokens=number,
            queue_time=float(number),
        )
        for number, task in enumerate(tasks)
    ]


def fill(cache: PrefixCache, allocator: PageAllocator, chains: Iterable[Sequence[bytes]]) -> None:
    for keys in chains:
        node = cache.match(keys)
        pages = cache.pages(node) + allocator.allocate(len(keys) - node.depth, "filler")
        cache.insert(node, keys, pages, "filler")


# ---- order ----


def orders(cache: PrefixCache) -> dict[str, QueueOrder]:
    plain = {str(policy): QueueOrder(policy, cache, PAGE) for policy in Policy}
    return plain | {"lpm, dedup_weighed": QueueOrder(Policy.LPM, cache, PAGE, dedup_weighed=True)}


def measure_orders(tasks: list[PrefillTask], counts: Sequence[int], rounds: int) -> dict[tuple[str, str, int], float]:
    """Median seconds of one sort. The cache knows all of `tasks` at any count, and each sort takes other requests."""
    allocator = PageAllocator(len(tasks) * KNOWN)
    cache = PrefixCache(allocator)
    arrived = waiting_requests(tasks, cache)
    running = Counter({f"route {number}": number for number in range(0, ROUTES, 2)})
    times: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)

    def rounds_of(state: str, *, hinted: bool) -> None:
        for number, (name, order), count in itertools.product(range(rounds + 1), orders(cache).items(), counts):
            for request in arrived:
                request.observe(cache.match(request.keys, request.node) if hinted else cache.root, PAGE)
            first = (number * len(counts) + len(times)) * count % (len(arrived) - count + 1)
            queue = arrived[first : first + count]
            took = seconds(lambda q=queue, o=order: o.sort(q, processed_tokens=10**6, running_keys=running))  # type: ignore[misc]
            if number:  # the first warms up
                times[name, state, count].append(took)

    rounds_of("empty", hinted=False)
    fill(cache, allocator, (request.keys[:KNOWN] for request in arrived))
    gc.collect()
    rounds_of("cold", hinted=False)
    rounds_of("warm", hinted=True)
    return {key: statistics.median(values) for key, values in times.items()}


def print_orders(sizes: Sizes, rng: random.Random) -> None:
    found = measure_orders(make_tasks(max(sizes.requests), rng), sizes.requests, sizes.rounds)
    least, most = min(sizes.requests), max(sizes.requests)
    print(
        f"\norder: ms a sort, us a request; aim < {ORDER_MS:g} ms at {AT:,}, and a request costs the same at any length"
    )
    heads = (f"{f'{count:,}':>8} {'us':>6}" for count in sizes.requests)
    print(f"{'policy':<23} {'state':<6}", *heads, "   aim", f"us at {most:,} / at {least:,}")
    for policy, state in dict.fromkeys((policy, state) for policy, state, _ in sorted(found)):
        each = {count: found[policy, state, count] for count in sizes.requests}
        cells = (f"{took * 1e3:>8.2f} {took / count * 1e6:>6.2f}" for count, took in each.items())
        flat = (each[most] / most) / (each[least] / least)
        print(f"{policy:<23} {state:<6}", *cells, f"  {verdict(each[AT] * 1e3, ORDER_MS):<4} x{flat:.2f}")


# ---- cache ----


def measure_cache(cached: int, eviction: Eviction, rounds: int, rng: random.Random) -> dict[str, float]:
    """Median seconds: match, hinted match, touch, lock and unlock of a chain; insert and evict of a page."""
    allocator = PageAllocator(cached + 2 * CHAIN)
    cache = PrefixCache(allocator, eviction)

    def chain() -> tuple[bytes, ...]:
        # Keys need not be those of any tokens here, only as many and as random.
        return tuple(rng.randbytes(16) for _ in range(CHAIN))

    chains = [chain() for _ in range(cached // CHAIN)]
    fill(cache, allocator, chains)
    gc.collect()
    times: defaultdict[str, list[float]] = defaultdict(list)
    match, touch, lock, unlock = cache.match, cache.touch, cache.lock, cache.unlock

    def readings() -> dict[str, float]:
        some = [rng.choice(chains) for _ in range(1_000)]
        nodes = [match(keys) for keys in some]
        hints = list(zip(some, nodes, strict=True))
        took = {
            "match": seconds(lambda: [match(keys) for keys in some]),
            "hinted": seconds(lambda: [match(keys, node) for keys, node in hints]),
            "touch": seconds(lambda: [touch(node) for node in nodes]),
            "lock": seconds(lambda: [(lock(node), unlock(node)) for node in nodes]),
        }
        return {name: value / len(some) for name, value in took.items()}

    for number in range(rounds + 1):
        took = readings()
        # As in a full pool: for each chunk that comes, as many pages leave first.
        insert = evict = 0.0
        turns = max(4, min(50, len(chains) // 2))
        for _ in range(turns):
            keys = chain()
            evict += seconds(lambda: cache.evict(CHAIN))
            pages = allocator.allocate(CHAIN, "new")
            insert += seconds(lambda k=keys, p=pages: cache.insert(cache.root, k, p, "new"))  # type: ignore[misc]
            chains.append(keys)
        took |= {"insert": insert / turns / CHAIN, "evict": evict / turns / CHAIN}
        chains = [keys for keys in chains if cache.match(keys).depth == CHAIN]
        if number:
            for name, value in took.items():
                times[name].append(value)
    return {name: statistics.median(values) for name, values in times.items()}


def print_cache(sizes: Sizes, rng: random.Random) -> None:
    print(f"\ncache: us an operation on a chain of {PROMPT:,} tokens, insert and evict a page of {PAGE};", end=" ")
    print(f"aims: match < {MATCH_US:g}, evict < {EVICT_US:g}")
    names = ("match", "hinted", "touch", "lock", "insert", "evict")
    print(f"{'eviction':<9} {'pages':>8}", *(f"{name:>7}" for name in names), " match evict")
    for eviction, cached in itertools.product(Eviction, sizes.cached):
        took = {name: s * 1e6 for name, s in measure_cache(cached, eviction, sizes.rounds, rng).items()}
        print(f"{eviction:<9} {cached:>8,}", *(f"{took[name]:>7.2f}" for name in names), end="")
        print(f"  {verdict(took['match'], MATCH_US)}  {verdict(took['evict'], EVICT_US)}")


# ---- pass ----


def schedulers(
    tasks: Sequence[PrefillTask], config: SchedulerConfig, pages: int
) -> Iterator[tuple[Scheduler, PrefixCache, PageAllocator]]:
    """New ones for each round, with all of `tasks` waiting and the shared half of them cached."""
    while True:
        allocator = PageAllocator(pages)
        cache = PrefixCache(allocator)
        fill(cache, allocator, [tasks[1].page_keys[:KNOWN]])
        scheduler = Scheduler(config, cache, allocator, PAGE)
        for task in tasks:
            scheduler.submit(task)
            scheduler.grant(task.key)
        yield scheduler, cache, allocator


def measure_pass(tasks: Sequence[PrefillTask], policy: Policy, rounds: int) -> dict[str, float]:
    """Median seconds: a whole pass that admits all, one that admits a chunk, the adder for one request."""
    pages = len(tasks) * (CHAIN + 2) + KNOWN
    everything = SchedulerConfig(policy=policy, chunk_size=None, max_prefill_tokens=10**9, dedup_shared_tokens=-1)
    times: defaultdict[str, list[float]] = defaultdict(list)
    wide = schedulers(tasks, everything, pages)
    narrow = schedulers(tasks, SchedulerConfig(policy=policy, chunk_size=CHUNK, dedup_shared_tokens=-1), pages)
    for number in range(rounds + 1):
        took = {}
        scheduler, _, _ = next(wide)
        began = time.process_time()
        batch = scheduler.next_batch()
        took["all"] = time.process_time() - began
        assert batch is not None
        assert len(batch.rows) == len(tasks)
        took["complete"] = seconds(lambda s=scheduler, b=batch: s.complete_forward(b))  # type: ignore[misc]

        scheduler, cache, allocator = next(narrow)
        scheduler.abandon_forward(scheduler.next_batch() or batch)  # the first one matches, later ones are hinted
        took["chunk"] = seconds(scheduler.next_batch)

        requests = waiting_requests(tasks, cache)
        for request in requests:
            request.observe(cache.match(request.keys), PAGE)
        adder = Adder(cache, allocator, PAGE, max_prefill_tokens=10**9)
        took["admitted"] = seconds(lambda a=adder, q=requests: [a.admit(r) for r in q])  # type: ignore[misc]
        refuses = Adder(cache, allocator, PAGE, max_prefill_tokens=10**9, mixed=pages * PAGE)  # no memory is left
        took["refused"] = seconds(lambda a=refuses, q=requests: [a.admit(r) for r in q])  # type: ignore[misc]
        if number:
            for name, value in took.items():
                times[name].append(value)
    return {name: statistics.median(values) for name, values in times.items()}


def print_passes(sizes: Sizes, rng: random.Random) -> None:
    print(f"\npass: us a request, aim < {ADMIT_US:g} for one that is admitted; one chunk: ms a pass")
    print(f"{'policy':<23} {'waiting':>8} {'admit all':>9} ", end="")
    print(f"    {'complete':>8} {'adder':>6} {'refused':>7} {'chunk ms':>8}")
    for count in sizes.passes:
        tasks = make_tasks(count, rng)
        for policy in Policy:
            took = measure_pass(tasks, policy, sizes.rounds)
            each = {name: value / count * 1e6 for name, value in took.items()}
            print(f"{policy:<23} {count:>8,} {each['all']:>9.1f} {verdict(each['all'], ADMIT_US)}", end="")
            print(f" {each['complete']:>8.1f} {each['admitted']:>6.1f} {each['refused']:>7.1f}", end="")
            print(f" {took['chunk'] * 1e3:>8.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds: under 20 seconds")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else FULL
    if options.rounds:
        sizes = Sizes(sizes.requests, sizes.cached, sizes.passes, options.rounds)
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, {sizes.rounds} rounds")
    rng = random.Random(0)
    print_orders(sizes, rng)
    print_cache(sizes, rng)
    print_passes(sizes, rng)


if __name__ == "__main__":
    main()
