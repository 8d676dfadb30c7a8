"""Pages on their way from node to node meet with every kind of trouble: no answer is made from wrong ones.

Over TCP, as between hosts: there a write is under way for a while, and both of its ends have to live to see it land.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.cells import DECODE_FLAGS, NODE_FLAGS, NODES, PREFILL_FLAGS, ROUNDS, SOON_S, Cell, cells, meet, strike
from tests.faults.harness import FAST_LEASE, FaultyCluster, faulty_cluster
from tests.faults.load import Ask, Load, check, drive
from tests.helpers.cluster import assert_eventually


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model, 5)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    with faulty_cluster(
        tmp_path_factory.mktemp("writes"),
        model,
        node_flags=(*NODE_FLAGS, "--write-timeout", "1"),
        prefill_flags=(*PREFILL_FLAGS, "--kv-checksum"),
        decode_flags=DECODE_FLAGS,
        bootstrap_flags=FAST_LEASE,
        environment={"UCX_TLS": "tcp"},
    ) as running:
        yield running


@pytest.mark.parametrize("action", ["fail", "slow", "cut", "kill", "stop"])
@cells(
    "write",
    Cell("first", "prefill", "post"),
    Cell("later", "prefill", "post", after=5),
    Cell("last", "prefill", "post.last"),
    Cell("polled", "prefill", "poll"),
)
def test_a_write_goes_wrong(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell, action: str) -> None:
    """It fails, is not done in time, loses its connection or its sender: the request is read by another node."""
    meet(cluster, load, asks, cell, action, seconds=3.0)
    recover(cluster, cell.victim, action)


@pytest.mark.parametrize("action", ["cut", "kill", "stop"])
@cells(
    "landing",
    Cell("first", "decode", "notice"),
    Cell("last", "decode", "notice.last"),
    Cell("decoding", "decode", "forward", after=3),
)
def test_a_receiver_goes_wrong(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell, action: str) -> None:
    meet(cluster, load, asks, cell, action)
    recover(cluster, cell.victim, action)


@cells("corrupt", Cell("first", "decode", "notice"), Cell("last", "decode", "notice.last"))
def test_a_page_is_not_what_was_sent(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    """Its checksum says so, and it is sent again, by another node."""
    log = cluster.processes[cell.victim].log
    found = log.read_text().count("checksum")
    for _ in range(ROUNDS):  # until it was one of a room that was still waiting for it
        cluster.arm(cell.victim, cell.point, "corrupt")
        for running in strike(cluster, load, asks, cell):
            running.join()
            check(running.outcomes, load)
        if log.read_text().count("checksum") > found:
            break
    assert log.read_text().count("checksum") > found
    cluster.check_after()


def test_every_connection_is_cut_between_requests(cluster: FaultyCluster, load: Load, asks: list[Ask]) -> None:
    """Nobody's attempt fails for it: what is broken is made anew before pages are sent."""
    for _ in range(3):
        with drive(cluster, load.again(asks), load) as running:
            pass
        check(running.outcomes, load)
        assert {one.attempts for one in running.outcomes} == {1}
        assert sum(map(cluster.cut, NODES)) > 0
    cluster.check_after()


def test_a_link_is_broken_while_both_its_ends_are_well(cluster: FaultyCluster, load: Load, asks: list[Ask]) -> None:
    """The pair is set aside, and both work with others; when it has rested it is tried, and used when it works."""
    broken, apart = ("prefill-0", "decode-0"), {"prefill-0": ["decode-0"], "decode-0": ["prefill-0"]}
    detours = {("prefill-0", "decode-1"), ("prefill-1", "decode-0")}
    cluster.arm("prefill-0", "post.to.decode-0", "fail", times=None)
    until(cluster, load, asks, lambda _: set_aside(cluster) == apart)
    assert until(cluster, load, asks, lambda used: detours <= used) == {1}, "nobody tries that pair"
    assert set_aside(cluster) == apart

    cluster.arm("bootstrap", "tick", "rested")
    cluster.wait_tripped("bootstrap", "tick")
    assert not set_aside(cluster)
    until(cluster, load, asks, lambda _: set_aside(cluster) == apart)
    assert "seconds=60" in (cluster.directory / "bootstrap.log").read_text()

    cluster.disarm("prefill-0")
    cluster.arm("bootstrap", "tick", "rested")
    cluster.wait_tripped("bootstrap", "tick")
    assert until(cluster, load, asks, lambda used: broken in used) == {1}
    assert not set_aside(cluster)
    assert "peer pair works again" in (cluster.directory / "bootstrap.log").read_text()
    cluster.check_after()


def set_aside(cluster: FaultyCluster) -> dict[str, list[str]]:
    return {node.node_id: list(node.set_aside) for node in cluster.nodes() if node.set_aside}


def until(
    cluster: FaultyCluster, load: Load, asks: list[Ask], over: Callable[[set[tuple[str, str]]], bool]
) -> set[int]:
    """Rounds of the load, all answered, until one was the last: `over` is told which pairs were used so far.

    Returns how many attempts it took, whichever request it was.
    """
    used: set[tuple[str, str]] = set()
    attempts: set[int] = set()
    for _ in range(ROUNDS):
        with drive(cluster, load.again(asks), load, SOON_S) as running:
            pass
        check(running.outcomes, load)
        used |= {one.pair for one in running.outcomes}
        attempts |= {one.attempts for one in running.outcomes}
        if over(used):
            return attempts
    raise AssertionError(f"not in {ROUNDS} rounds; used were {used}")


def recover(cluster: FaultyCluster, victim: str, action: str) -> None:
    """Wake or bury the victim; then nothing is left of it all."""
    if action == "kill":
        cluster.kill(victim)
    elif action == "stop":
        assert_eventually(lambda: victim not in {node.node_id for node in cluster.nodes()}, "its lease runs out")
        cluster.resume(victim)
        cluster.wait_serving(2, 2)
    cluster.check_after()
