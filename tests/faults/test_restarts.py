"""Processes die and come back under the same address and id, over and over: the others serve on and gather nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.faults.harness import FaultyCluster, faulty_cluster
from tests.faults.load import Load, check, drive
from tests.helpers.cluster import assert_eventually

ROUNDS, WARMED_UP = 20, 5
NODE_FLAGS = ("--page-size", "16", "--num-pages", "64")
MOST_MORE_MIB = 4  # from one measurement to the next
MOST_MORE_FILES = 8  # a peer has one to three connections, as both may open one at once; a leak would be of one a round


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model, 41, lengths=(20, 60, 100))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    with faulty_cluster(tmp_path_factory.mktemp("restarts"), model, node_flags=NODE_FLAGS) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Footprint:
    memory_mib: float
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()}
        return cls(int(fields["VmRSS"]) / 1024, int(fields["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))


def footprints(cluster: FaultyCluster, but: Sequence[str]) -> dict[str, Footprint]:
    cluster.settle()
    return {name: Footprint.of(one.popen.pid) for name, one in cluster.processes.items() if name not in but}


def incarnations(cluster: FaultyCluster, names: Sequence[str]) -> set[str]:
    """Of those of these nodes that serve; none when the bootstrap is not there."""
    try:
        return {node.incarnation for node in cluster.nodes() if node.node_id in names and node.stats.serving}
    except grpc.RpcError:
        return set()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victims", [["bootstrap"], ["prefill-0", "decode-0"]], ids=["bootstrap", "nodes"])
def test_killed_and_restarted_over_and_over(cluster: FaultyCluster, load: Load, victims: list[str]) -> None:
    nodes = [name for name in victims if name != "bootstrap"]
    # A bootstrap's own requests are lost with it. Those of a node are not.
    allowed = set() if nodes else {grpc.StatusCode.UNAVAILABLE}
    asks = load.asks(6)
    footprint: dict[int, dict[str, Footprint]] = {}
    for round_ in range(1, ROUNDS + 1):
        before = incarnations(cluster, nodes)

        def back(before: set[str] = before) -> bool:
            now = incarnations(cluster, nodes)
            return len(now) == len(nodes) and not now & before

        with drive(cluster, [asks[round_ % 6], asks[(round_ + 1) % 6]], load) as running:
            for victim in victims:
                cluster.restart(victim)
        check(running.outcomes, load, allowed=allowed)
        assert_eventually(back, f"{victims} are back")
        cluster.wait_serving(2, 2)
        with drive(cluster, [asks[round_ % 6]], load) as running:
            pass
        check(running.outcomes, load)
        if round_ in (WARMED_UP, ROUNDS):
            footprint[round_] = footprints(cluster, victims)
    cluster.check_after()
    for name, early in footprint[WARMED_UP].items():
        late = footprint[ROUNDS][name]
        assert late.threads <= early.threads + 1, f"{name}: {early}, {late}"
        assert late.files <= early.files + MOST_MORE_FILES, f"{name}: {early}, {late}"
        assert late.memory_mib <= early.memory_mib + MOST_MORE_MIB, f"{name}: {early}, {late}"
