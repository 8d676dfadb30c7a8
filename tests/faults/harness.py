"""A cluster of real processes in which faults are injected at named points, and what must hold when they are over."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.cluster import Cluster, Process, assert_eventually, serving
from tests.helpers.forge import POINTS_VARIABLE

__all__ = ["FAST_LEASE", "LONG_LEASE", "FaultyCluster", "faulty_cluster"]

FAST_LEASE = ("--heartbeat-seconds", "0.2", "--lease-seconds", "1.5")  # of a bootstrap
LONG_LEASE = ("--heartbeat-seconds", "0.2", "--lease-seconds", "10")  # where nobody falls silent, but on a slow machine
FOUND_WRONG = re.compile(r"integrity|critical", re.IGNORECASE)
TRACEBACK = re.compile(r"^Traceback .*\n(?:[ \t].*\n)*(.*)$", re.MULTILINE)  # and the exception at its end


@dataclass
class FaultyCluster(Cluster):
    """Its processes have the points of `tests.faults.points`."""

    sound: bool = field(default=True, kw_only=True)  # the last `check_after` found nothing; for tests that share it
    _flags: dict[str, tuple[str, Sequence[str]]] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)  # bytes of the logs that have been checked

    def environment_of(self, name: str) -> dict[str, str]:
        return super().environment_of(name) | {POINTS_VARIABLE: self._points(name)}

    def start(self, role: str, name: str, *flags: str) -> Process:
        self._flags[name] = role, flags
        return super().start(role, name, *flags)

    def restart(self, name: str) -> Process:
        """Start a process again as it was started first; one that still runs is killed before."""
        if name in self.processes:
            self.kill(name)
        role, flags = self._flags[name]
        return self.start(role, name, *flags)

    @property
    def roles(self) -> dict[str, str]:
        """Of every node that was ever started, by name."""
        return {name: role for name, (role, _) in self._flags.items() if role != "bootstrap"}

    # ---- faults ----

    def arm(
        self, name: str, point: str, action: str, *, after: int = 0, seconds: float = 0.0, times: int | None = 1
    ) -> None:
        """Let `action` happen at a point of a process, once `after` hits have passed, for so many hits (None: all)."""
        self._tell(name, do="arm", point=point, action=action, after=after, seconds=seconds, times=times)

    def disarm(self, name: str) -> None:
        self._tell(name, do="disarm")

    def release(self, name: str) -> None:
        """Let what is delayed in a process go on now."""
        self._tell(name, do="release")

    def cut(self, name: str) -> int:
        """Shut down the connections of a node to its peers; returns how many there were."""
        return int(self._tell(name, do="cut")["cut"])

    def tripped(self, name: str, point: str | None = None) -> bool:
        """Whether a fault has struck since it was armed: the process says so, or is stopped or dead."""
        if self.stopped(name) or self.processes[name].popen.poll() is not None:
            return True
        try:
            struck = self._tell(name, do="ask")
        except (OSError, ValueError):  # it ended or was stopped while it was asked
            return False
        return bool(struck if point is None else struck.get(point))

    def wait_tripped(self, name: str, point: str | None = None, timeout: float = 20.0) -> None:
        assert_eventually(lambda: self.tripped(name, point), f"a fault strikes {name}", timeout)

    def stopped(self, name: str) -> bool:
        try:
            stat = Path(f"/proc/{self.processes[name].popen.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def resume(self, name: str) -> None:
        self.processes[name].popen.send_signal(signal.SIGCONT)

    def kill(self, name: str) -> None:
        """End a process at once, if it has not died by its fault already."""
        process = self.processes.pop(name)
        process.popen.kill()
        code = process.popen.wait(10)
        assert code == -signal.SIGKILL, f"{name} had ended with {code}:\n{process.tail()}"

    def _points(self, name: str) -> str:
        return str(self.directory / f"{name}.points")

    def _tell(self, name: str, **request: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(2.0)
            channel.connect(self._points(name))
            with channel.makefile("rw") as stream:
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                answer: dict[str, Any] = json.loads(stream.readline())
        return answer

    # ---- afterwards ----

    def check_after(self, *, injected: str = "") -> None:
        """Nobody has died, the next request works, every page is free or cached, no log tells of a thing gone wrong.

        injected: a pattern of the exceptions and the lines that the fault is known to leave in a log.
        """
        for process in self.processes.values():
            code = process.popen.poll()
            assert code is None, f"{process.name} ended with {code}:\n{process.tail()}"
        assert len(self.generate([5, 6, 7], max_new_tokens=3).token_ids) == 3
        self.settle()
        for name in self._flags:
            self._check_log(name, injected)
        self.sound = True

    def _check_log(self, name: str, injected: str) -> None:
        """Of what was written since the last check."""
        path = self.directory / f"{name}.log"
        with path.open(errors="replace") as file:
            file.seek(self._read.get(name, 0))
            text = file.read()
            self._read[name] = file.tell()
        wrong = [line for line in text.splitlines() if FOUND_WRONG.search(line)] + TRACEBACK.findall(text)
        wrong = [line for line in wrong if not (injected and re.search(injected, line))]
        assert not wrong, f"log of {name}: {wrong}\n{text[-4000:]}"


def faulty_cluster(
    directory: Path,
    model: Path,
    *,
    prefill: int = 2,
    decode: int = 2,
    bootstrap_flags: Sequence[str] = FAST_LEASE,
    environment: dict[str, str] | None = None,
    **flags: Any,
) -> AbstractContextManager[FaultyCluster]:
    """A serving cluster; the rest as `serving` takes it."""
    made = FaultyCluster(directory, str(model), environment=environment or {})
    return serving(made, prefill=prefill, decode=decode, bootstrap_flags=bootstrap_flags, **flags)
