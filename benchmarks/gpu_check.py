"""Check every Triton kernel on this machine's CUDA device against the torch implementation, then time it.

    python benchmarks/gpu_check.py [--check-only]

The right answers come from `kvrelay_kernels.reference` on copies in host memory: what a CPU node would compute. Times
are medians on the device, next to what plain torch takes there for the same work: scaled_dot_product_attention over
keys and values that already lie contiguous, and copies by index for the rest.

Exit code: 0 all right; 1 a kernel differs; 2 no CUDA device to check. A few minutes, most of them compiling.
"""

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

import kvrelay_kernels
from kvrelay_kernels import reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LAYERS = 2
# The largest difference, as a share of the largest value: rounding to the type, of weights and of the answer.
TOLERANCE = {F32: 1e-5, F16: 4e-3, BF16: 3e-2}

type_name = {F32: "fp32", F16: "fp16", BF16: "bf16"}.__getitem__


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's attention, its pages and the types it runs in."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    query_dtype: torch.dtype
    pool_dtype: torch.dtype

    def __str__(self) -> str:
        types = f"{type_name(self.query_dtype)} over {type_name(self.pool_dtype)}"
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, page {self.page_size}, {types}"


SHAPES = (
    Shape(9, 3, 64, 16, F32, F32),
    Shape(9, 3, 64, 16, F32, F16),
    Shape(9, 3, 64, 16, BF16, BF16),
    Shape(32, 8, 128, 16, BF16, BF16),
    Shape(28, 4, 128, 64, F16, F16),
    Shape(8, 8, 80, 1, F16, F16),
    Shape(14, 2, 96, 256, BF16, F16),
    Shape(16, 1, 256, 16, BF16, BF16),
    Shape(4, 2, 16, 5, F32, F32),
)
TIMED_SHAPES = (Shape(9, 3, 64, 16, BF16, BF16), Shape(32, 8, 128, 16, BF16, BF16))

# Batches of requests, each (tokens before, tokens of its query).
MIXED = ((1500, 512), (0, 1), (16, 1), (63, 65), (0, 300), (255, 21))
DECODE = tuple((past, 1) for past in (0, 1, 14, 15, 16, 254, 255, 256, 1000, 4000))
TIMED = {
    "decode 1 x 2000": ((1999, 1),),
    "decode 16 x 2000": ((1999, 1),) * 16,
    "decode 64 x 2000": ((1999, 1),) * 64,
    "extend 2048": ((0, 2048),),
    "extend 512 after 1536": ((1536, 512),),
    "extend 8 x 512": ((0, 512),) * 8,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Arguments of an extend and, where each request has one query, of a decode."""

    query: Tensor
    pool: Tensor
    page_table: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    scale: float

    def on(self, device: torch.device) -> "Problem":
        return Problem(
            query=self.query.to(device),
            pool=self.pool.to(device),
            page_table=self.page_table.to(device),
            query_starts=self.query_starts.to(device),
            seq_lens=self.seq_lens.to(device),
            scale=self.scale,
        )

    def extend(self, call: Callable[..., Tensor]) -> Tensor:
        pages = self.pool[:, -1]
        return call(self.query, pages, self.page_table, self.query_starts, self.seq_lens, self.scale)

    def decode(self, call: Callable[..., Tensor]) -> Tensor:
        return call(self.query, self.pool[:, -1], self.page_table, self.seq_lens, self.scale)


def make_problem(chunks: tuple[tuple[int, int], ...], shape: Shape) -> Problem:
    """Requests on scattered pages, in host memory. What nobody may read is NaN: padding, and the end of last pages."""
    lengths = torch.tensor([past + new for past, new in chunks])
    counts = -(-lengths // shape.page_size)
    total, width = int(counts.sum()), int(counts.max()) + 1
    pool = torch.randn(total + 1, LAYERS, 2, shape.kv_heads, shape.page_size, shape.head_dim).to(shape.pool_dtype)
    pool[0] = torch.nan
    page_table = torch.zeros(len(chunks), width, dtype=torch.int32)
    page_table[torch.arange(width) < counts[:, None]] = (torch.randperm(total) + 1).int()
    last = page_table[torch.arange(len(chunks)), counts - 1]
    for page, used in zip(last.tolist(), (lengths - (counts - 1) * shape.page_size).tolist(), strict=True):
        pool[page, ..., used:, :] = torch.nan
    starts = [0, *itertools.accumulate(new for _, new in chunks)]
    return Problem(
        query=torch.randn(starts[-1], shape.heads, shape.head_dim).to(shape.query_dtype),
        pool=pool,
        page_table=page_table,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=lengths.int(),
        scale=shape.head_dim**-0.5,
    )


def difference(got: Tensor, want: Tensor) -> float:
    """The largest, as a share of the largest value of `want`; infinite where one is NaN."""
    worst = (got.cpu().double() - want.double()).abs().max() / want.double().abs().max()
    return float(worst.nan_to_num(nan=torch.inf))


def check(shape: Shape, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Each operation's name, how far its answer is from the torch implementation's, and how far it may be."""
    tolerance = TOLERANCE[shape.query_dtype]
    for name, chunks in (("extend", MIXED), ("extend, one token each", DECODE)):
        problem = make_problem(chunks, shape)
        got = problem.on(device).extend(kvrelay_kernels.extend_attention)
        yield name, difference(got, problem.extend(reference.extend_attention)), tolerance
    problem = make_problem(DECODE, shape)
    got = problem.on(device).decode(kvrelay_kernels.decode_attention)
    yield "decode", difference(got, problem.decode(reference.decode_attention)), tolerance

    pool = torch.randn(20, LAYERS, 2, shape.kv_heads, shape.page_size, shape.head_dim).to(shape.pool_dtype)
    there = pool.to(device)
    key, value = torch.randn(2, 19, shape.kv_heads, shape.head_dim).to(shape.query_dtype)
    slots = torch.randperm(20 * shape.page_size)[:19]
    kvrelay_kernels.store_kv(key.to(device), value.to(device), there[:, 1], slots.to(device))
    reference.store_kv(key, value, pool[:, 1], slots)
    yield "store", difference(there, pool), 0.0
    ids = torch.randperm(20)[:7]
    pages = kvrelay_kernels.gather_pages(there, ids.to(device))
    yield "gather", difference(pages, reference.gather_pages(pool, ids)), 0.0
    kvrelay_kernels.scatter_pages(there, ids.flip(0).to(device), pages)
    reference.scatter_pages(pool, ids.flip(0), pages.cpu())
    yield "scatter", difference(there, pool), 0.0


def check_all(device: torch.device) -> int:
    """Prints a line for each shape and operation; returns how many are wrong."""
    wrong = 0
    for shape in SHAPES:
        for name, worst, allowed in check(shape, device):
            right = worst <= allowed
            wrong += not right
            verdict = "ok" if right else f"WRONG: more than {allowed:.0e}"
            print(f"{shape!s:48} {name:24} differs by {worst:.1e} {verdict}", flush=True)
    return wrong


def microseconds(work: Callable[[], object]) -> float:
    """The median of 20 runs on the device, after 3 more."""
    times = []
    for _ in range(23):
        begin, end = (torch.Event(torch.device("cuda"), enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return float(statistics.median(times[3:]))


def time_attention(shape: Shape, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Each batch's name and its microseconds, by the kernel and by torch over contiguous keys and values."""
    for name, chunks in TIMED.items():
        problem = make_problem(chunks, shape).on(device)
        batch, (past, new) = len(chunks), chunks[0]
        query = problem.query.view(batch, new, shape.heads, shape.head_dim).transpose(1, 2)
        kv_shape = (2, batch, shape.kv_heads, past + new, shape.head_dim)
        key, value = torch.randn(kv_shape, device=device).to(shape.query_dtype)

        def paged(problem: Problem = problem, decode: bool = new == 1) -> Tensor:
            if decode:
                return problem.decode(kvrelay_kernels.decode_attention)
            return problem.extend(kvrelay_kernels.extend_attention)

        mask = causal_lower_right(new, past + new)

        def contiguous(query: Tensor = query, key: Tensor = key, value: Tensor = value, mask: Tensor = mask) -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

        yield name, microseconds(paged), microseconds(contiguous)


def time_copies(shape: Shape, device: torch.device) -> Iterator[tuple[str, float, float]]:
    """The same for what moves keys and values, by the kernel and by torch's copies by index."""
    pool = torch.zeros(
        512, 32, 2, shape.kv_heads, shape.page_size, shape.head_dim, dtype=shape.pool_dtype, device=device
    )
    slots = torch.randperm(512 * shape.page_size, device=device)[:2048]
    key, value = torch.randn(2, 2048, shape.kv_heads, shape.head_dim, device=device).to(shape.query_dtype)
    layer, page, offset = pool[:, 3], slots // shape.page_size, slots % shape.page_size

    def store_by_index() -> None:
        layer[page, 0, :, offset] = key
        layer[page, 1, :, offset] = value

    ids = torch.randperm(512, device=device)[:128]
    pages = pool[ids]
    kernels = kvrelay_kernels
    yield "store 2048", microseconds(lambda: kernels.store_kv(key, value, layer, slots)), microseconds(store_by_index)
    yield (
        "gather 128 pages",
        microseconds(lambda: kernels.gather_pages(pool, ids)),
        microseconds(lambda: pool.index_select(0, ids)),
    )
    yield (
        "scatter 128 pages",
        microseconds(lambda: kernels.scatter_pages(pool, ids, pages)),
        microseconds(lambda: pool.index_copy_(0, ids, pages)),
    )


def time_all(device: torch.device) -> None:
    print(f"\n{torch.cuda.get_device_name(device)}, microseconds a layer (copies: a call)")
    print(f"{'':48} {'':24} {'kernel':>9} {'torch':>9}")
    for shape in TIMED_SHAPES:
        for name, ours, torchs in itertools.chain(time_attention(shape, device), time_copies(shape, device)):
            print(f"{shape!s:48} {name:24} {ours:9.1f} {torchs:9.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Check the Triton kernels on this machine's CUDA device, and time them."
    )
    parser.add_argument("--check-only", action="store_true", help="do not time anything")
    check_only = parser.parse_args().check_only
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device here: torch.cuda.is_available() is false", file=sys.stderr)
        return 2
    if os.environ.get("TRITON_INTERPRET"):
        print("gpu_check: TRITON_INTERPRET is set: that would interpret the kernels on the CPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cuda")
    wrong = check_all(device)
    if not check_only:
        time_all(device)
    if wrong:
        print(f"gpu_check: {wrong} operations differ from the torch implementation", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
