"""A process that has imported torch and all that stands on it once, and forks `kvrelay` commands from there.

Importing takes seconds of a core a process, forking takes milliseconds; tests start many processes. The
forge makes no thread, no agent and no channel of its own, so that a forked command finds what a new one would. All it
has forked dies with it.

    test ──{"argv": …}──► forge ──fork──► command, as the `kvrelay` program runs it
         ◄──{"pid": …}───
         ──{"poll": pid}─►      (only the parent of a process learns its exit code)
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["POINTS_VARIABLE", "Forge", "Forged", "forge"]

POINTS_VARIABLE = "TEST_POINTS_SOCKET"  # path of the socket on which a process takes its faults; unset: none
POLL_S = 0.01
ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1
COMMANDS = (
    "bootstrap.server",
    "cli.services",
    "decode_service.server",
    "prefill_service.server",
    "tests.faults.points",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "unified_service.server",
)


class Forged:
    """A forked command. The part of subprocess.Popen that tests use."""

    def __init__(self, forge: Forge, pid: int):
        self._forge = forge
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forge.ask(poll=self.pid)["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:  # else its id may be another's by now
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forge:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.forge", str(theirs.fileno())],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._socket, self._lines = ours, ours.makefile("r")
        self._lock = threading.Lock()

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Forged:
        """Run `kvrelay argv` with just this environment; what it prints is appended to `log`."""
        return Forged(self, self.ask(argv=list(argv), environment=dict(environment), log=str(log))["pid"])

    def ask(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._lines.readline()
        assert line, "the forge has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the forge, and with it every process it has forked."""
        self._lines.close()
        self._socket.close()
        self._process.wait(30)


@functools.cache
def forge() -> Forge:
    """The one of this test session."""
    made = Forge()
    atexit.register(made.close)
    return made


def _serve(channel: socket.socket) -> None:
    """Fork and answer until the other end is closed."""
    with channel, channel.makefile("r") as lines:
        for line in lines:
            request = json.loads(line)
            if "argv" in request:
                pid = os.fork()
                if not pid:
                    lines.close()
                    channel.close()
                    _become(request["argv"], request["environment"], request["log"])
                _codes.pop(pid, None)
                answer: dict[str, int | None] = {"pid": pid}
            else:
                answer = {"code": _ended(request["poll"])}
            channel.sendall(json.dumps(answer).encode() + b"\n")


_codes: dict[int, int] = {}  # of forked commands that have ended


def _ended(pid: int) -> int | None:
    """Its exit code; None while it runs."""
    if pid not in _codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        _codes[pid] = os.waitstatus_to_exitcode(status)  # two threads may ask for it
    return _codes[pid]


def _become(argv: list[str], environment: dict[str, str], log: str) -> None:
    """Run a command in this fresh fork. Never returns."""
    code = 70
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.clear()
        os.environ.update(environment)
        random.seed()  # else all forks would draw the same numbers
        sys.argv = ["kvrelay", *argv]
        if points := environment.get(POINTS_VARIABLE):
            from tests.faults.points import install

            install(Path(points))
        from cli.main import main

        code = main(argv)
    except SystemExit as error:  # wrong usage
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _load() -> None:
    """Import what commands import, whatever their role."""
    for name in COMMANDS:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked safely"


if __name__ == "__main__":
    _load()
    _serve(socket.socket(fileno=int(sys.argv[1])))
