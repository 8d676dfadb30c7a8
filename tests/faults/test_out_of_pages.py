"""Decode nodes run out of pages, over and over, while other things go wrong: every answer is right in the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import LONG_LEASE, FaultyCluster, faulty_cluster
from tests.faults.load import Load, check, drive
from tests.helpers.cluster import assert_eventually

# Of twelve requests that come to 13 pages each, a node has room for three, and lets in more than that.
NODE_FLAGS = ("--page-size", "16", "--num-pages")
TIGHT = (*NODE_FLAGS, "40", "--reserved-decode-tokens", "0")
RETURN_FROM_HOST: tuple[str, ...] = ()
RETURN_THROUGH_PREFILL = ("--host-kv-memory", "none")


@pytest.fixture(params=[RETURN_FROM_HOST, RETURN_THROUGH_PREFILL], ids=["the host", "a prefill node"])
def cluster(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FaultyCluster]:
    with faulty_cluster(
        tmp_path,
        model,
        prefill_flags=(*NODE_FLAGS, "256"),
        decode_flags=(*TIGHT, *request.param),
        bootstrap_flags=LONG_LEASE,
    ) as running:
        yield running


def retractions(cluster: FaultyCluster, name: str) -> int:
    return (cluster.directory / f"{name}.log").read_text().count("retracted")


def test_retraction_while_nodes_die(cluster: FaultyCluster, model: Path) -> None:
    load = Load(model, 37, lengths=(90, 100, 110))
    asks = load.asks(12, new_tokens=(90, 110))
    with drive(cluster, asks, load) as running:
        assert_eventually(lambda: retractions(cluster, "decode-0") > 0, "decode-0 is out of pages")
        cluster.kill("decode-0")
        cluster.restart("decode-0")
        assert_eventually(lambda: retractions(cluster, "decode-1") > 0, "decode-1 is out of pages")
        cluster.kill("prefill-0")
        cluster.restart("prefill-0")
    check(running.outcomes, load)
    cluster.wait_serving(2, 2)
    cluster.check_after()
