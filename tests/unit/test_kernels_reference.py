"""The torch operations against a plain dense softmax in float64, and what they refuse."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrelay_kernels
from tests.helpers.paged_attention import Problem, dense_attention, make_problem, random_problem, tolerance


def extend(problem: Problem) -> Tensor:
    return kvrelay_kernels.extend_attention(
        problem.query,
        problem.pages,
        problem.page_table,
        problem.query_starts,
        problem.seq_lens,
        problem.scale,
    )


def decode(problem: Problem) -> Tensor:
    return kvrelay_kernels.decode_attention(
        problem.query, problem.pages, problem.page_table, problem.seq_lens, problem.scale
    )


def assert_right(got: Tensor, problem: Problem) -> None:
    assert got.dtype == problem.query.dtype
    torch.testing.assert_close(got.double(), dense_attention(problem), rtol=0, atol=tolerance(problem))


@pytest.mark.parametrize("seed", range(24))
def test_extend_is_dense_attention(seed: int) -> None:
    problem = random_problem(seed)
    assert_right(extend(problem), problem)


@pytest.mark.parametrize("seed", range(24))
def test_decode_is_dense_attention(seed: int) -> None:
    problem = random_problem(seed, decode=True)
    assert_right(decode(problem), problem)


@pytest.mark.parametrize(("past", "new"), [(0, 64), (0, 65), (0, 200), (1, 63), (100, 129), (300, 1)])
def test_extend_at_the_edges_of_its_query_blocks(past: int, new: int) -> None:
    problem = make_problem([(past, new), (0, 3)])
    assert_right(extend(problem), problem)


def head_dim_outermost(pages: Tensor) -> Tensor:
    return pages.permute(4, 0, 1, 2, 3).contiguous().permute(1, 2, 3, 4, 0)


def rows_with_gaps(pages: Tensor) -> Tensor:
    wide = torch.full((*pages.shape[:-1], pages.shape[-1] + 3), torch.nan)
    wide[..., :-3] = pages
    return wide[..., :-3]


@pytest.mark.parametrize("relayout", [head_dim_outermost, rows_with_gaps])
def test_pages_may_have_any_strides(relayout: Callable[[Tensor], Tensor]) -> None:
    problem = make_problem([(9, 1), (0, 1), (30, 1)])
    problem = replace(problem, pages=relayout(problem.pages))
    assert_right(extend(problem), problem)
    assert_right(decode(problem), problem)


def test_a_decode_answer_does_not_depend_on_the_batch() -> None:
    alone, batch = make_problem([(37, 1)]), make_problem([(37, 1), (200, 1), (0, 1)])
    # The first request of the batch becomes the one that is alone, on its own pages.
    pages = batch.pages.clone()
    pages[batch.page_table[0, :10].long()] = alone.pages[alone.page_table[0, :10].long()]
    query = torch.cat([alone.query, batch.query[1:]])
    batch = replace(batch, pages=pages, query=query)
    assert torch.equal(decode(batch)[0], decode(alone)[0])


def test_a_request_with_nan_spoils_only_its_own_answer() -> None:
    problem = make_problem([(10, 1), (10, 1), (10, 1)])
    right = dense_attention(problem)
    problem.pages[int(problem.page_table[1, 0])] = torch.nan
    for got in (decode(problem), extend(problem), decode(problem)):
        assert got[1].isnan().all()
        torch.testing.assert_close(got[[0, 2]].double(), right[[0, 2]], rtol=0, atol=1e-5)


def test_decode_sees_tables_and_lengths_that_changed_in_place() -> None:
    problem = make_problem([(20, 1), (7, 1)])
    decode(problem)
    problem.seq_lens.sub_(1)
    assert_right(decode(problem), problem)
    problem.page_table[0, 0] = problem.page_table[1, 0]
    assert_right(decode(problem), problem)
    fewer_heads = replace(problem, query=problem.query[:, :2])
    assert_right(decode(fewer_heads), fewer_heads)


def test_works_in_inference_mode_and_out_of_it() -> None:
    problem = make_problem([(20, 1), (7, 1)])
    outside = decode(problem)
    with torch.inference_mode():
        assert torch.equal(decode(problem), outside)
        problem.seq_lens[0] -= 1
        inside = decode(problem)
        assert_right(extend(problem), problem)
    assert torch.equal(decode(problem), inside)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_store_writes_its_slots_and_nothing_else(page_size: int, pool_dtype: torch.dtype) -> None:
    pool = torch.randn(6, 3, 2, 2, page_size, 8).to(pool_dtype)
    key, value = torch.randn(2, 5, 8).transpose(0, 1), torch.randn(5, 2, 8)
    slots = torch.randperm(6 * page_size)[:5]
    want = pool.clone()
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        want[page, 1, 0, :, offset] = key[token].to(pool_dtype)
        want[page, 1, 1, :, offset] = value[token].to(pool_dtype)
    kvrelay_kernels.store_kv(key, value, pool[:, 1], slots)
    assert torch.equal(pool, want)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_gathered_pages_go_back_where_they_are_sent(ids_dtype: torch.dtype) -> None:
    pool = torch.randn(7, 2, 2, 3, 4, 8)
    ids = torch.tensor([5, 0, 3], dtype=ids_dtype)
    pages = kvrelay_kernels.gather_pages(pool, ids)
    assert pages.is_contiguous()
    assert torch.equal(pages, torch.stack([pool[5], pool[0], pool[3]]))
    other = torch.zeros_like(pool)
    kvrelay_kernels.scatter_pages(other, ids, pages)
    assert torch.equal(other[[5, 0, 3]], pages)
    assert not other[[1, 2, 4, 6]].any()
    assert kvrelay_kernels.gather_pages(pool, ids[:0]).shape == (0, 2, 2, 3, 4, 8)


BAD_ATTENTION: dict[str, dict[str, Any]] = {
    "query: shape": {"query": torch.zeros(2, 4, 17)},
    "query: 3 heads": {"query": torch.zeros(2, 3, 16)},
    "query: type": {"query": torch.zeros(2, 4, 16, dtype=torch.float64)},
    "pages: shape": {"pages": torch.zeros(9, 2, 4, 16)},
    "pages: type": {"pages": torch.zeros(9, 2, 2, 4, 16, dtype=torch.int32)},
    "page_table: shape": {"page_table": torch.zeros(2, dtype=torch.int32)},
    "page_table: type": {"page_table": torch.zeros(2, 3, dtype=torch.int64)},
    "page_table: values from -1": {"page_table": torch.full((2, 3), -1, dtype=torch.int32)},
    "page_table: values from 1000": {"page_table": torch.full((2, 3), 1000, dtype=torch.int32)},
    "seq_lens: shape": {"seq_lens": torch.ones(3, dtype=torch.int32)},
    "seq_lens: type": {"seq_lens": torch.ones(2)},
    "seq_lens: values from 0": {"seq_lens": torch.tensor([0, 4], dtype=torch.int32)},
    "seq_lens: values from 1 to 10000": {"seq_lens": torch.tensor([1, 10000], dtype=torch.int32)},
}
BAD_STARTS: dict[str, dict[str, Any]] = {
    "query_starts: shape": {"query_starts": torch.zeros(2, dtype=torch.int32)},
    "query_starts: type": {"query_starts": torch.zeros(3)},
    "query_starts: [0, 1, 1]": {"query_starts": torch.tensor([0, 1, 1], dtype=torch.int32)},
    "seq_lens: 1 for a chunk of 2": {
        "query_starts": torch.tensor([0, 2, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 1], dtype=torch.int32),
    },
}


@pytest.mark.parametrize("message", BAD_ATTENTION | BAD_STARTS)
def test_extend_refuses(message: str) -> None:
    problem = replace(make_problem([(4, 1), (4, 1)]), **(BAD_ATTENTION | BAD_STARTS)[message])
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        extend(problem)


@pytest.mark.parametrize("message", BAD_ATTENTION)
def test_decode_refuses(message: str) -> None:
    problem = replace(make_problem([(4, 1), (4, 1)]), **BAD_ATTENTION[message])
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        decode(problem)


def test_decode_refuses_more_than_one_query_each() -> None:
    with pytest.raises(ValueError, match="query: 3 rows, must be one a row of page_table, 2"):
        decode(make_problem([(4, 1), (4, 2)]))


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("key: shape", {"key": torch.zeros(3, 16)}),
        ("key: shape", {"key": torch.zeros(3, 2, 15)}),
        ("value: shape", {"value": torch.zeros(2, 2, 16)}),
        ("value: type", {"value": torch.zeros(3, 2, 16, dtype=torch.int32)}),
        ("pages: shape", {"pages": torch.zeros(5, 3, 2, 4, 16)}),
        ("slots: shape", {"slots": torch.zeros(4, dtype=torch.int64)}),
        ("slots: type", {"slots": torch.zeros(3, dtype=torch.int32)}),
        ("slots: values from -1 to 2, must be from 0 to 19", {"slots": torch.tensor([0, -1, 2])}),
        ("slots: values from 0 to 20, must be from 0 to 19", {"slots": torch.tensor([0, 20, 2])}),
    ],
)
def test_store_refuses(message: str, changed: dict[str, Tensor]) -> None:
    good = {
        "key": torch.zeros(3, 2, 16),
        "value": torch.zeros(3, 2, 16),
        "pages": torch.zeros(5, 2, 2, 4, 16),
        "slots": torch.arange(3),
    }
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        kvrelay_kernels.store_kv(**(good | changed))


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("pool: shape", {"pool": torch.zeros(5, 2, 2, 4, 16)}),
        ("pool: type", {"pool": torch.zeros(5, 3, 2, 2, 4, 16, dtype=torch.int8)}),
        ("pool: strides", {"pool": torch.zeros(5, 3, 2, 2, 16, 4).transpose(4, 5)}),
        ("ids: shape", {"ids": torch.zeros(1, 2, dtype=torch.int64)}),
        ("ids: type", {"ids": torch.zeros(2)}),
        ("source: shape", {"source": torch.zeros(3, 3, 2, 2, 4, 16)}),
        ("source: type", {"source": torch.zeros(2, 3, 2, 2, 4, 16, dtype=torch.float16)}),
        ("source: strides", {"source": torch.zeros(2, 3, 2, 2, 16, 4).transpose(4, 5)}),
    ],
)
def test_scatter_refuses(message: str, changed: dict[str, Tensor]) -> None:
    good = {
        "pool": torch.zeros(5, 3, 2, 2, 4, 16),
        "ids": torch.arange(2),
        "source": torch.zeros(2, 3, 2, 2, 4, 16),
    }
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        kvrelay_kernels.scatter_pages(**(good | changed))


def test_a_cpu_process_starts_without_triton() -> None:
    code = "import sys, kvrelay_kernels; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})
