"""Unified nodes meet what the other tables hold for prefill and decode nodes, as far as they have what it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.v1 import admin_pb2
from tests.faults.cells import SOON_S, Cell, cells, meet, wake
from tests.faults.harness import FaultyCluster, faulty_cluster
from tests.faults.load import Ask, Load, check, drive
from tests.helpers.cluster import assert_eventually

# A node holds 512 tokens: the cells' load, and less than half of what the test that runs out of pages asks for.
NODE_FLAGS = (
    *("--page-size", "4", "--num-pages", "128"),
    *("--chunk-size", "32", "--max-running", "16"),
    *("--schedule-conservativeness", "0", "--priority-scheduling"),
)
NODES = ("unified-0", "unified-1")
PHASES = {"queued": ("handle.Submit", 0), "prefilling": ("forwarded", 0), "decoding": ("forward", 8)}
in_each_phase = pytest.mark.parametrize("phase", PHASES)


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model, 61)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    directory = tmp_path_factory.mktemp("unified")
    with faulty_cluster(directory, model, unified=2, node_flags=NODE_FLAGS) as running:
        yield running


@cells(
    "kill",
    Cell("idle", "unified", "report.Heartbeat"),
    Cell("queued", "unified", "command.Submit"),
    Cell("prefilling_first_chunk", "unified", "forward"),
    Cell("prefilling_later_chunk", "unified", "forwarded", after=3),
    Cell("before_token_0", "unified", "publish.tokens"),
    Cell("decoding", "unified", "publish.tokens", after=20),
)
def test_a_node_dies(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    meet(cluster, load, asks, cell, "kill")
    cluster.kill(cell.victim)
    cluster.check_after()


@cells(
    "stop",
    Cell("prefilling", "unified", "forwarded", after=2),
    Cell("decoding", "unified", "publish.tokens", after=12),
)
def test_a_node_is_stopped_for_longer_than_its_lease_and_wakes(
    cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell
) -> None:
    meet(cluster, load, asks, cell, "stop")
    wake(cluster, load, asks, cell.victim)
    cluster.wait_serving(0, 0, 2)
    cluster.check_after()


@cells(
    "raise",
    Cell("queued", "unified", "handle.Submit"),
    Cell("pass", "unified", "step"),
    Cell("admitted", "unified", "publish.admitted"),
    Cell("prefilling_first_chunk", "unified", "forward"),
    Cell("prefilling_later_chunk", "unified", "forwarded", after=3),
    Cell("token_0", "unified", "publish.tokens"),
    Cell("decoding", "unified", "forwarded", after=16),
)
def test_a_handler_raises(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    """At worst the requests that it was about end, and say so; the node and all others go on."""
    for one in meet(cluster, load, asks, cell, "raise", allowed={grpc.StatusCode.INTERNAL}):
        assert one.status is None or re.search("incident [0-9a-f]{12}", one.details), one
    cluster.check_after(injected="Injected: ")


@pytest.mark.parametrize("action", ["delay", "duplicate"])
@cells(
    "late_or_twice",
    Cell("submit", "unified", "command.Submit"),
    Cell("admitted", "unified", "publish.admitted"),
    Cell("tokens", "unified", "publish.tokens", after=5),
    Cell("cache_delta", "unified", "report.CacheDelta"),
)
def test_a_message_comes_late_or_twice(
    cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell, action: str
) -> None:
    """Late is after others that were sent later, which is more than gRPC would ever do. No answer suffers."""
    meet(cluster, load, asks, cell, action, seconds=0.3)
    cluster.check_after()


def begin(cluster: FaultyCluster, load: Load, phase: str) -> Any:
    """A call for a long answer that has come to this phase, in which its node keeps it for a while."""
    point, after = PHASES[phase]
    for name in NODES:
        cluster.arm(name, point, "delay", after=after, seconds=1.0)
    call: Any = cluster.generation.Generate(load.ask(length=50, new_tokens=(400, 400)).request(), timeout=60)
    assert_eventually(lambda: any(map(cluster.tripped, NODES)), "its node keeps it")
    assert_eventually(lambda: [one.state for one in cluster.live()] == [phase], f"it is {phase}")
    for name in NODES:
        cluster.disarm(name)
    return call


def written(cluster: FaultyCluster) -> int:
    """Tokens of answers, by all nodes since each began."""
    return sum(node.stats.output_tokens_total for node in cluster.nodes(inspect=True))


@in_each_phase
def test_a_client_ends(cluster: FaultyCluster, load: Load, phase: str) -> None:
    """The node stops long before the answer is whole, and all pages come back."""
    before = written(cluster)
    begin(cluster, load, phase).cancel()
    cluster.check_after()
    assert written(cluster) - before < 200


def test_the_handler_of_a_clients_end_raises(cluster: FaultyCluster, load: Load) -> None:
    before, call = written(cluster), begin(cluster, load, "decoding")
    for name in NODES:
        cluster.arm(name, "handle.Abort", "raise")
    call.cancel()
    assert_eventually(lambda: any(map(cluster.tripped, NODES)), "a handler raises")
    for name in NODES:
        cluster.disarm(name)
    cluster.check_after(injected="Injected: ")
    assert written(cluster) - before < 200


@in_each_phase
def test_the_bootstrap_is_killed(cluster: FaultyCluster, load: Load, asks: list[Ask], phase: str) -> None:
    """Its request ends UNAVAILABLE, and the node drops it. Both nodes come back to the next one, and serve."""
    before, call = written(cluster), begin(cluster, load, phase)
    cluster.restart("bootstrap")
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    cluster.wait_serving(0, 0, 2)
    cluster.check_after()
    assert written(cluster) - before < 200
    with drive(cluster, load.again(asks), load, SOON_S) as running:
        pass
    check(running.outcomes, load)
    cluster.check_after()


def test_a_node_drains_under_load(cluster: FaultyCluster, load: Load, asks: list[Ask]) -> None:
    """It finishes what it has, takes nothing new, and ends with 0: nobody's attempt fails."""
    cluster.arm("unified-0", "forward", "delay", seconds=0.02, times=None)
    with drive(cluster, load.again(asks), load) as running:
        assert_eventually(lambda: any(one.prefill_node == "unified-0" for one in cluster.live()), "it has work")
        cluster.admin.Drain(admin_pb2.DrainRequest(node_id="unified-0"), timeout=5)
        with drive(cluster, load.again(asks[:3]), load) as later:
            pass
        assert cluster.processes.pop("unified-0").popen.wait(30) == 0
    check([*running.outcomes, *later.outcomes], load)
    assert {one.attempts for one in (*running.outcomes, *later.outcomes)} == {1}
    assert {one.pair[0] for one in later.outcomes} == {"unified-1"}
    cluster.check_after()


def test_out_of_pages_and_outranked_while_a_node_dies(cluster: FaultyCluster, load: Load) -> None:
    """Answers whose length nobody can know are retracted, and preempted by those that are more important."""
    asks = [replace(load.ask(length=60, new_tokens=(120, 150)), may_end=True) for _ in range(5)]
    plain, important = load.again(asks + asks), [replace(ask, priority=100) for ask in load.again(asks)]
    for name in NODES:
        cluster.arm(name, "forward", "delay", seconds=0.01, times=None)
    with drive(cluster, plain, load) as first:
        assert_eventually(lambda: said(cluster, "retracted"), "a node is out of pages")
        with drive(cluster, important, load) as second:
            assert_eventually(lambda: said(cluster, "preempted"), "someone is outranked")
            cluster.restart("unified-0")
    check([*first.outcomes, *second.outcomes], load)
    cluster.wait_serving(0, 0, 2)
    cluster.check_after()


def said(cluster: FaultyCluster, what: str) -> bool:
    return any(f": {what} " in (cluster.directory / f"{name}.log").read_text() for name in NODES)
