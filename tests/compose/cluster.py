"""A cluster of containers of a real engine, driven as its users drive it: by the compose command and by gRPC."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cli.client import Client, finish_reason
from engine.core.errors import KVRelayError
from kvrelay.v1 import generation_pb2, types_pb2
from kvrelay.v1.admin_pb2 import ListNodesRequest, Node

__all__ = ["Cluster", "Load", "eventually"]

ROOT = Path(__file__).resolve().parents[2]
OFFLINE_BASE = "kvrelay-base:latest"  # what scripts/docker-engine.sh makes where no registry is reached
STOP_GRACE_S = 130  # stop_grace_period in compose.yaml; `docker stop` does not know it from every compose version
POLL_S = 0.2


def eventually(what: str, condition: Callable[[], bool], within: float = 120.0) -> None:
    """Wait until `condition` holds; AssertionError naming `what` when it does not within so many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(POLL_S)


def run(*command: str, env: dict[str, str] | None = None, within: float = 120.0) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=within)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Cluster:
    """One compose project of its own name and port, so that it can run beside any other."""

    def __init__(self) -> None:
        assert shutil.which("docker"), "no docker command: see scripts/docker-engine.sh"
        run("docker", "info")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.project = f"kvrelay-test-{os.getpid()}"
        self.address = f"127.0.0.1:{port}"
        self._compose = _compose_command()
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")} | {
            "COMPOSE_PROJECT_NAME": self.project,
            "KVRELAY_IMAGE": "kvrelay:compose-test",
            "KVRELAY_PORT": str(port),
        }
        if "BASE_IMAGE" not in self._env and run("docker", "image", "ls", "-q", OFFLINE_BASE):
            self._env["BASE_IMAGE"] = OFFLINE_BASE

    def compose(self, *arguments: str, within: float = 120.0) -> str:
        return run(*self._compose, *arguments, env=self._env, within=within)

    def build(self) -> None:
        self.compose("build", "bootstrap", within=900)  # all services run the one image

    def up(self, *, prefill: int, decode: int) -> None:
        """Bring each pool to so many containers, and wait until that many nodes serve."""
        scale = ("--scale", f"prefill={prefill}", "--scale", f"decode={decode}")
        self.compose("up", "-d", "--no-build", *scale, within=300)
        self.wait_for(prefill=prefill, decode=decode)

    def down(self) -> None:
        self.compose("down", "-v", "--remove-orphans", within=300)

    def wait_for(self, *, prefill: int, decode: int) -> None:
        wanted = sorted([types_pb2.ROLE_PREFILL] * prefill + [types_pb2.ROLE_DECODE] * decode)
        eventually(
            f"{prefill} prefill and {decode} decode nodes serve",
            lambda: sorted(node.role for node in self.nodes() if node.stats.serving) == wanted,
        )

    def nodes(self) -> list[Node]:
        with Client(self.address) as client, client.errors():
            return list(client.admin.ListNodes(ListNodesRequest(), timeout=30).nodes)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def stop_container(self, container: str) -> int:
        """Stop one container of a pool, which compose's own `stop` cannot; returns its exit code."""
        run("docker", "stop", "-t", str(STOP_GRACE_S), container, within=STOP_GRACE_S + 30)
        return int(run("docker", "inspect", "-f", "{{.State.ExitCode}}", container))

    def left_behind(self) -> list[str]:
        """Containers, networks and volumes of this project."""
        label = f"label=com.docker.compose.project={self.project}"
        listings = (("container", "ls", "-a"), ("network", "ls"), ("volume", "ls"))
        return [
            f"{kind} {name}"
            for kind, *command in listings
            for name in run("docker", kind, *command, "-q", "--filter", label).split()
        ]

    def kvrelay(self, *arguments: str) -> str:
        """What the command of this environment, outside the containers, prints."""
        return run(str(Path(sys.executable).with_name("kvrelay")), *arguments, "--bootstrap", self.address)

    def client(self, *arguments: str) -> str:
        """What the command prints in a container of its own."""
        return self.compose("run", "--rm", "-T", "client", *arguments)

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "100")


def _compose_command() -> tuple[str, ...]:
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ("docker", "compose")
    assert shutil.which("docker-compose"), "no compose command: see scripts/docker-engine.sh"
    return ("docker-compose",)


class Load:
    """Clients that send one request after another, each with a prompt of its own, while inside
    `running()`; one whose request fails stops.
    """

    def __init__(self, address: str, clients: int = 4):
        self.answered = 0
        self.failures: list[str] = []
        self._address = address
        self._clients = clients
        self._stop = threading.Event()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        """Every request sent has ended when this is left; raises AssertionError if one failed."""
        threads = [threading.Thread(target=self._send, args=(i,)) for i in range(self._clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        assert not self.failures, f"{len(self.failures)} failed, {self.answered} were answered: {self.failures}"

    def wait_for_more(self, count: int) -> None:
        """Wait until so many more requests have been answered."""
        goal = self.answered + count
        eventually(f"{goal} answers", lambda: self.answered >= goal or bool(self.failures))

    def _send(self, number: int) -> None:
        turn = 0
        with Client(self._address) as client:
            while not self._stop.is_set():
                turn += 1
                failure = self._ask(client, f"Client {number}, question {turn}. " + "Tell me about the sea. " * 20)
                if failure:
                    self.failures.append(failure)
                    return
                with self._lock:
                    self.answered += 1

    @staticmethod
    def _ask(client: Client, prompt: str) -> str:
        """Why the request failed; empty when it did not."""
        request = generation_pb2.GenerateRequest(text=prompt)
        request.stopping.max_new_tokens = 8
        request.stopping.ignore_eos = True
        try:
            answer = client.answer(request, show=lambda _: None, deadline=120.0)
        except KVRelayError as error:
            return f"{error.code}: {error}"
        made, reason = answer.finished.usage.output_tokens, finish_reason(answer.finished)
        return "" if made == 8 and reason == "length" else f"{made} tokens, finish reason {reason}"
