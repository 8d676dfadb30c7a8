"""Requests that cannot be answered end with the documented status, naming phase and reason; those beside them go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from engine.core.errors import KVRelayError
from rpc.errors import from_rpc_error
from tests.faults.doors import hold, let_go, reach
from tests.faults.harness import FAST_LEASE, FaultyCluster, faulty_cluster
from tests.faults.load import Load, check, drive
from tests.helpers.cluster import Answer, assert_eventually

TIMEOUTS = [f"--{phase}-timeout" for phase in ("queue", "prefill", "transfer", "token")]
ONE_SECOND = [word for name in TIMEOUTS for word in (name, "1")]
NODE_FLAGS = ("--page-size", "16", "--num-pages", "256")


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model, 31, lengths=(150, 230))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    """One node a pool, one try a request, and a second for each phase."""
    with faulty_cluster(
        tmp_path_factory.mktemp("statuses"),
        model,
        prefill=1,
        decode=1,
        node_flags=NODE_FLAGS,
        bootstrap_flags=(*FAST_LEASE, *ONE_SECOND, "--max-attempts", "1", "--max-queue", "2"),
    ) as running:
        yield running


def refused(cluster: FaultyCluster, load: Load, request_id: str = "") -> KVRelayError:
    """The error that a request of now ends with."""
    request = load.ask().request()
    request.request_id = request_id
    with pytest.raises(grpc.RpcError) as caught:
        list(cluster.generation.Generate(request, timeout=30))
    return from_rpc_error(caught.value)


def works_again(cluster: FaultyCluster, load: Load, injected: str = "") -> None:
    cluster.wait_serving(1, 1)
    cluster.check_after(injected=injected)
    with drive(cluster, load.asks(1, new_tokens=(5, 5)), load) as running:
        pass
    check(running.outcomes, load)


@pytest.mark.parametrize("phase", ["queued", "reserved", "prefilling"])
def test_phase_takes_too_long(cluster: FaultyCluster, load: Load, phase: str) -> None:
    hold(cluster, phase, 2.0)
    error = refused(cluster, load)
    let_go(cluster)
    assert (error.code, error.reason, error.metadata["phase"]) == ("DEADLINE_EXCEEDED", "PHASE_TIMEOUT", phase)
    assert (error.retry_after is not None) == (phase == "queued"), "nothing was computed for it, and it may fit later"
    works_again(cluster, load)


@pytest.mark.parametrize("phase", ["transferring", "decoding"])
def test_phase_takes_too_long_after_a_token(cluster: FaultyCluster, load: Load, phase: str) -> None:
    """Each such attempt brings the request nearer to its end, so it is tried again, however few tries it has."""
    hold(cluster, phase, 1.5)
    ask = load.ask()
    expected = load.reference(ask)
    answer = Answer.collect(cluster.generation.Generate(ask.request(), timeout=30))
    assert answer.token_ids == expected
    assert answer.finished.timing.attempts == 2
    works_again(cluster, load)


def test_queue_is_full(cluster: FaultyCluster, load: Load) -> None:
    cluster.arm("decode-0", "report.Grant", "delay", seconds=0.7, times=2)
    with drive(cluster, load.asks(2), load) as waiting:
        assert_eventually(lambda: [one.state for one in cluster.live()] == ["queued"] * 2, "two requests wait")
        error = refused(cluster, load)
    assert (error.code, error.reason, error.metadata["phase"]) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", "queued")
    assert error.retry_after is not None
    check(waiting.outcomes, load)
    works_again(cluster, load)


@pytest.mark.parametrize(("role", "phase"), [("prefill", "prefilling"), ("decode", "decoding")])
def test_no_node_of_a_pool_is_left(cluster: FaultyCluster, load: Load, role: str, phase: str) -> None:
    """Both the request that lost it and the next one are told at once, long before any phase has timed out."""
    hold(cluster, phase)
    with drive(cluster, load.asks(1), load) as lost:
        reach(cluster, phase)
        cluster.kill(f"{role}-0")
    check(lost.outcomes, load, allowed={grpc.StatusCode.UNAVAILABLE})
    assert f"{role}-0 was lost while {phase}" in lost.outcomes[0].details
    assert_eventually(
        lambda: (refused(cluster, load)).reason == f"NO_{role.upper()}_NODE", "a heartbeat later none is waited for", 3
    )
    cluster.restart(f"{role}-0")
    works_again(cluster, load)


def test_incompatible_node_is_refused(cluster: FaultyCluster, load: Load) -> None:
    """The message names what does not fit. Those that serve do not notice."""
    with drive(cluster, [load.ask(new_tokens=(300, 300))], load) as running:
        assert_eventually(lambda: running.tokens > 0, "an answer is being written")
        odd = cluster.start("decode", "decode-odd", "--page-size", "32", "--num-pages", "64")
        assert odd.popen.wait(30) == 1
        del cluster.processes["decode-odd"]
    check(running.outcomes, load)
    assert "layout.page_size is 32; in this cluster: 16" in odd.log.read_text()
    works_again(cluster, load, injected="refused by the bootstrap")


def test_id_of_a_live_request_is_taken(cluster: FaultyCluster, load: Load) -> None:
    ask = load.ask(new_tokens=(40, 40))
    request = ask.request()
    request.request_id = "the one"
    expected = load.reference(ask)
    hold(cluster, "decoding", 0.7)
    stream = cluster.generation.Generate(request, timeout=30)
    reach(cluster, "decoding")
    error = refused(cluster, load, "the one")
    assert (error.code, error.metadata["request_id"]) == ("ALREADY_EXISTS", "the one")
    assert Answer.collect(stream).token_ids == expected
    with drive(cluster, [ask], load) as again:
        pass
    check(again.outcomes, load)
    works_again(cluster, load)
