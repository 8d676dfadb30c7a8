"""The Triton kernels without a GPU: interpreted, against a plain dense softmax in float64, and compiled for one.

Triton chooses between interpreting and compiling when it is first imported, which other tests' imports do too, so the
interpreted kernels run in a process of their own.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvrelay_kernels import triton_kernels, triton_ops
from tests.helpers.paged_attention import (
    DTYPES,
    Problem,
    dense_attention,
    make_problem,
    random_problem,
    tolerance,
)

# Triton's interpreter keeps bfloat16 as bit patterns and multiplies those: this pair is only compiled here.
INTERPRETED = tuple(pair for pair in DTYPES if pair != (torch.bfloat16, torch.bfloat16))

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Calls an operation in a process that interprets Triton. Tensors are shared with it, so it can write to them."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        worker = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))
        with worker:
            yield lambda operation, *arguments: worker.submit(operation, *arguments).result()


def extend(run: Run, problem: Problem) -> Tensor:
    out: Tensor = run(
        triton_ops.extend_attention,
        problem.query,
        problem.pages,
        problem.page_table,
        problem.query_starts,
        problem.seq_lens,
        problem.scale,
    )
    return out


def decode(run: Run, problem: Problem) -> Tensor:
    out: Tensor = run(
        triton_ops.decode_attention,
        problem.query,
        problem.pages,
        problem.page_table,
        problem.seq_lens,
        problem.scale,
    )
    return out


def assert_right(got: Tensor, problem: Problem) -> None:
    assert got.dtype == problem.query.dtype
    torch.testing.assert_close(got.double(), dense_attention(problem), rtol=0, atol=tolerance(problem))


@pytest.mark.parametrize("seed", range(16))
def test_extend_is_dense_attention(run: Run, seed: int) -> None:
    problem = random_problem(seed, pairs=INTERPRETED)
    assert_right(extend(run, problem), problem)


@pytest.mark.parametrize("seed", range(16))
def test_decode_is_dense_attention(run: Run, seed: int) -> None:
    problem = random_problem(seed, decode=True, pairs=INTERPRETED)
    assert_right(decode(run, problem), problem)


def test_extend_finds_every_request_of_a_batch(run: Run) -> None:
    """Chunks that end on, before and after the end of a query block, and blocks that start in none."""
    tokens = triton_ops._EXTEND_ROWS // 2
    new = [tokens, 1, tokens - 1, tokens + 1, 2 * tokens, 1, 1, 3 * tokens + 5]
    problem = make_problem([(5, count) for count in new], heads=4, kv_heads=2)
    assert_right(extend(run, problem), problem)


@pytest.mark.parametrize("length", [-1, 0, 1])
def test_decode_at_the_edge_of_a_split(run: Run, length: int) -> None:
    split = triton_ops._SPLIT
    problem = make_problem([(split - 1 + length, 1), (2 * split - 1 + length, 1), (0, 1)])
    assert_right(decode(run, problem), problem)


def test_pages_may_have_any_strides(run: Run) -> None:
    problem = make_problem([(9, 1), (0, 1), (30, 1)])
    outermost = problem.pages.permute(4, 0, 1, 2, 3).contiguous().permute(1, 2, 3, 4, 0)
    problem = replace(problem, pages=outermost)
    assert_right(extend(run, problem), problem)
    assert_right(decode(run, problem), problem)


def test_an_answer_does_not_depend_on_the_batch(run: Run) -> None:
    batch = make_problem([(37, 1), (300, 1), (0, 1)])
    alone = replace(
        batch,
        query=batch.query[1:2],
        page_table=batch.page_table[1:2],
        query_starts=batch.query_starts[:2],
        seq_lens=batch.seq_lens[1:2],
    )
    assert torch.equal(decode(run, batch)[1:2], decode(run, alone))
    assert torch.equal(extend(run, batch)[1:2], extend(run, alone))


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_store_writes_its_slots_and_nothing_else(run: Run, page_size: int, pool_dtype: torch.dtype) -> None:
    pool = torch.randn(6, 3, 2, 3, page_size, 12).to(pool_dtype)
    # Rounded beforehand: to bfloat16 the interpreter truncates, where the device rounds to nearest.
    key = torch.randn(3, 5, 12).to(pool_dtype).float().transpose(0, 1)
    value = torch.randn(5, 3, 12).to(pool_dtype).half()
    slots = torch.randperm(6 * page_size)[:5]
    want = pool.clone()
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        want[page, 1, 0, :, offset] = key[token].to(pool_dtype)
        want[page, 1, 1, :, offset] = value[token].to(pool_dtype)
    run(triton_ops.store_kv, key, value, pool[:, 1], slots)
    assert torch.equal(pool, want)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_gathered_pages_go_back_where_they_are_sent(run: Run, ids_dtype: torch.dtype) -> None:
    pool = torch.randn(7, 5, 2, 3, 16, 12).half()  # a page is more than one program's share
    ids = torch.tensor([5, 0, 3], dtype=ids_dtype)
    pages = run(triton_ops.gather_pages, pool, ids)
    assert torch.equal(pages, pool[[5, 0, 3]])
    other = torch.zeros_like(pool)
    run(triton_ops.scatter_pages, other, ids, pages)
    assert torch.equal(other[[5, 0, 3]], pages)
    assert not other[[1, 2, 4, 6]].any()


POINTERS = {"page_table": "i32", "query_starts": "i32", "seq_lens": "i32", "partial": "fp32", "weights": "fp32"}
TILE = {"KEYS": 64, "DIM": 128, "PAGE_SIZE": 16}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("kernel", "pointers", "constants"),
    [
        ("extend_kernel", {"query": "bf16", "pages": "bf16", "out": "bf16"}, {**TILE, "ROWS": 64}),
        ("decode_kernel", {"query": "bf16", "pages": "bf16"}, {**TILE, "SPLIT": 256, "ROWS": 16}),
        ("decode_kernel", {"query": "fp32", "pages": "fp16"}, {**TILE, "SPLIT": 256, "ROWS": 16}),
        ("merge_kernel", {"out": "bf16"}, {"SPLIT": 256, "DIM": 128}),
        (
            "store_kernel",
            {"key": "bf16", "value": "bf16", "pages": "fp16", "slots": "i64"},
            {"PAGE_SIZE": 16, "HEADS": 4, "DIM": 128},
        ),
        ("move_kernel", {"pool": "bf16", "ids": "i32", "pages": "bf16"}, {"TO_POOL": True, "BLOCK": 4096}),
        ("move_kernel", {"pool": "bf16", "ids": "i64", "pages": "bf16"}, {"TO_POOL": False, "BLOCK": 4096}),
    ],
)
def test_compiles_for_a_gpu(
    kernel: str,
    pointers: dict[str, str],
    constants: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter is more lenient than the compiler, which needs no GPU to make code for one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(triton_kernels, kernel)
    types = {name: f"*{element}" for name, element in (POINTERS | pointers).items()} | {
        "scale": "fp32",
        "by_page": "i64",
    }
    signature = {name: types.get(name, "i32") for name in function.arg_names} | dict.fromkeys(constants, "constexpr")
    compiled = triton.compile(ASTSource(function, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    assert compiled.metadata.shared < 100_000  # bytes: more than one program fits on a multiprocessor
