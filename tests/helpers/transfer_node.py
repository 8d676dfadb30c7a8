"""Nodes with a page pool and a NIXL agent, in this process or in one of their own that tests may kill or stop.

Pools lie in files that both the test and the node map, so a test sees what landed even in a stopped or dead node.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.types import NodeIdentity, PoolMemory, RoomKey
from engine.device.page_checksum import page_checksums
from transfer.agent import TransferAgent
from transfer.page_stream import SenderEvent
from transfer.receiver import PageReceiver, ReceiverEvent
from transfer.sender import PageSender

__all__ = ["Events", "FaultyPool", "FilePool", "LocalNode", "NodeProcess", "eventually"]

DEADLINE_S = 15.0
# A server that has loaded NIXL once makes each further process start in a tenth of the time.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def eventually(condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
    """Wait until a condition holds; fail the test when it does not within the time."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.002)


class Events(list[Any]):
    """What a sender or receiver reported, in order."""

    def of(self, room: RoomKey) -> list[Any]:
        return [event for event in self if getattr(event, "room", None) == room]

    def find(self, kind: type) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]


class FilePool:
    """Pages in a mapped file: `pages` is ``[num_pages, page_bytes]`` bytes."""

    def __init__(self, path: Path, num_pages: int, page_bytes: int):
        with path.open("a+b") as file:
            file.truncate(num_pages * page_bytes)
            self._map = mmap.mmap(file.fileno(), num_pages * page_bytes)
        self.pages: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8).reshape(num_pages, page_bytes)

    @property
    def memory(self) -> PoolMemory:
        num_pages, page_bytes = self.pages.shape
        return PoolMemory(self.pages.ctypes.data, page_bytes, num_pages)

    def checksums(self, pages: Sequence[int]) -> tuple[int, ...]:
        return page_checksums(torch.from_numpy(self.pages), pages)


class FaultyPool(FilePool):
    """One bit of the page named `faulty` flips once, just before or just after its checksum is computed."""

    faulty: int | None = None
    before = False

    def flip(self, pages: Sequence[int]) -> None:
        if self.faulty in pages:
            self.pages[self.faulty, self.pages.shape[1] // 2] ^= 4
            self.faulty = None

    def checksums(self, pages: Sequence[int]) -> tuple[int, ...]:
        if self.before:
            self.flip(pages)
        found = super().checksums(pages)
        self.flip(pages)
        return found


class LocalNode:
    """Agent, sender and receiver over one pool. Sender and receiver run once `start` is called.

    checksum: send them; those that come are always checked.
    """

    def __init__(self, identity: NodeIdentity, pool: FilePool, *, checksum: bool = False, **sender_options: Any):
        self.identity = identity
        self.pool = pool
        self.agent = TransferAgent(identity, pool.memory)
        self.sent: Events = Events()
        self.received: Events = Events()
        checksums = pool.checksums if checksum else None
        self.sender = PageSender(self.agent, self.on_sent, checksums=checksums, **sender_options)
        self.receiver = PageReceiver(self.agent, self.on_received, pool.checksums)

    def on_sent(self, event: SenderEvent) -> None:
        self.sent.append(event)

    def on_received(self, event: ReceiverEvent) -> None:
        self.received.append(event)

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        self.agent.close()
        assert self.sender.failure is None
        assert self.receiver.failure is None

    # ---- what a test may ask of a node in another process ----

    def introduction(self) -> tuple[NodeIdentity, bytes, PoolMemory]:
        return self.identity, self.agent.metadata, self.agent.memory

    def add_peer(self, introduction: tuple[NodeIdentity, bytes, PoolMemory]) -> None:
        self.agent.add_peer(*introduction)

    def start_receiver(self) -> None:
        self.receiver.start()

    def start_sender(self) -> None:
        self.sender.start()

    def expect(self, room: RoomKey, pages: Sequence[int]) -> None:
        self.receiver.expect(room, pages)

    def forget(self, room: RoomKey) -> None:
        self.receiver.forget(room)

    def send_all(self, room: RoomKey, peer: NodeIdentity, pages: int) -> None:
        """Our pages 0… to the same pages of the peer."""
        self.sender.open(room, peer, range(pages), lambda: True)
        self.sender.send(room, 0, range(pages), b"")

    def received_events(self) -> Events:
        return Events(self.received)

    def receiver_stats(self) -> Any:
        return self.receiver.stats()

    def active_writes(self) -> int:
        return self.agent.stats().active_writes

    def close_agent(self) -> bool:
        self.receiver.close()
        self.sender.close(timeout_s=0.1)
        return self.agent.close()

    def break_connections(self) -> int:
        """Shut every TCP connection of this process down, as a failing network would. Returns how many."""
        broken = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as connection:
                if connection.family == socket.AF_INET and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)
                    broken += 1
        return broken


def _serve(
    commands: Connection,
    environment: dict[str, str],
    identity: NodeIdentity,
    path: Path,
    shape: tuple[int, int],
    checksum: bool,
) -> None:
    os.environ.update(environment)
    node = LocalNode(identity, FilePool(path, *shape), checksum=checksum)
    while True:
        try:
            name, arguments = commands.recv()
        except EOFError:  # the test is over
            os._exit(0)
        if name == "exit":
            return
        commands.send(getattr(node, name)(*arguments))


class NodeProcess:
    """A node in a process of its own. `pool` is its pool as this process sees it."""

    def __init__(
        self,
        path: Path,
        num_pages: int,
        page_bytes: int,
        *,
        node_id: str = "d",
        environment: dict[str, str] | None = None,
        checksum: bool = False,
    ):
        self.identity = NodeIdentity.new(node_id)
        self.pool = FilePool(path, num_pages, page_bytes)
        self._commands, theirs = _processes.Pipe()
        arguments = (theirs, environment or {}, self.identity, path, (num_pages, page_bytes), checksum)
        self.process = _processes.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.introduction = self.ask("introduction")

    def ask(self, name: str, *arguments: Any) -> Any:
        self._commands.send((name, arguments))
        assert self._commands.poll(DEADLINE_S), f"no answer to {name}"
        return self._commands.recv()

    def received(self) -> Events:
        events: Events = self.ask("received_events")
        return events

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The process does nothing at all meanwhile."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)

    def exit(self) -> int | None:
        """Let the process end as it likes. Returns its exit code."""
        self._commands.send(("exit", ()))
        self.process.join(DEADLINE_S)
        return self.process.exitcode
