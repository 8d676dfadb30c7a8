"""Nodes and front doors die under load, for real: nobody's answer changes, and no page is lost on the survivors."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from tests.helpers.cluster import Cluster, assert_eventually, cluster
from tests.helpers.models import tiny_model
from tests.helpers.reference import greedy

NEW_TOKENS = 400
NODE_FLAGS = ("--page-size", "16", "--num-pages", "512")


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("qwen3")


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, model, prefill=2, decode=2, node_flags=NODE_FLAGS) as running:
        yield running


def prompts(count: int) -> list[list[int]]:
    return [[3 + (11 * i + 5 * k) % 250 for k in range(40 + 60 * i)] for i in range(count)]


@pytest.mark.timeout(240)
def test_killed_nodes_cost_no_answer(served: Cluster, model: Path) -> None:
    """One node of each pool is killed while eight answers are being written; the other two take over."""
    asked = prompts(8)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(served.generate, prompt, max_new_tokens=NEW_TOKENS) for prompt in asked]
        assert_eventually(
            lambda: {r.decode_node for r in served.live() if r.output_tokens > 2} == {"decode-0", "decode-1"},
            "both decode nodes are writing answers",
        )
        for victim in ("decode-0", "prefill-0"):
            assert served.stop(victim, signal.SIGKILL) == -signal.SIGKILL
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.result(180).token_ids == greedy(model, prompt, NEW_TOKENS)
    assert {node.node_id for node in served.nodes()} == {"decode-1", "prefill-1"}
    served.settle()


@pytest.mark.timeout(240)
def test_nodes_serve_two_front_doors_and_outlive_one(model: Path, tmp_path: Path) -> None:
    """Nodes attach to every bootstrap. One is killed with a request under way, and comes back with no memory of it."""
    prompt = prompts(4)[3]
    expected = greedy(model, prompt, NEW_TOKENS)
    with (
        cluster(tmp_path / "first", model, prefill=0, decode=0) as first,
        closing(Cluster(tmp_path, str(model))) as second,
    ):
        second.start("bootstrap", "bootstrap")
        both = f"{first.address},{second.address}"
        for role in ("prefill", "decode"):
            first.start(role, f"{role}-0", *NODE_FLAGS, "--bootstrap", both)
        first.wait_serving(1, 1)
        second.wait_serving(1, 1)

        lost = second.generation.Generate(Cluster.request(prompt, NEW_TOKENS), timeout=60)
        next(lost)
        with ThreadPoolExecutor(1) as pool:
            kept = pool.submit(first.generate, prompt, max_new_tokens=NEW_TOKENS)
            second.stop("bootstrap", signal.SIGKILL)
            assert kept.result(60).token_ids == expected
        with pytest.raises(grpc.RpcError) as caught:
            list(lost)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        first.settle()

        second.start("bootstrap", "bootstrap")
        second.wait_serving(1, 1)
        assert second.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids == expected
        second.settle()
