"""A request is cancelled, and one message of those that clear up after it is lost: it is said again, and nothing stays.

A stream loses no message while it lives. What is dropped here stands for one that a process took and did nothing about.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.doors import hold, reach
from tests.faults.harness import FaultyCluster, faulty_cluster
from tests.faults.load import Load, check, drive

NODE_FLAGS = ("--page-size", "16", "--num-pages", "64")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    directory = tmp_path_factory.mktemp("lost")
    with faulty_cluster(directory, model, prefill=1, decode=1, node_flags=NODE_FLAGS) as running:
        yield running


@pytest.mark.parametrize(
    ("phase", "name", "point"),
    [
        ("queued", "prefill-0", "command.Abort"),
        ("reserved", "decode-0", "command.Abort"),
        ("prefilling", "prefill-0", "report.RoomQuiesced"),
        ("transferring", "decode-0", "command.WriterQuiesced"),
    ],
)
def test_cancelled_and_a_message_lost(cluster: FaultyCluster, model: Path, phase: str, name: str, point: str) -> None:
    load = Load(model, 59, lengths=(150,))
    hold(cluster, phase)
    call = cluster.generation.Generate(load.ask(new_tokens=(300, 300)).request(), timeout=60)
    reach(cluster, phase)
    cluster.arm(name, point, "drop")
    call.cancel()
    cluster.wait_tripped(name)
    cluster.check_after()
    with drive(cluster, load.asks(1), load) as running:
        pass
    check(running.outcomes, load)
    cluster.check_after()
