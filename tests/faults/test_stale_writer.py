"""A prefill process that stops in the middle of a write: its pages wait for it, however long, and nobody is harmed.

The request goes on elsewhere at once. What the stopped process may still write lands in fenced pages, or the process
is proven gone before they are given out again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import FAST_LEASE, FaultyCluster, faulty_cluster
from tests.faults.load import Load, check, drive
from tests.helpers.cluster import assert_eventually
from tests.helpers.models import build_model

# 64 KiB a token, 1 MiB a page: one write takes all pages of a prompt, and these sockets have room for little of it.
SMALL_SOCKETS = {"UCX_TLS": "tcp", "UCX_TCP_SNDBUF": "64k", "UCX_TCP_RCVBUF": "64k"}
LARGE = {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 256}
PROMPT = 128
PAGES = 30  # of the decode node: three requests, two while the pages of one are fenced
TIMEOUTS = ("--queue-timeout", "30", "--prefill-timeout", "2", "--transfer-timeout", "2", "--token-timeout", "2")
PATIENCE = ("--max-attempts", "10")  # on a slow machine they pass also where nothing is wrong
NODE_FLAGS = ("--page-size", "16", "--write-timeout", "1", "--num-pages")
LONGER_THAN_ANY_TIMER_S = 3.0


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("large") / "tiny-large", "qwen3", **LARGE)


@pytest.fixture
def cluster(large_model: Path, tmp_path: Path) -> Iterator[FaultyCluster]:
    with faulty_cluster(
        tmp_path,
        large_model,
        prefill=2,
        decode=1,
        prefill_flags=(*NODE_FLAGS, "128"),
        decode_flags=(*NODE_FLAGS, str(PAGES), "--reserved-decode-tokens", "16"),
        bootstrap_flags=(*FAST_LEASE, *TIMEOUTS, *PATIENCE),
        environment=SMALL_SOCKETS,
    ) as running:
        yield running


def fenced(cluster: FaultyCluster) -> int:
    """Pages of the decode node that are fenced, by its own count now."""
    (node,) = [node for node in cluster.nodes(inspect=True) if node.node_id == "decode-0"]
    assert not node.problems
    return node.stats.pages_fenced


@pytest.mark.parametrize("wakes", [True, False], ids=["wakes", "is killed"])
def test_stopped_in_the_middle_of_a_write(cluster: FaultyCluster, large_model: Path, wakes: bool) -> None:
    load = Load(large_model, 11, lengths=(PROMPT,))
    ask, *others = load.asks(13, new_tokens=(30, 40))
    for one in (ask, *others):
        load.reference(one)
    for name in ("prefill-0", "prefill-1"):
        cluster.arm(name, "posted", "stop")
    with drive(cluster, [ask], load) as failed_over:
        assert_eventually(lambda: any(map(cluster.stopped, ("prefill-0", "prefill-1"))), "a writer stops")
        stale, other = sorted(("prefill-0", "prefill-1"), key=cluster.stopped, reverse=True)
        cluster.disarm(other)
    check(failed_over.outcomes, load)
    pages = fenced(cluster)
    assert pages == PROMPT // 16, "the pages of the attempt that never ended are kept"

    # Others fill the node many times over meanwhile: each of its free pages is used again and again.
    for asks in (others[:4], others[4:8]):
        with drive(cluster, asks, load) as meanwhile:
            while any(not one.finished for one in meanwhile.outcomes):
                assert fenced(cluster) >= pages
        check(meanwhile.outcomes, load)
    threading.Event().wait(LONGER_THAN_ANY_TIMER_S)
    assert_eventually(lambda: fenced(cluster) <= pages, "what a slow machine has fenced meanwhile is free again")
    assert fenced(cluster) == pages, "no timer opens a fence"

    with drive(cluster, others[8:], load) as then:
        assert_eventually(lambda: then.tokens > 20, "answers are being written")
        if wakes:
            cluster.resume(stale)
        else:
            cluster.kill(stale)
        assert_eventually(lambda: fenced(cluster) == 0, "the fence opens")
    check(then.outcomes, load)
    if wakes:
        cluster.wait_serving(2, 1)
    cluster.check_after()
    with drive(cluster, others, load) as again:
        pass
    check(again.outcomes, load)
    cluster.check_after()
