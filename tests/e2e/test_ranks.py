"""A prefill node of two ranks: both are used, answers stay the same, they leave together, their death is survived."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.v1 import admin_pb2
from tests.helpers.cluster import Answer, Cluster, assert_eventually, cluster
from tests.helpers.models import tiny_model
from tests.helpers.reference import greedy

FEW, MANY = 8, 200  # new tokens
NODE_FLAGS = ("--page-size", "16", "--num-pages", "512")
RANKS = ("--dp-size", "2", "--chunk-size", "64")


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("qwen3")


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, model, node_flags=NODE_FLAGS, prefill_flags=RANKS) as running:
        wait_for(running, {"prefill-0.0", "prefill-0.1", "decode-0"})
        yield running


def wait_for(running: Cluster, nodes: set[str]) -> None:
    assert_eventually(
        lambda: {node.node_id for node in running.nodes() if node.stats.serving} == nodes, f"{nodes} serve", 60
    )


def prompts(count: int) -> list[list[int]]:
    return [[3 + (11 * i + 5 * k) % 250 for k in range(40 + 35 * i)] for i in range(count)]


def ask(running: Cluster, asked: list[list[int]], new_tokens: int) -> list[Answer]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda prompt: running.generate(prompt, max_new_tokens=new_tokens), asked))


def scrape(running: Cluster) -> str:
    """The metrics of the process of both ranks."""
    said = running.processes["prefill-0"].log.read_text()
    (port,) = [line.rpartition("port=")[2] for line in said.splitlines() if "kvrelay.node: metrics" in line]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


@pytest.mark.timeout(240)
def test_both_ranks_compute_what_one_process_would(served: Cluster, model: Path) -> None:
    asked = prompts(10)
    expected = [greedy(model, prompt, FEW) for prompt in asked]
    for cached in (False, True):
        answers = ask(served, asked, FEW)
        assert [answer.token_ids for answer in answers] == expected
        found = sum(answer.started.cached_tokens > 0 for answer in answers)  # else the other rank was to be sooner
        assert found >= (len(asked) // 2 if cached else 0)
    taken = {node.node_id: node.stats for node in served.nodes(inspect=True)}
    assert taken["prefill-0.0"].requests_total + taken["prefill-0.1"].requests_total == 2 * len(asked)
    for rank in ("prefill-0.0", "prefill-0.1"):
        assert taken[rank].computed_tokens_total > 0, "the front door uses both"
        assert taken[rank].pages_total == 512, "each has a pool of its own"
    metrics = scrape(served)
    for rank in ("prefill-0.0", "prefill-0.1"):
        assert f'kvrelay_node_serving{{node="{rank}",role="prefill"}} 1.0' in metrics
    served.settle()


@pytest.mark.timeout(240)
def test_ranks_leave_together_once_they_are_done(served: Cluster, model: Path) -> None:
    asked = prompts(6)
    node = served.processes.pop("prefill-0")
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask, served, asked, MANY)
        assert_eventually(lambda: len(served.live()) == len(asked), "they are under way")
        served.admin.Drain(admin_pb2.DrainRequest(node_id="prefill-0.1", deadline_seconds=60), timeout=10)
        for prompt, answer in zip(asked, answers.result(120), strict=True):
            assert answer.token_ids == greedy(model, prompt, MANY)
    assert node.popen.wait(60) == 0, node.tail()
    assert_eventually(lambda: {one.node_id for one in served.nodes()} == {"decode-0"}, "both are gone")
    served.settle()


@pytest.mark.timeout(240)
def test_the_death_of_all_ranks_costs_no_answer(served: Cluster, model: Path) -> None:
    served.start("prefill", "prefill-1", *NODE_FLAGS)
    wait_for(served, {"prefill-0.0", "prefill-0.1", "prefill-1", "decode-0"})
    asked = prompts(12)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask, served, asked, MANY)
        assert_eventually(
            lambda: {"prefill-0.0", "prefill-0.1"} <= {request.prefill_node for request in served.live()},
            "both ranks are at work",
        )
        assert served.stop("prefill-0", signal.SIGKILL) == -signal.SIGKILL
        for prompt, answer in zip(asked, answers.result(120), strict=True):
            assert answer.token_ids == greedy(model, prompt, MANY)
    served.settle()
    assert {node.node_id for node in served.nodes()} == {"prefill-1", "decode-0"}
