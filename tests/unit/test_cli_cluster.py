"""Starting, watching and stopping child processes: small scripts, but real processes and real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.cluster import Plan, claim_address, plan_cluster
from engine.core.errors import ConfigError

ROOT = Path(__file__).parents[2]

# A bootstrap that lists two serving nodes. SIGTERM ends it with 0.
BOOTSTRAP = """
import signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, types_pb2
class Admin(admin_pb2_grpc.AdminServicer):
    def ListNodes(self, request, context):
        names = ("prefill-0", "decode-0")
        nodes = [admin_pb2.Node(node_id=n, stats=types_pb2.NodeStats(serving=True)) for n in names]
        return admin_pb2.ListNodesResponse(nodes=nodes)
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: (print("bootstrap stops", flush=True), over.set()))
server = grpc.server(ThreadPoolExecutor(2))
admin_pb2_grpc.add_AdminServicer_to_server(Admin(), server)
server.add_insecure_port(sys.argv[1])
server.start()
over.wait()
server.stop(0).wait()
"""

# A node that drains for a moment when told to; a second SIGTERM makes it leave at once.
NODE = """
import signal, sys, threading
signals, told = [], threading.Event()
def on_signal(*_):
    signals.append(1)
    print(sys.argv[1], "told", len(signals), flush=True)
    told.set()
signal.signal(signal.SIGTERM, on_signal)
print(sys.argv[1], "runs", flush=True)
told.wait()
if sys.argv[2] == "slow":
    told.clear()
    told.wait()
print(sys.argv[1], "leaves", flush=True)
"""

# What `kvrelay up` does, with a plan of such children.
UP = """
import dataclasses, sys
from cli.cluster import Cluster, Interrupts, Plan
from engine.core.errors import KVRelayError
from engine.core.node_config import NodeConfig
commands, patience = eval(sys.argv[2]), float(sys.argv[3])
env = dict(__import__("os").environ)
roles = {name: name.split("-")[0] for name in commands}
plan = Plan(sys.argv[1], NodeConfig(drain_timeout=patience), commands, roles, env)
with Interrupts() as interrupts:
    cluster = Cluster(plan, interrupts)
    try:
        with cluster:
            cluster.start(20)
            print("serving", flush=True)
            cluster.watch()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except KVRelayError as error:
        print(error, flush=True)
print("orderly" if cluster.orderly else "disorderly", flush=True)
"""


class Up:
    """The parent process: what it says, line by line."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()

    def wait_for(self, *lines: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: set(lines) <= set(self.lines), timeout=20), self.lines

    def ended(self) -> list[str]:
        assert self.process.wait(timeout=20) == 0
        self._reader.join()
        return self.lines

    def pid(self, name: str) -> int:
        (line,) = [line for line in self.lines if line.startswith("started")]
        names, ids = line.removeprefix("started ").removesuffix(")").split(" (process ids ")
        return int(dict(zip(names.split(", "), ids.split(", "), strict=True))[name])


@contextlib.contextmanager
def started(prefill: str = NODE, how: str = "quick", patience: float = 20) -> Iterator[Up]:
    address = claim_address("127.0.0.1:0")
    commands = {
        "bootstrap": (sys.executable, "-c", BOOTSTRAP, address),
        "prefill-0": (sys.executable, "-c", prefill, "prefill-0", how),
        "decode-0": (sys.executable, "-c", NODE, "decode-0", "quick"),
    }
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "proto", "kernels"))}
    command = [sys.executable, "-c", UP, address, repr(commands), str(patience)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        up = Up(process)
        try:
            yield up
        finally:
            process.terminate()
            up.ended()


def serving(up: Up) -> None:
    up.wait_for("serving", "prefill-0 | prefill-0 runs", "decode-0 | decode-0 runs")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nodes_leave_before_the_bootstrap(number: signal.Signals) -> None:
    with started() as up:
        serving(up)
        up.process.send_signal(number)
        lines = up.ended()
    assert lines[-2:] == ["interrupted", "orderly"]
    leaving = [line for line in lines if line.endswith(("leaves", "stops"))]
    assert sorted(leaving[:2]) == ["decode-0 | decode-0 leaves", "prefill-0 | prefill-0 leaves"]
    assert leaving[2:] == ["bootstrap | bootstrap stops"]


def test_second_signal_is_passed_on() -> None:
    with started(how="slow") as up:
        serving(up)
        up.process.send_signal(signal.SIGINT)
        up.wait_for("prefill-0 | prefill-0 told 1", "decode-0 | decode-0 leaves")
        up.process.send_signal(signal.SIGINT)
        lines = up.ended()
    assert "prefill-0 | prefill-0 told 2" in lines
    assert lines[-2:] == ["interrupted", "orderly"]


STUBBORN = """
import signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("prefill-0 runs", flush=True)
threading.Event().wait()
"""


def test_deadline_kills_what_does_not_leave() -> None:
    with started(prefill=STUBBORN, patience=-4.5) as up:  # half a second in all
        serving(up)
        up.process.send_signal(signal.SIGINT)
        lines = up.ended()
    assert "prefill-0 did not leave in time and is killed" in lines
    assert lines[-1] == "disorderly"


def test_death_of_a_needed_child_ends_the_cluster() -> None:
    with started() as up:
        serving(up)
        os.kill(up.pid("prefill-0"), signal.SIGKILL)
        lines = up.ended()
    assert "  prefill-0 | prefill-0 runs" in lines  # its last words again, where one looks for them
    assert lines[-2:] == ["prefill-0 ended with SIGKILL", "disorderly"]


def test_child_that_fails_to_start_is_reported() -> None:
    with started(prefill="raise SystemExit('no such model')") as up:
        lines = up.ended()
    assert "  prefill-0 | no such model" in lines
    assert lines[-2:] == ["prefill-0 ended with exit code 1", "disorderly"]


def planned(env: dict[str, str], **flags: object) -> Plan:
    return plan_cluster(2, 1, "127.0.0.1:7070", flags, env)


def test_plan_gives_every_child_its_options() -> None:
    plan = planned({"KVRELAY_LISTEN": "0.0.0.0:1", "KVRELAY_CHUNK_SIZE": "64"}, page_size="32", max_running="4")
    assert list(plan.commands) == ["bootstrap", "prefill-0", "prefill-1", "decode-0"]
    decode, prefill = " ".join(plan.commands["decode-0"]), " ".join(plan.commands["prefill-1"])
    assert "--listen 127.0.0.1:0 --bootstrap 127.0.0.1:7070" in decode
    assert "--node-id decode-0" in decode
    assert "--page-size=32" in decode
    assert "--max-running=4" in decode
    assert "--max-running" not in prefill
    assert "--listen 127.0.0.1:7070" in " ".join(plan.commands["bootstrap"])


def test_threads_are_the_cores_shared_out() -> None:
    cores = len(os.sched_getaffinity(0))
    assert planned({}).env["OMP_NUM_THREADS"] == str(max(1, cores // 3))
    assert planned({}, threads="5").env["OMP_NUM_THREADS"] == "5"
    given = planned({"OMP_NUM_THREADS": "7"})
    assert given.env["OMP_NUM_THREADS"] == "7"
    assert not any("--threads" in word for word in given.commands["decode-0"])


def test_mistakes_are_found_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="page-size"):
        planned({}, page_size="none")


def test_address_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        claim_address(f"127.0.0.1:{taken.getsockname()[1]}")
    for wrong in ("nowhere", "127.0.0.1:x", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="--address"):
            claim_address(wrong)
