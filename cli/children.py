"""Child processes of `kvrelay up` and `demo`: started, read, and never left behind.

A child ends with its parent in each of these cases:

    Ctrl-C, SIGTERM              Interrupts makes it a KeyboardInterrupt, and the cluster stops its children in order
    terminal closed (SIGHUP)     the same; under nohup, which has SIGHUP ignored, nothing happens
    terminal or pipe not read    `show.say` goes on without it; an answer that cannot be written stops the cluster
    SIGKILL, a crash             the kernel sends the children SIGTERM (Linux)
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType

__all__ = ["Child", "Interrupts"]

_TAIL_LINES = 20
_LAST_LINES_S = 5.0
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Interrupts:
    """While entered: the first SIGINT, SIGTERM or SIGHUP is a KeyboardInterrupt, unless `quiet`; all are counted."""

    def __init__(self) -> None:
        self.count = 0
        self.quiet = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else started by nohup, to outlive its terminal
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # whatever was there before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self.count:
            return  # the kernel and the shell both send one when a terminal closes: that is no impatience
        self.count += 1
        if self.count == 1 and not self.quiet:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put a KeyboardInterrupt off to the end of the block."""
        self.quiet = True
        yield
        self.quiet = False
        if self.count:
            raise KeyboardInterrupt


def _end_with_parent() -> Callable[[], None] | None:
    """What a child calls before it becomes the command: SIGTERM when the thread that started it ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: a forked child should do as little as it can
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One process, its last lines, and a thread that reads them. Start it from the main thread: it ends with that."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]):
        self.name = name
        self.reported = False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reader = threading.Thread(target=self._read, name=f"{name} log", daemon=True)
        self._echo: Callable[[str], None] = lambda line: None

    def follow(self, echo: Callable[[str], None]) -> None:
        """Read what the process says, giving each line to `echo`. Only once all have been started: forking and
        threads do not go together.
        """
        self._echo = echo
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._tail.append(line.rstrip())
                self._echo(f"{self.name} | {line.rstrip()}")

    def last_lines(self) -> list[str]:
        """Of a process that has ended."""
        self._reader.join(timeout=_LAST_LINES_S)
        return list(self._tail)
