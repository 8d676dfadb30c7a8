"""A TCP proxy on loopback between a node or a client and a bootstrap: cut, stalled, slowed and healed at will.

cut    connections are closed both ways, and new ones as soon as they are made
stall  connections stay open and nothing moves, as behind a router that drops packets; new ones look the same
delay  every byte takes that much longer, in order
heal   all of that is over; what a stall has held up moves on
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["Proxy"]

CHUNK_BYTES = 65536
ANSWER_S = 10.0  # of the proxy's own thread
T = TypeVar("T")


class Proxy:
    """Forwards `address` to `target` (host:port), which need not be there yet. For `with`, or to be closed."""

    def __init__(self, target: str):
        self.target = target
        self._cut = False
        self._delay = 0.0
        self._loop = asyncio.new_event_loop()
        self._moving = asyncio.Event()
        self._moving.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._connections)

    def cut(self) -> None:
        async def cut() -> None:
            self._cut = True
            await self._drop()

        self._do(cut())

    def stall(self) -> None:
        self._loop.call_soon_threadsafe(self._moving.clear)

    def delay(self, seconds: float) -> None:
        self._delay = seconds

    def heal(self) -> None:
        self._cut, self._delay = False, 0.0
        self._loop.call_soon_threadsafe(self._moving.set)

    def close(self) -> None:
        """May be called twice."""
        if self._loop.is_closed():
            return

        async def close() -> None:
            self._server.close()
            await self._drop()

        self._do(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        self._loop.close()

    def _do(self, task: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result(ANSWER_S)

    # ---- the proxy's thread ----

    async def _drop(self) -> None:
        connections = tuple(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        ends = [writer]
        try:
            await self._moving.wait()
            if not self._cut:
                host, _, port = self.target.rpartition(":")
                their_reader, their_writer = await asyncio.open_connection(host, int(port))
                ends.append(their_writer)
                await self._forward(asyncio.create_task(self._pump(reader, their_writer)), their_reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the target is not there, or this is cut: either way the connection is over
        finally:
            self._connections.discard(task)
            for end in ends:
                end.transport.abort()

    async def _forward(
        self, there: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Both ways, until either end closes."""
        back = asyncio.create_task(self._pump(reader, writer))
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One way: a reader that stamps what comes in, and a writer that lets each piece go when it is due."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)

        async def read() -> None:
            while data := await reader.read(CHUNK_BYTES):
                await waiting.put((self._loop.time() + self._delay, data))
            await waiting.put((0.0, b""))

        reading = asyncio.create_task(read())
        try:
            with contextlib.suppress(OSError):
                while True:
                    due, data = await waiting.get()
                    await asyncio.sleep(due - self._loop.time())
                    await self._moving.wait()
                    if not data:
                        return
                    writer.write(data)
                    await writer.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
