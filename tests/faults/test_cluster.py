"""Bootstraps, clients and the links between them fail in every phase of a hand-off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvrelay.v1.types_pb2 import ROLE_DECODE
from tests.faults.doors import PHASES, Doors, hold, let_go, reach
from tests.faults.harness import FAST_LEASE, FaultyCluster
from tests.faults.load import Load, check, drive
from tests.helpers.cluster import assert_eventually, serving

NODE_FLAGS = ("--page-size", "16", "--num-pages", "256")
CHUNKS = ("--chunk-size", "64")  # of prefill nodes, in tokens
LEASE_S = 1.5  # as FAST_LEASE says
in_each_phase = pytest.mark.parametrize("phase", PHASES)


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model, 29, lengths=(150, 230))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with serving(
        Doors(tmp_path_factory.mktemp("doors"), model),
        prefill=2,
        decode=2,
        node_flags=NODE_FLAGS,
        prefill_flags=CHUNKS,
        bootstrap_flags=FAST_LEASE,
    ) as running:
        yield running


def lasts(seconds: float) -> None:
    """The time for which a fault stays."""
    threading.Event().wait(seconds)


def works_again(cluster: Doors, load: Load) -> None:
    """Everything is back, nothing is left, and both bootstraps answer."""
    cluster.wait_serving(2, 2)
    cluster.check_after()
    for door in cluster.both:
        with drive(door, load.asks(1, new_tokens=(5, 5)), load) as running:
            pass
        check(running.outcomes, load)


@in_each_phase
def test_bootstrap_killed(cluster: Doors, load: Load, phase: str) -> None:
    """Its requests end UNAVAILABLE; what the nodes do for the other bootstrap goes on; they come back to it."""
    first, second = cluster.both
    with drive(first, load.asks(2, new_tokens=(150, 200)), load) as kept:
        # Both: one that is still on its way would be held in place of the one that is to be lost.
        assert_eventually(lambda: all(len(one.token_ids) > 1 for one in kept.outcomes), "answers are being written")
        hold(first, phase)
        with drive(second, load.asks(1), load) as lost:
            reach(second, phase, cluster.first)
            second.kill("bootstrap")
    check(kept.outcomes, load)
    check(lost.outcomes, load, allowed={grpc.StatusCode.UNAVAILABLE})
    assert lost.outcomes[0].status is grpc.StatusCode.UNAVAILABLE
    first.check_after()  # nodes keep nothing for a bootstrap that is gone
    second.restart("bootstrap")
    works_again(cluster, load)


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [("prefilling", LEASE_S / 3), ("decoding", LEASE_S / 3), *((phase, 1.5 * LEASE_S) for phase in PHASES)],
)
def test_bootstrap_stopped(cluster: Doors, load: Load, phase: str, seconds: float) -> None:
    """It goes on where it was. Nodes that had no answer for the lease wrote nothing more, and try again."""
    second = cluster.second
    hold(cluster.first, phase)
    with drive(second, load.asks(1), load) as running:
        reach(second, phase, cluster.first)
        second.processes["bootstrap"].popen.send_signal(signal.SIGSTOP)
        lasts(seconds)
        second.resume("bootstrap")
    check(running.outcomes, load)
    works_again(cluster, load)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("phase", "stalled"),
    [
        *((phase, None) for phase in PHASES),
        ("transferring", LEASE_S / 3),
        *((phase, 1.5 * LEASE_S) for phase in PHASES),
    ],
)
def test_link_of_a_node(cluster: Doors, load: Load, phase: str, side: str, stalled: float | None) -> None:
    """One node and one bootstrap do not hear each other: the request goes on, there or elsewhere.

    stalled: seconds; None: the link is cut, which both see at once.
    """
    first = cluster.first
    hold(first, phase)
    with drive(first, load.asks(1), load) as running:
        live = reach(first, phase)
        link = cluster.link(live.prefill_node if side == "prefill" else live.decode_node, first)
        if stalled is None:
            link.cut()
        else:
            link.stall()
            lasts(stalled)
        link.heal()
    check(running.outcomes, load)
    works_again(cluster, load)


def test_prefill_node_cut_off_stops_writing(cluster: Doors, load: Load) -> None:
    """It has pages to send when its lease runs out, and keeps them; the decode node keeps its own until it says so."""
    first = cluster.first
    both = ("prefill-0", "prefill-1")
    for name in both:
        first.arm(name, "forwarded", "delay", after=1, seconds=2 * LEASE_S)  # the second of several chunks
    with drive(first, [load.ask(length=230)], load) as running:
        assert_eventually(lambda: any(map(first.tripped, both)), "the second chunk is computed")
        lost, other = sorted(both, key=first.tripped, reverse=True)
        first.disarm(other)
        cluster.link(lost, first).stall()
    check(running.outcomes, load)
    log = first.processes[lost].log
    assert_eventually(lambda: "lease ran out" in log.read_text(), "it finds that its lease ran out")
    fenced = [node.stats.pages_fenced for node in first.nodes(inspect=True) if node.role == ROLE_DECODE]
    assert any(fenced), "nobody has said that it writes no more"
    cluster.link(lost, first).heal()
    works_again(cluster, load)


@pytest.mark.parametrize("how", ["cancels", "has a deadline"])
@in_each_phase
def test_client_ends(cluster: Doors, load: Load, phase: str, how: str) -> None:
    """Both nodes stop long before the answer is whole, and all pages come back."""
    first = cluster.first
    ask = load.ask(new_tokens=(3000, 3000))
    before = written(first)
    hold(first, phase)
    call = first.generation.Generate(ask.request(), timeout=60.0 if how == "cancels" else 1.5)
    reach(first, phase)
    if how == "cancels":
        call.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    code = grpc.StatusCode.CANCELLED if how == "cancels" else grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.code() is code
    assert_eventually(lambda: not first.live(), "the bootstrap has given it up")
    let_go(first)
    works_again(cluster, load)
    assert written(first) - before < 2000


def written(cluster: FaultyCluster) -> int:
    """Tokens that all decode nodes have written."""
    return sum(node.stats.output_tokens_total for node in cluster.nodes(inspect=True) if node.role == ROLE_DECODE)
