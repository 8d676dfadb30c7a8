"""Nodes come and go while requests are answered, and no request fails for it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvrelay.v1 import admin_pb2
from tests.faults.harness import FaultyCluster, faulty_cluster
from tests.faults.load import Load, Outcome, check, drive
from tests.helpers.cluster import assert_eventually

CLIENTS = 4
NODE_FLAGS = ("--page-size", "16", "--num-pages", "256")


@pytest.fixture
def cluster(model: Path, tmp_path: Path) -> Iterator[FaultyCluster]:
    with faulty_cluster(tmp_path, model, node_flags=NODE_FLAGS) as running:
        yield running


@contextmanager
def steady(cluster: FaultyCluster, load: Load) -> Iterator[list[Outcome]]:
    """Clients that ask one thing after the other, until the block ends; what became of it all."""
    asks = load.asks(24)
    for ask in asks:
        load.reference(ask)
    outcomes: list[Outcome] = []
    over = threading.Event()

    def ask_on(mine: int) -> None:
        while not over.is_set():
            mine = (mine + CLIENTS) % len(asks)
            with drive(cluster, load.again([asks[mine]]), load) as running:
                pass
            outcomes.extend(running.outcomes)

    clients = [threading.Thread(target=ask_on, args=(i,)) for i in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield outcomes
    finally:
        over.set()
        for client in clients:
            client.join()


def works(cluster: FaultyCluster, name: str) -> None:
    """Wait until a node has a part in a request."""
    assert_eventually(
        lambda: any(name in (one.prefill_node, one.decode_node) for one in cluster.live()), f"{name} is given work"
    )


def join(cluster: FaultyCluster, role: str, name: str, *flags: str) -> None:
    cluster.start(role, name, *NODE_FLAGS, *flags)
    works(cluster, name)


def exit_code(cluster: FaultyCluster, name: str) -> int:
    return cluster.processes.pop(name).popen.wait(60)


def test_nodes_join_and_leave_under_load(cluster: FaultyCluster, model: Path) -> None:
    load = Load(model, 43)
    with steady(cluster, load) as outcomes:
        for role in ("prefill", "decode"):
            join(cluster, role, f"{role}-2")
            join(cluster, role, f"{role}-3")
        for name in ("prefill-0", "decode-1"):
            assert cluster.stop(name) == 0
        for name in ("prefill-1", "decode-2"):
            cluster.admin.Drain(admin_pb2.DrainRequest(node_id=name), timeout=5)
            assert exit_code(cluster, name) == 0
        for name in ("prefill-0", "decode-1"):
            cluster.restart(name)
            works(cluster, name)
    assert len(outcomes) > CLIENTS
    check(outcomes, load)
    cluster.wait_serving(3, 3)
    cluster.check_after()


def test_drain_shows_its_progress(cluster: FaultyCluster, model: Path) -> None:
    """A node that is asked to leave takes nothing new, says what it still has, and ends with 0 when it has none."""
    load = Load(model, 47, lengths=(230,))
    for name, point in (("prefill-0", "forwarded"), ("decode-0", "forward")):
        cluster.arm(name, point, "delay", seconds=0.1, times=None)
        with drive(cluster, load.again(load.asks(6)), load) as running:
            works(cluster, name)
            cluster.admin.Drain(admin_pb2.DrainRequest(node_id=name), timeout=5)
            given, left = given_to(cluster, name), []
            for state in cluster.admin.Watch(admin_pb2.WatchRequest(interval_seconds=0.1), timeout=60):
                there = [node.stats for node in state.nodes if node.node_id == name]
                if not there:
                    break
                left += [one.ungranted + one.waiting + one.running + one.transferring for one in there if one.draining]
                assert given_to(cluster, name) <= given, "it takes nothing new"
            assert max(left) > 0, "while it has work, it is there to be seen"
            assert exit_code(cluster, name) == 0
        check(running.outcomes, load)
    cluster.check_after()


def given_to(cluster: FaultyCluster, name: str) -> set[str]:
    """Ids of the live requests that the front door has on a node."""
    live = cluster.admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=5).requests
    return {one.request_id for one in live if name in (one.prefill_node, one.decode_node)}


def test_nothing_is_given_to_a_node_before_its_canary_has_passed(cluster: FaultyCluster, model: Path) -> None:
    load = Load(model, 53)
    with steady(cluster, load) as outcomes:
        for role, fault in itertools.product(("prefill", "decode"), ("raise", "delay")):
            process, name = cluster.start(role, f"{role}-2", *NODE_FLAGS), f"{role}-2"
            assert_eventually(lambda name=name, fault=fault: armed(cluster, name, fault), "it takes its fault")  # type: ignore[misc]
            cluster.wait_tripped(name)
            assert name not in [node.node_id for node in cluster.nodes()]
            if fault == "raise":
                assert exit_code(cluster, name) == 1
                assert "attached" not in process.log.read_text()
            else:
                works(cluster, name)
    check(outcomes, load)
    cluster.check_after(injected="injected|Traceback|CRITICAL")


def armed(cluster: FaultyCluster, name: str, fault: str) -> bool:
    """Arm a process that has only just started, before it has loaded the model that its canary runs."""
    with suppress(OSError, ValueError):
        cluster.arm(name, "forward", fault, seconds=1.0)
        return True
    return False
