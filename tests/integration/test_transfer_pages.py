"""Pages go where they should: real NIXL between real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.types import NodeIdentity, RoomKey
from tests.helpers.transfer_node import FilePool, LocalNode, NodeProcess, eventually
from transfer.notice import MAX_CHECKSUMS
from transfer.receiver import RoomBroken, RoomComplete, RoomProgress
from transfer.sender import BATCH_BYTES, Quiesced, Sent, WriteFailed, WritesDone

PAGES = 96
TCP = {"UCX_TLS": "tcp"}  # what is left between containers


def always() -> bool:
    return True


@pytest.fixture
def sender_node(tmp_path: Path) -> Iterator[Callable[..., LocalNode]]:
    nodes: list[LocalNode] = []

    def make(page_bytes: int, num_pages: int = PAGES, **options: Any) -> LocalNode:
        pool = FilePool(tmp_path / f"sender-{len(nodes)}", num_pages, page_bytes)
        nodes.append(LocalNode(NodeIdentity.new("p"), pool, **options))
        fill(pool, seed=len(nodes))
        nodes[-1].start_sender()
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def receiver_node(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    nodes: list[NodeProcess] = []

    def make(page_bytes: int, num_pages: int = PAGES, **options: object) -> NodeProcess:
        path = tmp_path / f"receiver-{len(nodes)}"
        nodes.append(NodeProcess(path, num_pages, page_bytes, **options))  # type: ignore[arg-type]
        nodes[-1].ask("start_receiver")
        return nodes[-1]

    yield make
    for node in nodes:
        node.kill()


def fill(pool: FilePool, seed: int) -> None:
    pool.pages[:] = np.random.default_rng(seed).integers(1, 256, pool.pages.shape, dtype=np.uint8)


def completed(node: NodeProcess, room: RoomKey) -> RoomComplete:
    eventually(lambda: bool(node.received().of(room)) and isinstance(node.received().of(room)[-1], RoomComplete))
    complete: RoomComplete = node.received().of(room)[-1]
    return complete


@pytest.mark.parametrize("environment", [{}, TCP], ids=["default", "tcp"])
@pytest.mark.parametrize("page_bytes", [512, 23_040, 1 << 18])
def test_every_page_lands_in_its_place(
    sender_node: Callable[..., LocalNode],
    receiver_node: Callable[..., NodeProcess],
    page_bytes: int,
    environment: dict[str, str],
) -> None:
    p, d = sender_node(page_bytes, batch_bytes=5 * page_bytes), receiver_node(page_bytes, environment=environment)
    p.agent.add_peer(*d.introduction)
    rng = np.random.default_rng(page_bytes)
    expected = np.zeros_like(d.pool.pages)
    untouched = rng.permutation(PAGES).tolist()
    for epoch, count in enumerate([1, 40, 47]):
        room = RoomKey.new(epoch)
        remote, untouched = untouched[:count], untouched[count:]
        local = rng.permutation(PAGES)[:count].tolist()
        expected[remote] = p.pool.pages[local]
        d.ask("expect", room, remote)
        p.sender.open(room, d.identity, remote, always)
        for first in range(0, count, 16):
            last = bytes([epoch]) * 1000 if first + 16 >= count else None
            p.sender.send(room, first, local[first : first + 16], last)
        complete = completed(d, room)
        assert (complete.pages, complete.last) == (count, bytes([epoch]) * 1000)
        assert complete.first_at <= complete.last_at
        assert np.array_equal(d.pool.pages, expected)
        eventually(lambda room=room: isinstance(p.sent.of(room)[-1], WritesDone))  # type: ignore[misc]
        assert p.sent.of(room)[-1].bytes == count * page_bytes
        assert sum(event.pages for event in p.sent.of(room) if isinstance(event, Sent)) == count
    stats = p.sender.stats()
    assert (stats.alive, stats.rooms, stats.bytes_in_progress, stats.rooms_failed) == (True, 0, 0, 0)
    assert stats.bytes_sent == 88 * page_bytes
    p.sender.check_integrity()


@pytest.mark.parametrize("environment", [{}, TCP], ids=["default", "tcp"])
@pytest.mark.parametrize(("page_bytes", "count"), [(36, 10_000), (1 << 18, PAGES)], ids=["small pages", "large pages"])
def test_with_checksums_every_page_is_checked(
    sender_node: Callable[..., LocalNode],
    receiver_node: Callable[..., NodeProcess],
    page_bytes: int,
    count: int,
    environment: dict[str, str],
) -> None:
    """Small pages: as many as one notice can carry checksums of, and some more, go out with the prompt's first send."""
    p = sender_node(page_bytes, count, checksum=True)
    d = receiver_node(page_bytes, count, environment=environment)
    p.agent.add_peer(*d.introduction)
    remote, room = np.random.default_rng(1).permutation(count).tolist(), RoomKey.new(0)
    d.ask("expect", room, remote)
    p.sender.open(room, d.identity, remote, always)
    for first, after in ((0, count - 5), (count - 5, count)):
        p.sender.send(room, first, range(first, after))
    p.sender.send(room, 0, [], b"token")
    complete = completed(d, room)
    assert (complete.pages, complete.last) == (count, b"token")
    assert np.array_equal(d.pool.pages[remote], p.pool.pages)
    assert d.ask("receiver_stats").corrupt_pages == 0
    eventually(lambda: isinstance(p.sent.of(room)[-1], WritesDone))
    assert max(event.pages for event in p.sent.find(Sent)) == min(MAX_CHECKSUMS, BATCH_BYTES // page_bytes)


def test_many_rooms_to_two_peers(
    sender_node: Callable[..., LocalNode], receiver_node: Callable[..., NodeProcess]
) -> None:
    """Sends of all rooms interleaved; some rooms end with no page left to send, one has no pages at all."""
    page_bytes = 8192
    p = sender_node(page_bytes, batch_bytes=3 * page_bytes, window_bytes=8 * page_bytes)
    peers = [receiver_node(page_bytes, node_id=name) for name in ("d1", "d2")]
    for d in peers:
        p.agent.add_peer(*d.introduction)
    rng = np.random.default_rng(0)
    rooms = {RoomKey.new(0): (peers[i % 2], i // 2) for i in range(16)}
    shares = [[6] * 16 for _ in peers]
    shares[0][15] = 0
    local = {room: rng.permutation(PAGES)[: shares[peers.index(d)][i]].tolist() for room, (d, i) in rooms.items()}
    for room, (d, i) in rooms.items():
        remote = range(6 * i, 6 * i + len(local[room]))
        d.ask("expect", room, remote)
        p.sender.open(room, d.identity, remote, always)
    for step in range(4):
        for i, (room, pages) in enumerate(local.items()):
            part = pages[2 * step : 2 * step + 2]
            ends_without_a_page = i % 3 == 0 or not pages
            if part or (step == 3 and ends_without_a_page):
                last = None if step < 3 and (ends_without_a_page or pages[2 * step + 2 :]) else b"token"
                p.sender.send(room, 2 * step if part else 0, part, last)
    for room, (d, i) in rooms.items():
        complete = completed(d, room)
        assert (complete.pages, complete.last) == (len(local[room]), b"token")
        assert np.array_equal(d.pool.pages[6 * i : 6 * i + len(local[room])], p.pool.pages[local[room]])
        progress = [event.pages for event in d.received().of(room) if isinstance(event, RoomProgress)]
        assert progress == sorted(progress)
    eventually(lambda: p.sender.stats().rooms == 0)
    assert len(p.sent.find(WritesDone)) == 16
    assert p.sent.find(WriteFailed) == []


def test_notices_nobody_waits_for_are_dropped_and_counted(
    sender_node: Callable[..., LocalNode], receiver_node: Callable[..., NodeProcess]
) -> None:
    p, d = sender_node(4096), receiver_node(4096)
    p.agent.add_peer(*d.introduction)
    unknown, forgotten, short, good = (RoomKey.new(0) for _ in range(4))
    d.ask("expect", forgotten, range(4))
    d.ask("forget", forgotten)
    d.ask("expect", short, range(3))
    d.ask("expect", good, range(2))
    for room, count in ((unknown, 4), (forgotten, 4), (short, 4), (good, 2)):
        p.sender.open(room, d.identity, range(count), always)
        p.sender.send(room, 0, range(count), b"")
    p.agent.notify(d.identity, b"not a notice")
    completed(d, good)
    assert d.received().of(short) == [RoomBroken(short, "4 pages came, 3 were expected")]
    assert d.received().of(unknown) == d.received().of(forgotten) == []
    eventually(lambda: (stats := d.ask("receiver_stats")).late == 2 and stats.malformed == 1)
    assert d.ask("receiver_stats").rooms == 0


@pytest.mark.parametrize("environment", [{}, TCP], ids=["default", "tcp"])
def test_bytes_in_progress_are_bounded(
    sender_node: Callable[..., LocalNode], receiver_node: Callable[..., NodeProcess], environment: dict[str, str]
) -> None:
    page_bytes, window_pages = 65536, 12
    p = sender_node(page_bytes, batch_bytes=4 * page_bytes, window_bytes=window_pages * page_bytes)
    d = receiver_node(page_bytes, environment=environment)
    p.agent.add_peer(*d.introduction)
    first, room = RoomKey.new(0), RoomKey.new(0)
    for key, pages in ((first, range(1)), (room, range(1, PAGES))):
        d.ask("expect", key, pages)
        p.sender.open(key, d.identity, pages, always)
    p.sender.send(first, 0, [0], b"")
    completed(d, first)
    with d.stopped():  # no write can end
        p.sender.send(room, 0, range(1, PAGES), b"")
        eventually(lambda: p.sender.stats().bytes_in_progress == window_pages * page_bytes)
        landed = (d.pool.pages == p.pool.pages).all(axis=1)
        assert landed.sum() <= 1 + window_pages
    completed(d, room)
    assert np.array_equal(d.pool.pages, p.pool.pages)


def test_without_a_lease_nothing_is_posted(
    sender_node: Callable[..., LocalNode], receiver_node: Callable[..., NodeProcess]
) -> None:
    p, d = sender_node(4096, batch_bytes=4096), receiver_node(4096)
    p.agent.add_peer(*d.introduction)
    room = RoomKey.new(0)
    answers = iter([True, True, False])
    p.sender.open(room, d.identity, range(10), lambda: next(answers))
    p.sender.send(room, 0, range(10), b"")
    eventually(lambda: bool(p.sent.find(Quiesced)))
    assert p.sent.find(WriteFailed) == [WriteFailed(room, "this node's lease ran out")]
    assert p.sent.find(WritesDone) == []
    assert p.sender.stats().writes_posted == 2
    assert not d.pool.pages[2:].any()


def test_a_thread_that_ended_is_seen(tmp_path: Path) -> None:
    class Careless(LocalNode):
        def on_sent(self, event: object) -> None:
            raise RuntimeError("not for me")

    node = Careless(NodeIdentity.new("p"), FilePool(tmp_path / "pool", 4, 4096))
    node.start_sender()
    room = RoomKey.new(0)
    node.sender.open(room, node.identity, range(4), always)
    node.sender.cancel(room)
    eventually(lambda: node.sender.failure is not None)
    eventually(lambda: not node.sender.stats().alive)
    assert node.sender.close()
    assert node.agent.close()


def test_closing_ends_every_room(sender_node: Callable[..., LocalNode]) -> None:
    p = sender_node(4096)
    room = RoomKey.new(0)
    p.sender.open(room, NodeIdentity.new("d"), range(4), always)
    assert p.sender.close()
    assert p.sender.close()
    assert p.sent == [Quiesced(room)]


def test_a_room_for_an_unknown_peer_fails(sender_node: Callable[..., LocalNode]) -> None:
    p = sender_node(4096)
    room, nobody = RoomKey.new(0), NodeIdentity("d", "nobody")
    p.sender.open(room, nobody, range(4), always)
    p.sender.send(room, 0, range(4), b"")
    eventually(lambda: len(p.sent) == 2)
    assert p.sent == [WriteFailed(room, "no transfer peer d:nobody"), Quiesced(room)]
