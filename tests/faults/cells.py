"""What the cells of the fault tables have in common: where a fault strikes, and a load that goes on until it has.

A cell is (phase, fault, side): its id says so, and each cell is a test on a cluster that many of them share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import grpc
import pytest

from tests.faults.harness import FaultyCluster
from tests.faults.load import Ask, Load, Outcome, Running, check, drive
from tests.helpers.cluster import assert_eventually

__all__ = [
    "DECODE_FLAGS",
    "NODES",
    "NODE_FLAGS",
    "PREFILL_FLAGS",
    "ROUNDS",
    "SOON_S",
    "Cell",
    "cells",
    "long_and_short",
    "meet",
    "ready",
    "strike",
    "wake",
]

NODE_FLAGS = ("--page-size", "4", "--num-pages", "384")
PREFILL_FLAGS = ("--chunk-size", "32")
DECODE_FLAGS = ("--reserved-decode-tokens", "16")
SOON_S = 20.0  # far below every phase deadline that is not set shorter
ROUNDS = 12  # of the load, in which a fault must find its point
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def long_and_short(load: Load, cluster: FaultyCluster) -> list[Ask]:
    """Prompts of many chunks and of less than one, with shared beginnings. Two draw their tokens."""
    asks = [load.ask(length=length, new_tokens=(24, 40)) for length in (150, 9, 90, 33, 120, 6)]
    asks += [load.ask(length=length, new_tokens=(24, 40), sampled=True) for length in (70, 140)]
    for ask in asks:
        load.learn(cluster, ask)
    return asks


def ready(cluster: FaultyCluster) -> FaultyCluster:
    """All serve, each with each, whatever the test before has done, found, or armed in vain."""
    apart = {name for node in cluster.nodes() for name in node.set_aside}
    for name in cluster.roles:
        ended = name not in cluster.processes or cluster.processes[name].popen.poll() is not None
        if not cluster.sound or ended or name in apart:
            cluster.restart(name)
        else:
            cluster.disarm(name)
    count = Counter(cluster.roles.values())
    cluster.wait_serving(count["prefill"], count["decode"], count["unified"])
    cluster.sound = False  # until it is checked
    return cluster


@dataclass(frozen=True, slots=True)
class Cell:
    """Where a fault strikes: at the hit after `after` others of a point of one node.

    cause: a point of both prefill nodes at which a write fails first, for what happens only then.
    """

    phase: str
    side: str
    point: str
    after: int = 0
    cause: str | None = None

    @property
    def victim(self) -> str:
        return f"{self.side}-0"


def cells(fault: str, *rows: Cell) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cell", rows, ids=[f"{row.phase}-{fault}-{row.side}" for row in rows])


def strike(cluster: FaultyCluster, load: Load, asks: Sequence[Ask], cell: Cell) -> Iterator[Running]:
    """Rounds of the load until a fault has struck; yields each round while it runs.

    The victim is given work in each: routing keys spread the load over the prefill nodes, head-room over the decode
    nodes, and a round waits for a victim that a slow machine has made miss its lease.
    """

    def struck() -> bool:
        return cluster.tripped(cell.victim, cell.point)

    def serves() -> bool:
        return any(node.node_id == cell.victim and node.stats.serving for node in cluster.nodes())

    for _ in range(ROUNDS):
        assert_eventually(lambda: struck() or serves(), f"{cell.victim} serves")
        if cell.cause:
            for name in ("prefill-0", "prefill-1"):
                cluster.arm(name, cell.cause, "fail")
        with drive(cluster, load.again(asks), load, SOON_S) as running:
            yield running
        if struck():
            return
    raise AssertionError(f"in {ROUNDS} rounds no fault has struck {cell.victim}")


def meet(
    cluster: FaultyCluster,
    load: Load,
    asks: Sequence[Ask],
    cell: Cell,
    action: str,
    *,
    seconds: float = 0.0,
    allowed: Collection[grpc.StatusCode] = (),
) -> list[Outcome]:
    """Arm a cell's fault and run the load until it has struck; what became of it all is as it must."""
    cluster.arm(cell.victim, cell.point, action, after=cell.after, seconds=seconds)
    outcomes: list[Outcome] = []
    for running in strike(cluster, load, asks, cell):
        running.join()
        check(running.outcomes, load, allowed=allowed)
        outcomes += running.outcomes
    return outcomes


def wake(cluster: FaultyCluster, load: Load, asks: Sequence[Ask], name: str) -> None:
    """Let a stopped node go on once its lease has run out, under load."""
    assert_eventually(lambda: name not in {node.node_id for node in cluster.nodes()}, "its lease runs out")
    with drive(cluster, load.again(asks), load, SOON_S) as running:
        cluster.resume(name)
    check(running.outcomes, load)
