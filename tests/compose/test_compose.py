"""The image and compose.yaml on a real engine: answers, scaling under load, draining, and nothing left behind.

The tests run in this order on one cluster, each leaving it serving.
"""

from __future__ import annotations

import json

import pytest

from tests.compose.cluster import Cluster, Load, eventually

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

GREEDY = ("--temperature", "0", "--max-new-tokens", "16", "The capital of France is")


def test_client_container_and_host_get_the_same_answer(cluster: Cluster) -> None:
    answer = cluster.client("generate", *GREEDY)
    assert "Paris" in answer
    assert cluster.kvrelay("generate", *GREEDY) == answer


def test_containers_run_as_an_ordinary_user(cluster: Cluster) -> None:
    for service in ("bootstrap", "prefill", "decode"):
        assert cluster.compose("exec", "-T", service, "id", "-u").strip() != "0"


def test_new_containers_take_work_while_a_load_runs(cluster: Cluster) -> None:
    before = {node.node_id for node in cluster.nodes()}
    with Load(cluster.address).running() as load:
        load.wait_for_more(4)
        cluster.up(prefill=2, decode=2)
        new = {node.node_id for node in cluster.nodes()} - before
        assert len(new) == 2, f"{new} are new, {before} were there"
        eventually(
            "both new nodes have taken work",
            lambda: all(node.stats.requests_total > 0 for node in cluster.nodes() if node.node_id in new),
        )


def test_stopping_one_prefill_container_fails_no_request(cluster: Cluster) -> None:
    cluster.up(prefill=2, decode=2)
    with Load(cluster.address).running() as load:
        load.wait_for_more(4)
        assert cluster.stop_container(cluster.containers("prefill")[0]) == 0, "it did not end by itself"
        load.wait_for_more(8)
    cluster.wait_for(prefill=1, decode=2)


def test_every_page_is_free_or_cached_after_the_load(cluster: Cluster) -> None:
    def settled() -> bool:
        status = json.loads(cluster.kvrelay("status", "--inspect", "--json"))  # fails when a node's books are wrong
        stats = [node["stats"] for node in status["nodes"]]
        return len(stats) == 3 and all(s["pages_free"] + s["pages_cached"] == s["pages_total"] for s in stats)

    eventually("every page is free or cached", settled)
