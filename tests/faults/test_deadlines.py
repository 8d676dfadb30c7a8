"""What no notice tells of and only a deadline ends: lost messages, and work that hangs while its process lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cells import DECODE_FLAGS, NODE_FLAGS, PREFILL_FLAGS, ROUNDS, Cell, cells, meet
from tests.faults.harness import FAST_LEASE, FaultyCluster, faulty_cluster
from tests.faults.load import Ask, Load, check, drive
from tests.helpers.cluster import assert_eventually

HUNG_S = 3.0  # longer than each deadline
DEADLINES = (
    *("--grant-timeout", "1"),
    *("--prefill-timeout", "1.5"),
    *("--transfer-timeout", "1.5"),
    *("--token-timeout", "1.5"),
    *("--max-attempts", "10"),  # on a slow machine such deadlines pass also where nothing is wrong
)


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model, 6)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    with faulty_cluster(
        tmp_path_factory.mktemp("deadlines"),
        model,
        node_flags=NODE_FLAGS,
        prefill_flags=PREFILL_FLAGS,
        decode_flags=DECODE_FLAGS,
        bootstrap_flags=(*FAST_LEASE, *DEADLINES),
    ) as running:
        yield running


@cells(
    "lost",
    Cell("submit", "prefill", "command.Submit"),
    Cell("granted", "prefill", "command.Granted"),
    Cell("admitted", "prefill", "publish.admitted"),
    Cell("token_0", "prefill", "publish.tokens"),
    Cell("room_quiesced", "prefill", "report.RoomQuiesced"),
    Cell("room_failed", "prefill", "report.RoomFailed", cause="post"),
    Cell("reserve", "decode", "command.Reserve"),
    Cell("grant", "decode", "report.Grant"),
    Cell("notice", "decode", "notice"),
    Cell("last_notice", "decode", "notice.last"),
    Cell("tokens", "decode", "publish.tokens", after=5),
)
def test_a_message_is_lost(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    """As when its handler raises. The attempt is given up in time, and another one answers."""
    meet(cluster, load, asks, cell, "drop")
    cluster.check_after()


@cells(
    "unreadable",
    Cell("submit", "prefill", "command.Submit"),
    Cell("granted", "prefill", "command.Granted"),
    Cell("reserve", "decode", "command.Reserve"),
)
def test_a_session_cannot_take_a_command(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    """It is lost, and nothing else."""
    meet(cluster, load, asks, cell, "raise")
    cluster.check_after(injected="Injected: ")


@cells(
    "hang",
    Cell("granted", "prefill", "handle.Granted"),
    Cell("prefilling", "prefill", "forward", after=2),
    Cell("posting", "prefill", "post"),
    Cell("reserved", "decode", "handle.Reserve"),
    Cell("complete", "decode", "handle.RoomComplete"),
    Cell("decoding", "decode", "forward", after=8),
)
def test_a_thread_hangs(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    """The session lives on and says that all is well. What the thread does when it goes on is nothing to anybody."""
    meet(cluster, load, asks, cell, "delay", seconds=HUNG_S)
    cluster.release(cell.victim)
    cluster.check_after()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_node_is_not_heard(cluster: FaultyCluster, load: Load, asks: list[Ask], victim: str) -> None:
    """It says nothing for the lease: it is gone, and comes back as soon as it is heard again."""
    cluster.arm(victim, "report", "drop", times=None)
    with drive(cluster, load.again(asks), load) as running:
        assert_eventually(lambda: victim not in {node.node_id for node in cluster.nodes()}, "its lease runs out")
        cluster.disarm(victim)
    check(running.outcomes, load)
    cluster.wait_serving(2, 2)
    cluster.check_after()


def test_a_node_hears_no_answer(cluster: FaultyCluster, load: Load, asks: list[Ask]) -> None:
    """Without acknowledged heartbeats a prefill node writes nothing, and says so; the other one reads the prompts."""
    cluster.arm("prefill-0", "ack", "drop", times=None)
    log = cluster.processes["prefill-0"].log
    before = log.read_text().count("lease ran out")
    for _ in range(ROUNDS):
        with drive(cluster, load.again(asks), load) as running:
            pass
        check(running.outcomes, load)
        if log.read_text().count("lease ran out") > before:
            break
    assert log.read_text().count("lease ran out") > before
    cluster.disarm("prefill-0")
    cluster.check_after()
