"""A cluster of real processes for tests: one bootstrap, any number of nodes of each role, on loopback.

Its processes are forked from one that has imported all they need (forge.py), or, where a test wants them `cold`,
started as a user would start them. Logs go to files in the test's directory and are shown when something does not come
up. `settle` is what every test ends with: all pages free or cached, all books in order.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc

from engine.core.model_store import default_cache_dir, resolve
from engine.device.prepare import prepare
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2
from tests.helpers.forge import forge

__all__ = ["Answer", "Cluster", "Popen", "Process", "assert_eventually", "cluster", "free_port", "serving"]

START_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 20.0
# A bootstrap that starts, or comes back, is found at once: gRPC would try again after a second.
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def assert_eventually(condition: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
    """Wait until `condition()` holds; fail naming `what` when it does not in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.02)


@dataclass
class Answer:
    """One whole stream, taken apart."""

    started: generation_pb2.Started
    token_ids: list[int]
    indices: list[int]
    text: str
    logprobs: list[float]
    finished: generation_pb2.Finished

    @classmethod
    def collect(cls, stream: Iterator[generation_pb2.GenerateResponse]) -> Answer:
        """Read a stream to its end, checking the order of its messages on the way."""
        first = next(stream)
        assert first.HasField("started"), "the first message says what was started"
        answer = cls(first.started, [], [], "", [], generation_pb2.Finished())
        for message in stream:
            if message.HasField("delta"):
                delta = message.delta
                assert not answer.finished.reason, "nothing comes after finished"
                answer.indices += range(delta.index, delta.index + len(delta.token_ids))
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.logprobs
                answer.text += delta.text
            else:
                answer.finished = message.finished
                answer.text += message.finished.text
        assert answer.finished.reason, "the last message says why it finished"
        assert answer.indices == list(range(len(answer.indices))), "every index once, in order"
        return answer


class Popen(Protocol):
    """What is used of a subprocess.Popen, so that processes may also be started in other ways."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@dataclass
class Process:
    name: str
    popen: Popen
    log: Path

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Cluster:
    directory: Path
    model: str
    port: int = field(default_factory=free_port)
    processes: dict[str, Process] = field(default_factory=dict)
    cold: bool = False  # start its processes as new ones; seconds each
    environment: dict[str, str] = field(default_factory=dict)  # of its processes, besides the usual

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self.cold:  # else each process would start one that does it, or waits for it
            prepare(resolve(self.model), default_cache_dir())
        self.address = f"127.0.0.1:{self.port}"
        self.channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.generation = generation_pb2_grpc.GenerationStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)

    def start(self, role: str, name: str, *flags: str) -> Process:
        log = self.directory / f"{name}.log"
        address = (
            ["--listen", self.address] if role == "bootstrap" else ["--bootstrap", self.address, "--node-id", name]
        )
        popen = self.launch(name, [role, *address, "--model", self.model, *flags], log)
        self.processes[name] = process = Process(name, popen, log)
        return process

    def launch(self, name: str, argv: Sequence[str], log: Path) -> Popen:
        """Run `kvrelay argv`."""
        environment = self.environment_of(name)
        if not self.cold:
            return forge().spawn(argv, environment, log)
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "cli.main", *argv], stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def environment_of(self, name: str) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | self.environment

    def wait_serving(self, prefill: int, decode: int, unified: int = 0) -> None:
        """Until so many nodes of each role serve. Fails at once when a process has died."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            for process in self.processes.values():
                code = process.popen.poll()
                assert code is None, f"{process.name} ended with {code}:\n{process.tail()}"
            try:
                state = self.generation.GetCluster(generation_pb2.GetClusterRequest(), timeout=2)
                wanted = (prefill, decode, unified)
                serving = (state.prefill_nodes, state.decode_nodes, state.unified_nodes)
                if all(there >= needed for there, needed in zip(serving, wanted, strict=True)):
                    return
            except grpc.RpcError:
                pass
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {p.name}\n{p.tail()}" for p in self.processes.values())
                raise AssertionError(f"not serving within {START_TIMEOUT_S:g} s\n{tails}")
            time.sleep(0.02)

    def generate(
        self,
        prompt: Sequence[int] | str,
        *,
        max_new_tokens: int | None = 16,
        timeout: float = 120.0,
        sampling: types_pb2.Sampling | None = None,
        stopping: types_pb2.Stopping | None = None,
        response: generation_pb2.ResponseOptions | None = None,
        **fields: Any,
    ) -> Answer:
        """One request, read to its end. Unless told otherwise it is greedy and goes on past the end of sequence."""
        request = self.request(prompt, max_new_tokens, sampling, stopping, response, **fields)
        return Answer.collect(self.generation.Generate(request, timeout=timeout))

    @staticmethod
    def request(
        prompt: Sequence[int] | str,
        max_new_tokens: int | None = 16,
        sampling: types_pb2.Sampling | None = None,
        stopping: types_pb2.Stopping | None = None,
        response: generation_pb2.ResponseOptions | None = None,
        **fields: Any,
    ) -> generation_pb2.GenerateRequest:
        request = generation_pb2.GenerateRequest(
            sampling=sampling or types_pb2.Sampling(temperature=0.0),
            stopping=stopping or types_pb2.Stopping(max_new_tokens=max_new_tokens, ignore_eos=True),
            response=response,
            **fields,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return request

    def nodes(self, inspect: bool = False) -> list[admin_pb2.Node]:
        return list(self.admin.ListNodes(admin_pb2.ListNodesRequest(inspect=inspect), timeout=20).nodes)

    def live(self) -> list[admin_pb2.LiveRequest]:
        return list(self.admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=20).requests)

    def settle(self) -> None:
        """Assert that, once nothing is going on, every page of every node is free or cached and all books are right."""
        why = ""

        def settled() -> bool:
            nonlocal why
            reply = self.admin.ListNodes(admin_pb2.ListNodesRequest(inspect=True), timeout=20)
            problems = [f"{node.node_id}: {problem}" for node in reply.nodes for problem in node.problems]
            assert not problems, problems
            busy = [
                f"{node.node_id}: {node.stats}"
                for node in reply.nodes
                if node.stats.pages_free + node.stats.pages_cached != node.stats.pages_total
                or node.stats.ungranted + node.stats.waiting + node.stats.running + node.stats.transferring
                or node.stats.retracted
            ]
            why = f"live {reply.live_requests}, queued {reply.queued_requests}, {busy}"
            return not busy and not reply.live_requests and not reply.queued_requests

        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while not settled():
            assert time.monotonic() < deadline, f"pages or requests are left: {why}"
            time.sleep(0.02)

    def stop(self, name: str, sig: signal.Signals = signal.SIGTERM, timeout: float = 60.0) -> int:
        """Signal one process and wait for it; returns its exit code."""
        process = self.processes.pop(name)
        process.popen.send_signal(sig)
        return process.popen.wait(timeout)

    def close(self) -> None:
        """Stop everything, nodes first; kill what does not go."""
        self.channel.close()
        order = sorted(self.processes.values(), key=lambda process: process.name == "bootstrap")
        for process in order:
            process.popen.terminate()
        for process in order:
            try:
                process.popen.wait(15)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()


class Startable(Protocol):
    """A cluster, or several that share their nodes."""

    def start(self, role: str, name: str, *flags: str) -> object: ...
    def wait_serving(self, prefill: int, decode: int, unified: int = 0) -> None: ...
    def close(self) -> None: ...


S = TypeVar("S", bound=Startable)


@contextmanager
def serving(
    made: S,
    *,
    prefill: int = 1,
    decode: int = 1,
    unified: int = 0,
    node_flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    bootstrap_flags: Sequence[str] = (),
) -> Iterator[S]:
    """Start a bootstrap and so many nodes, unified ones alone if there are any, and wait until they serve.

    Stopped at the end whatever happens.
    """
    if unified:
        prefill = decode = 0
    try:
        made.start("bootstrap", "bootstrap", *bootstrap_flags)
        pools = (("prefill", prefill, prefill_flags), ("decode", decode, decode_flags), ("unified", unified, ()))
        for role, count, flags in pools:
            for i in range(count):
                made.start(role, f"{role}-{i}", *node_flags, *flags)
        made.wait_serving(prefill, decode, unified)
        yield made
    finally:
        made.close()


def cluster(directory: Path, model: str | Path, *, cold: bool = False, **pools: Any) -> AbstractContextManager[Cluster]:
    """A serving cluster; `pools` are the nodes and flags that `serving` takes."""
    return serving(Cluster(directory, str(model), cold=cold), **pools)
