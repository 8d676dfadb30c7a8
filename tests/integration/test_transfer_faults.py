"""What the transfer layer promises when a node dies, stops, or lets go: real processes, killed and stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.core.types import NodeIdentity, PoolMemory, RoomKey
from tests.helpers.transfer_node import Events, FaultyPool, FilePool, LocalNode, NodeProcess, eventually
from transfer.errors import PeerRefused, UnknownPeer
from transfer.receiver import SETTLE_POLLS, PageReceiver, RoomBroken, RoomComplete, Settled, WriterGone
from transfer.sender import Quiesced, WriteFailed, WritesDone

PAGE_BYTES = 65536
PAGES = 256
TCP = {"UCX_TLS": "tcp"}
BOTH_TRANSPORTS = pytest.mark.parametrize("environment", [{}, TCP], ids=["default", "tcp"])


def always() -> bool:
    return True


@pytest.fixture
def p(tmp_path: Path) -> Iterator[LocalNode]:
    """The sending node, in this process."""
    node = LocalNode(
        NodeIdentity.new("p"),
        FilePool(tmp_path / "p", PAGES, PAGE_BYTES),
        window_bytes=64 * PAGE_BYTES,
        batch_bytes=8 * PAGE_BYTES,
        write_timeout_s=1.0,
    )
    node.pool.pages[:] = 1
    node.start_sender()
    yield node
    node.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    nodes: list[NodeProcess] = []

    def make(node_id: str = "d", environment: dict[str, str] | None = None, checksum: bool = False) -> NodeProcess:
        path = tmp_path / f"node-{len(nodes)}"
        options = {"node_id": node_id, "environment": environment, "checksum": checksum}
        nodes.append(NodeProcess(path, PAGES, PAGE_BYTES, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield make
    for node in nodes:
        node.kill()


def receiver(start: Callable[..., NodeProcess], p: LocalNode, **options: object) -> NodeProcess:
    node = start(**options)
    node.ask("start_receiver")
    p.agent.add_peer(*node.introduction)
    return node


def begin(p: LocalNode, d: NodeProcess, pages: int = PAGES) -> RoomKey:
    """A room of `pages` pages, opened and expected."""
    room = RoomKey.new(0)
    d.ask("expect", room, range(pages))
    p.sender.open(room, d.identity, range(pages), always)
    return room


def relay(p: LocalNode, d: NodeProcess, pages: int = 8) -> None:
    """A room from beginning to end."""
    room = begin(p, d, pages)
    p.sender.send(room, 0, range(pages), b"")
    ends(p, room, WritesDone)
    eventually(lambda: any(isinstance(event, RoomComplete) for event in d.received().of(room)))
    assert np.array_equal(d.pool.pages[:pages], p.pool.pages[:pages])


def ends(p: LocalNode, room: RoomKey, kind: type | tuple[type, ...]) -> None:
    eventually(lambda: bool(p.sent.of(room)) and isinstance(p.sent.of(room)[-1], kind))


@BOTH_TRANSPORTS
def test_killed_and_started_again(p: LocalNode, start: Callable[..., NodeProcess], environment: dict[str, str]) -> None:
    """A peer dies in the middle of a room, over and over: only its rooms fail, and its successor is served."""
    other = receiver(start, p, node_id="other", environment=environment)
    for round_ in range(3):
        p.pool.pages[:] = round_ + 1
        d = receiver(start, p, environment=environment)
        relay(p, d)
        room, there = begin(p, d), begin(p, other)
        p.sender.send(room, 0, range(PAGES // 2))
        p.sender.send(there, 0, range(PAGES // 2))
        d.kill()
        p.sender.send(room, PAGES // 2, range(PAGES // 2, PAGES), b"")
        p.sender.send(there, PAGES // 2, range(PAGES // 2, PAGES), b"")
        ends(p, room, Quiesced)
        ends(p, there, WritesDone)
        (failure,) = p.sent.of(room)[-2:-1]
        assert isinstance(failure, WriteFailed)
        assert "disconnected" in failure.reason
        eventually(lambda there=there: isinstance(other.received().of(there)[-1], RoomComplete))  # type: ignore[misc]
        assert (other.pool.pages == round_ + 1).all()
    stats = p.agent.stats()
    assert (stats.peers, stats.retired_peers, stats.active_writes) == (2, 0, 0)
    assert p.sender.stats().alive


@BOTH_TRANSPORTS
def test_stopped_then_continued(p: LocalNode, start: Callable[..., NodeProcess], environment: dict[str, str]) -> None:
    """A stopped peer shows no error. Our deadline fails the room, which is quiet only once the peer goes on."""
    d = receiver(start, p, environment=environment)
    relay(p, d)
    room = begin(p, d)
    with d.stopped():
        p.sender.send(room, 0, range(PAGES), b"")
        ends(p, room, WriteFailed)
        assert p.sent.of(room)[-1].reason == "no answer from d to a write for 1 s"
        late = begin_unexpected(p, d)
        ends(p, late, Quiesced)  # nothing of it was posted, since the window is full
        assert p.sent.find(Quiesced) == [Quiesced(late)]
        assert p.agent.stats().active_writes == 8
        p.sender.check_integrity()
    ends(p, room, Quiesced)
    assert p.agent.stats().active_writes == 0
    relay(p, d)


def begin_unexpected(p: LocalNode, d: NodeProcess) -> RoomKey:
    room = RoomKey.new(1)
    p.sender.open(room, d.identity, range(4), always)
    p.sender.send(room, 0, range(4), b"")
    return room


@BOTH_TRANSPORTS
def test_nothing_changes_after_quiesced(
    p: LocalNode, start: Callable[..., NodeProcess], environment: dict[str, str]
) -> None:
    d = receiver(start, p, environment=environment)
    relay(p, d)
    room = begin(p, d)
    p.pool.pages[:] = 2
    with d.stopped():
        p.sender.send(room, 0, range(PAGES), b"")
        eventually(lambda: p.agent.stats().active_writes == 8)
        p.sender.cancel(room)
        p.sender.cancel(room)
        eventually(lambda: p.sender.stats().bytes_in_progress == 64 * PAGE_BYTES)
        assert Quiesced(room) not in p.sent
    ends(p, room, Quiesced)
    as_it_was = d.pool.pages.copy()
    assert not (as_it_was[64:] == 2).any()
    p.pool.pages[:] = 3
    marker = RoomKey.new(0)  # goes the same way, so all before it has landed when it has
    d.ask("expect", marker, [PAGES - 1])
    p.sender.open(marker, d.identity, [PAGES - 1], always)
    p.sender.send(marker, 0, [PAGES - 1], b"")
    ends(p, marker, WritesDone)
    assert np.array_equal(d.pool.pages[:-1], as_it_was[:-1])
    assert d.received().of(room) == [] or not isinstance(d.received().of(room)[-1], RoomComplete)
    assert p.sent.of(room).count(Quiesced(room)) == 1
    relay(p, d)


def broken(received: Callable[[], Events], room: RoomKey, page: int, of: int) -> None:
    """A room is found to differ in this one page, among those of one write."""
    eventually(lambda: bool(events := received().of(room)) and isinstance(events[-1], RoomBroken))
    reason = f"page {page} of the room is not what was sent: 1 of {of} checksums of this write differ"
    assert received().of(room)[-1] == RoomBroken(room, reason, 1)


@BOTH_TRANSPORTS
@pytest.mark.parametrize("write", [0, 1, 2], ids=["first write", "between", "last write"])
def test_a_page_that_changed_before_it_was_written_breaks_its_room(
    tmp_path: Path, start: Callable[..., NodeProcess], environment: dict[str, str], write: int
) -> None:
    pool = FaultyPool(tmp_path / "p", PAGES, PAGE_BYTES)
    pool.pages[:] = np.random.default_rng(0).integers(0, 256, pool.pages.shape, dtype=np.uint8)
    p = LocalNode(NodeIdentity.new("p"), pool, batch_bytes=8 * PAGE_BYTES, checksum=True)
    p.start_sender()
    d = receiver(start, p, environment=environment)
    relay(p, d)
    pool.faulty = 8 * write + 3
    room = begin(p, d, 24)
    p.sender.send(room, 0, range(24), b"")
    broken(d.received, room, 8 * write + 3, 8)
    ends(p, room, WritesDone)  # its writer knows nothing of it, and has let go
    relay(p, d, 24)
    stats = d.ask("receiver_stats")
    assert (stats.completed, stats.rooms, stats.corrupt_pages) == (2, 0, 1)
    p.close()


@BOTH_TRANSPORTS
def test_a_page_that_changed_after_it_was_written_breaks_its_room(
    tmp_path: Path, start: Callable[..., NodeProcess], environment: dict[str, str]
) -> None:
    pool = FaultyPool(tmp_path / "d", PAGES, PAGE_BYTES)
    pool.before, pool.faulty = True, 17
    d = LocalNode(NodeIdentity.new("d"), pool)
    d.start_receiver()
    writer = start("p", environment, checksum=True)
    writer.pool.pages[:] = np.random.default_rng(0).integers(0, 256, pool.pages.shape, dtype=np.uint8)
    writer.ask("add_peer", d.introduction())
    writer.ask("start_sender")
    room, again = RoomKey.new(0), RoomKey.new(1)
    d.expect(room, range(PAGES))
    writer.ask("send_all", room, d.identity, PAGES)
    broken(d.received_events, room, 17, 128)
    d.expect(again, range(PAGES))
    writer.ask("send_all", again, d.identity, PAGES)
    eventually(lambda: isinstance((d.received.of(again) or [None])[-1], RoomComplete))
    assert np.array_equal(pool.pages, writer.pool.pages)
    d.close()


def test_a_broken_connection_to_a_living_peer_heals(p: LocalNode, start: Callable[..., NodeProcess]) -> None:
    d = receiver(start, p)
    relay(p, d)
    assert d.ask("break_connections") > 0
    room = begin_unexpected(p, d)
    ends(p, room, (WritesDone, Quiesced))  # the sender may have noticed by itself, or notices with this write
    relay(p, d)
    assert p.agent.stats().reconnects >= 1


@BOTH_TRANSPORTS
def test_a_dead_writers_bytes_have_landed_once_settled(
    tmp_path: Path, start: Callable[..., NodeProcess], environment: dict[str, str]
) -> None:
    """The writer dies while bytes of its lie in socket buffers of the receiver, which lands them afterwards."""
    d = LocalNode(NodeIdentity.new("d"), FilePool(tmp_path / "d", PAGES, PAGE_BYTES))
    writer = start("p", environment)
    writer.pool.pages[:] = 5
    d.add_peer(writer.introduction)
    writer.ask("add_peer", d.introduction())
    writer.ask("start_sender")
    first, room = RoomKey.new(0), RoomKey.new(0)
    d.receiver.expect(first, [0])
    writer.ask("send_all", first, d.identity, 1)
    eventually(lambda: bool(d.agent.take_notices()))
    writer.ask("send_all", room, d.identity, PAGES)
    eventually(lambda: bool(writer.ask("active_writes")))
    writer.kill()
    at_death = d.pool.pages.copy()
    d.receiver.start()
    d.receiver.await_gone(writer.identity)
    eventually(lambda: WriterGone(writer.identity) in d.received)
    once_settled = d.pool.pages.copy()
    if environment == TCP:
        assert not np.array_equal(at_death, once_settled), "nothing was on its way: this test shows nothing"
    d.receiver.settle("again")
    eventually(lambda: Settled("again") in d.received)
    assert np.array_equal(d.pool.pages, once_settled)
    assert d.agent.stats().peers == 0
    d.close()


@BOTH_TRANSPORTS
def test_a_writer_that_ended_before_it_was_known_is_gone(
    tmp_path: Path, start: Callable[..., NodeProcess], environment: dict[str, str]
) -> None:
    """Its death and the news of its birth cross: it cannot be reached, and is waited for all the same."""
    d = LocalNode(NodeIdentity.new("d"), FilePool(tmp_path / "d", PAGES, PAGE_BYTES))
    writer = start("p", environment)
    writer.kill()
    d.add_peer(writer.introduction)
    d.receiver.start()
    d.receiver.await_gone(writer.identity)
    eventually(lambda: WriterGone(writer.identity) in d.received)
    d.close()


@BOTH_TRANSPORTS
def test_only_a_writers_end_proves_it_gone(
    tmp_path: Path, start: Callable[..., NodeProcess], environment: dict[str, str]
) -> None:
    d = LocalNode(NodeIdentity.new("d"), FilePool(tmp_path / "d", PAGES, PAGE_BYTES))
    writer = start("p", environment)
    writer.ask("start_sender")
    writer.ask("add_peer", d.introduction())
    d.add_peer(writer.introduction)
    d.receiver.start()
    d.receiver.await_gone(NodeIdentity.new("p"))  # nobody knows it: nothing comes
    d.receiver.await_gone(writer.identity)
    assert writer.ask("break_connections") > 0  # it makes new ones
    time_passes(d)
    with writer.stopped():
        time_passes(d)
        successor = start("p", environment)
        d.add_peer(successor.introduction)
        time_passes(d)
        assert d.received.find(WriterGone) == []
    d.receiver.await_gone(successor.identity)
    d.add_peer(successor.introduction)  # it is back: nothing to wait for
    assert writer.exit() == 0
    successor.kill()
    eventually(lambda: d.received.find(WriterGone) == [WriterGone(writer.identity)])
    time_passes(d)
    assert d.received.find(WriterGone) == [WriterGone(writer.identity)]
    for times in (1, 2):  # told again to who asks again
        d.receiver.await_gone(successor.identity)
        eventually(lambda times=times: d.received.count(WriterGone(successor.identity)) == times)  # type: ignore[misc]
    d.close()


def test_time_in_which_nothing_was_polled_settles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread was busy, or the process stopped, for longer than settling takes: what came meanwhile is not here."""
    now, polls, at_the_event = 0.0, 0, []
    d = LocalNode(NodeIdentity.new("d"), FilePool(tmp_path / "d", PAGES, PAGE_BYTES))
    receiver = PageReceiver(d.agent, lambda event: at_the_event.append(polls), d.pool.checksums, clock=lambda: now)
    take_notices = d.agent.take_notices

    def counted() -> list[bytes]:
        nonlocal polls
        polls += 1
        return take_notices()

    monkeypatch.setattr(d.agent, "take_notices", counted)
    receiver.settle("ticket")
    now = 1000.0
    receiver.start()
    eventually(lambda: bool(at_the_event))
    assert at_the_event[0] >= SETTLE_POLLS > 1
    receiver.close()
    d.close()


def time_passes(d: LocalNode) -> None:
    """Long enough for a proof that should not come."""
    for _ in range(2):
        ticket = object()
        d.receiver.settle(ticket)
        eventually(lambda ticket=ticket: Settled(ticket) in d.received)  # type: ignore[misc]


def test_peers_come_and_go(p: LocalNode, start: Callable[..., NodeProcess]) -> None:
    d = receiver(start, p)
    identity, metadata, memory = d.introduction
    p.agent.add_peer(identity, metadata, memory)  # again: nothing happens
    for _ in range(3):
        relay(p, d)
        p.agent.remove_peer(identity)
        p.agent.remove_peer(identity)  # again, as after one that was refused: nothing happens
        with pytest.raises(UnknownPeer, match=str(identity)):
            p.agent.write(identity, [0], [0], b"")
        p.agent.add_peer(identity, metadata, memory)
    room = begin(p, d)
    with d.stopped():
        p.sender.send(room, 0, range(PAGES))
        eventually(lambda: p.agent.stats().active_writes == 8)
        p.agent.remove_peer(identity)
        ends(p, room, WriteFailed)
        stats = p.agent.stats()
        assert (stats.peers, stats.retired_peers, stats.active_writes) == (0, 1, 8)
        p.agent.add_peer(identity, metadata, memory)
        assert p.agent.stats().retired_peers == 0
        p.agent.remove_peer(identity)
    ends(p, room, Quiesced)
    assert p.agent.stats().retired_peers == 0


def test_peers_that_do_not_fit_are_refused(p: LocalNode, start: Callable[..., NodeProcess]) -> None:
    identity, metadata, memory = start().introduction
    refusals = [
        (identity, metadata, PoolMemory(memory.base_address, 4096, memory.num_pages), "page_bytes is 4096, here 65536"),
        (identity, metadata, PoolMemory(memory.base_address, PAGE_BYTES, PAGES + 1), "not what it registered"),
        (identity, b"nonsense", memory, "cannot use its metadata"),
        (NodeIdentity.new("d"), metadata, memory, f"of agent {identity}"),
        (p.identity, metadata, memory, "this identity is taken"),
    ]
    for who, what, where, complaint in refusals:
        with pytest.raises(PeerRefused, match=complaint):
            p.agent.add_peer(who, what, where)
        assert p.agent.stats().peers == 0
    p.agent.add_peer(identity, metadata, memory)
    with pytest.raises(PeerRefused, match="this identity is taken"):
        p.agent.add_peer(identity, metadata, PoolMemory(memory.base_address, PAGE_BYTES, PAGES - 1))


def test_a_node_ends_with_writes_in_progress(tmp_path: Path, start: Callable[..., NodeProcess]) -> None:
    """Its agent says so and lets go of nothing; the process ends all the same."""
    p, d = start("p"), start("d")
    d.ask("start_receiver")
    p.ask("add_peer", d.introduction)
    p.ask("start_sender")
    first, room = RoomKey.new(0), RoomKey.new(0)
    d.ask("expect", first, [0])
    p.ask("send_all", first, d.identity, 1)
    eventually(lambda: bool(d.received().find(RoomComplete)))
    with d.stopped():
        p.ask("send_all", room, d.identity, PAGES)
        eventually(lambda: bool(p.ask("active_writes")))
        assert p.ask("close_agent") is False
        assert p.exit() == 0
    assert d.ask("close_agent") is True
    assert d.exit() == 0
