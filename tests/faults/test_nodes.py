"""What happens to a node, at every point of a request's way: nobody's answer changes and nothing is lost.

Phase deadlines are far away, so what is over soon was noticed and did not run out of time. `test_deadlines` has the
faults that only a deadline can notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.faults.cells import DECODE_FLAGS, NODE_FLAGS, PREFILL_FLAGS, ROUNDS, SOON_S, Cell, cells, meet, strike, wake
from tests.faults.harness import FaultyCluster, faulty_cluster
from tests.faults.load import Ask, Load, check, drive

INTERNAL = grpc.StatusCode.INTERNAL


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model, 4)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    with faulty_cluster(
        tmp_path_factory.mktemp("nodes"),
        model,
        node_flags=NODE_FLAGS,
        prefill_flags=PREFILL_FLAGS,
        decode_flags=DECODE_FLAGS,
    ) as running:
        yield running


@cells(
    "kill",
    Cell("idle", "prefill", "report.Heartbeat"),
    Cell("queued", "prefill", "command.Submit"),
    Cell("granted", "prefill", "command.Granted"),
    Cell("prefilling_first_chunk", "prefill", "forward"),
    Cell("prefilling_later_chunk", "prefill", "forwarded", after=3),
    Cell("before_token_0", "prefill", "publish.tokens"),
    Cell("transferring_first_write", "prefill", "post"),
    Cell("transferring_posted", "prefill", "posted"),
    Cell("after_token_0", "prefill", "post.last"),
    Cell("last_write_posted", "prefill", "posted.last"),
    Cell("writes_done", "prefill", "handle.WritesDone"),
    Cell("before_quiesced", "prefill", "report.RoomQuiesced"),
    Cell("idle", "decode", "report.Heartbeat"),
    Cell("queued", "decode", "command.Reserve"),
    Cell("reserved", "decode", "report.Grant"),
    Cell("transferring_first_page", "decode", "notice"),
    Cell("transferring_last_page", "decode", "notice.last"),
    Cell("complete", "decode", "handle.RoomComplete"),
    Cell("decoding_first_step", "decode", "forward"),
    Cell("decoding_later_step", "decode", "publish.tokens", after=12),
    Cell("decoding_towards_the_end", "decode", "forwarded", after=36),
)
def test_a_node_dies(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    """The other node of its pool takes over; the dead one comes back under its name."""
    meet(cluster, load, asks, cell, "kill")
    cluster.kill(cell.victim)
    cluster.check_after()


@cells(
    "stop",
    Cell("idle", "prefill", "report.Heartbeat"),
    Cell("granted", "prefill", "handle.Granted"),
    Cell("prefilling", "prefill", "forwarded", after=2),
    Cell("transferring_posted", "prefill", "posted"),
    Cell("after_token_0", "prefill", "post.last"),
    Cell("before_quiesced", "prefill", "handle.WritesDone"),
    Cell("idle", "decode", "report.Heartbeat"),
    Cell("reserved", "decode", "report.Grant"),
    Cell("transferring", "decode", "notice"),
    Cell("complete", "decode", "handle.RoomComplete"),
    Cell("decoding", "decode", "forward", after=12),
)
def test_a_node_is_stopped_for_longer_than_its_lease_and_wakes(
    cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell
) -> None:
    """Its requests go on elsewhere, and what it does when it wakes is nothing to anybody."""
    meet(cluster, load, asks, cell, "stop")
    wake(cluster, load, asks, cell.victim)
    cluster.wait_serving(2, 2)
    cluster.check_after()


@cells(
    "pause",
    Cell("prefilling", "prefill", "forwarded", after=2),
    Cell("transferring", "prefill", "posted"),
    Cell("transferring", "decode", "notice"),
    Cell("decoding", "decode", "forward", after=12),
)
def test_a_node_is_stopped_for_less_than_its_lease(
    cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell
) -> None:
    """Nobody is lost: everything waits, and goes on."""
    cluster.arm(cell.victim, cell.point, "stop", after=cell.after)
    for running in strike(cluster, load, asks, cell):
        cluster.wait_tripped(cell.victim, cell.point)
        cluster.resume(cell.victim)
        running.join()
        check(running.outcomes, load)
    cluster.check_after()


@cells(
    "raise",
    Cell("queued", "prefill", "handle.Submit"),
    Cell("granted", "prefill", "handle.Granted"),
    Cell("pass", "prefill", "step"),
    Cell("prefilling_first_chunk", "prefill", "forward"),
    Cell("prefilling_later_chunk", "prefill", "forwarded", after=3),
    Cell("transferring", "prefill", "post"),
    Cell("token_0", "prefill", "publish.tokens"),
    Cell("writes_done", "prefill", "handle.WritesDone"),
    Cell("quiesced", "prefill", "report.RoomQuiesced"),
    Cell("reserved", "decode", "handle.Reserve"),
    Cell("pass", "decode", "step"),
    Cell("grant", "decode", "report.Grant"),
    Cell("complete", "decode", "handle.RoomComplete"),
    Cell("writer_quiet", "decode", "handle.WriterQuiesced"),
    Cell("decoding_first_step", "decode", "forward"),
    Cell("decoding_later_step", "decode", "forwarded", after=12),
    Cell("tokens", "decode", "publish.tokens", after=12),
    Cell("write_failed", "prefill", "handle.WriteFailed", cause="post"),
    Cell("aborted", "prefill", "handle.Abort", cause="post"),
    Cell("aborted_quiet", "prefill", "handle.Quiesced", cause="post"),
    Cell("aborted", "decode", "handle.Abort", cause="post"),
    Cell("fenced", "decode", "handle.Settled", cause="post"),
)
def test_a_handler_raises(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    """At worst the requests that it was about end, and say so; the node and all others go on."""
    for one in meet(cluster, load, asks, cell, "raise", allowed={INTERNAL}):
        assert one.status is None or re.search("incident [0-9a-f]{12}", one.details), one
    cluster.check_after(injected="Injected: ")


@cells(
    "raise",
    Cell("peer_left", "prefill", "handle.PeerLeft"),
    Cell("peer_joined", "prefill", "handle.PeerJoined"),
    Cell("peer_left", "decode", "handle.PeerLeft"),
    Cell("peer_joined", "decode", "handle.PeerJoined"),
    Cell("writer_gone", "decode", "handle.WriterGone"),
)
def test_a_handler_raises_while_a_peer_dies_and_comes_back(
    cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell
) -> None:
    """The peer dies with pages on their way. No page waits for ever for what the handler should have seen to."""
    dying = Cell("", *(("decode", "notice") if cell.side == "prefill" else ("prefill", "posted")))
    cluster.arm(cell.victim, cell.point, "raise")
    for round_ in range(ROUNDS):  # until it was with pages on their way to, or from, the victim
        cluster.arm(dying.victim, dying.point, "kill", after=1 + round_ % 3)
        for running in strike(cluster, load, asks, dying):
            running.join()
            check(running.outcomes, load)
        cluster.restart(dying.victim)
        cluster.wait_serving(2, 2)
        if cluster.tripped(cell.victim, cell.point):
            break
    assert cluster.tripped(cell.victim, cell.point)
    with drive(cluster, load.again(asks), load, SOON_S) as running:
        pass
    check(running.outcomes, load)
    cluster.check_after(injected="Injected: ")


@cells(
    "raise",
    Cell("posting_and_polling", "prefill", "poll"),
    Cell("receiving", "decode", "notice"),
)
def test_a_transfer_thread_ends(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    """A node that can move no pages any more ends by itself, as if it had been killed."""
    meet(cluster, load, asks, cell, "raise")
    assert cluster.processes.pop(cell.victim).popen.wait(20) == 1
    cluster.check_after(injected="Injected: |RuntimeError: the .* thread has ended|CRITICAL .* thread ended")


MESSAGES = (
    Cell("granted", "prefill", "command.Granted"),
    Cell("abort", "prefill", "command.Abort", cause="post"),
    Cell("admitted", "prefill", "publish.admitted"),
    Cell("token_0", "prefill", "publish.tokens"),
    Cell("relayed", "prefill", "publish.relayed"),
    Cell("room_failed", "prefill", "report.RoomFailed", cause="post"),
    Cell("room_quiesced", "prefill", "report.RoomQuiesced"),
    Cell("fence_quiesced", "prefill", "report.RoomQuiesced", cause="post"),
    Cell("cache_delta", "prefill", "report.CacheDelta"),
    Cell("reserve", "decode", "command.Reserve"),
    Cell("abort", "decode", "command.Abort", cause="post"),
    Cell("writer_quiesced", "decode", "command.WriterQuiesced"),
    Cell("grant", "decode", "report.Grant"),
    Cell("tokens", "decode", "publish.tokens", after=5),
    Cell("notice", "decode", "notice"),
    Cell("last_notice", "decode", "notice.last"),
)


@cells("late", *MESSAGES)
def test_a_message_comes_late(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    """After others that were sent later, which is more than gRPC would ever do. No answer suffers."""
    message_fault(cluster, load, asks, cell, "delay")


@cells("twice", Cell("submit", "prefill", "command.Submit"), *MESSAGES)
def test_a_message_comes_twice(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell) -> None:
    message_fault(cluster, load, asks, cell, "duplicate")


def message_fault(cluster: FaultyCluster, load: Load, asks: list[Ask], cell: Cell, action: str) -> None:
    meet(cluster, load, asks, cell, action, seconds=0.5)
    cluster.check_after()
