"""`kvrelay up`: a cluster of child processes on this machine.

    prepare the model ─► start bootstrap and nodes ─► wait until all serve ─► watch
                                                                               │
    exit ◄─ stop bootstrap ◄─ nodes have drained, or their deadline passed ◄─ Ctrl-C, SIGTERM, or a death that matters

Children are in sessions of their own, so Ctrl-C reaches this process only and the order of leaving is ours. A second
Ctrl-C tells the nodes to leave without finishing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

from bootstrap.config import BootstrapConfig
from cli.client import Client
from cli.services import prepare_model
from cli.show import SIGN_OF_LIFE_S, Waiting, say
from decode_service.config import DecodeConfig
from engine.core.config import add_arguments, load, option_names
from engine.core.errors import ConfigError, DeadlineExceeded, KVRelayError, Unavailable
from engine.core.node_config import NodeConfig
from engine.core.types import Role
from kvrelay.v1 import admin_pb2
from prefill_service.config import PrefillConfig

__all__ = ["Cluster", "Interrupts", "Plan", "claim_address", "plan_cluster", "up"]

_POLL_S = 0.1
_TAIL_LINES = 20
_LEAVE_S = 5.0  # on top of a drain deadline, and for what has nothing left to drain
_BOOTSTRAP = "bootstrap"
_CONFIGS: dict[str, type] = {_BOOTSTRAP: BootstrapConfig, Role.PREFILL: PrefillConfig, Role.DECODE: DecodeConfig}
_DECIDED_HERE = ("bootstrap", "node_id", "listen", "metrics_listen")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start."""

    address: str  # of the bootstrap service
    node: NodeConfig  # what all nodes share
    commands: Mapping[str, tuple[str, ...]]  # by the child's name
    roles: Mapping[str, str]  # by the child's name
    env: Mapping[str, str]


def plan_cluster(prefill: int, decode: int, address: str, flags: Mapping[str, object], env: Mapping[str, str]) -> Plan:
    """Work out every child's command. `flags` are options of any service. Raises ConfigError for all mistakes."""
    loaded = load(PrefillConfig, file=None, env=env, flags=flags)
    load(DecodeConfig, file=None, env=env, flags=flags)
    load(BootstrapConfig, file=None, env=env, flags=flags)
    threads = loaded.node.threads
    if threads is None and "OMP_NUM_THREADS" not in env:
        threads = max(1, len(os.sched_getaffinity(0)) // (prefill + decode))
    if threads is not None:
        flags = {**flags, "threads": threads}
        env = {**env, "OMP_NUM_THREADS": str(threads)}
    roles: dict[str, str] = {_BOOTSTRAP: _BOOTSTRAP}
    roles |= {f"prefill-{i}": Role.PREFILL for i in range(prefill)}
    roles |= {f"decode-{i}": Role.DECODE for i in range(decode)}
    commands = {}
    for name, role in roles.items():
        own = ["--listen", address] if role == _BOOTSTRAP else ["--listen", "127.0.0.1:0", "--bootstrap", address]
        own += ["--metrics-listen", "127.0.0.1:0"] + ([] if role == _BOOTSTRAP else ["--node-id", name])
        # -P: a folder `engine` where the user stands is not ours.
        commands[name] = (sys.executable, "-P", "-m", "cli.main", role, *own, *_as_flags(_CONFIGS[role], flags))
    return Plan(address, loaded.node, commands, roles, env)


def _as_flags(config: type, options: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for name in option_names(config):
        if name in options and name not in _DECIDED_HERE:
            flag, value = name.replace("_", "-"), options[name]
            words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}={value}"]
    return words


def claim_address(listen: str) -> str:
    """`listen` with port 0 replaced by a free one. Raises ConfigError when something listens there already.

    Asked before anything is started: nodes of a second cluster must never attach to a first one.
    """
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what lingers of an earlier cluster is fine
            probe.bind((host.strip("[]"), int(port)))
            return f"{host}:{probe.getsockname()[1]}"
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError([f"--address: cannot listen on {listen!r}: {error}"]) from error


class Interrupts:
    """While entered: the first SIGINT or SIGTERM is a KeyboardInterrupt, unless `quiet`; all are counted."""

    def __init__(self) -> None:
        self.count = 0
        self.quiet = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # whatever was there before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
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


class _Child:
    """One process, its last lines, and a thread that reads them."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], echo: Callable[[str], None]):
        self.name = name
        self.reported = False
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._echo = echo
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"{name} log", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.tail.append(line.rstrip())
                self._echo(f"{self.name} | {line.rstrip()}")

    def last_lines(self) -> list[str]:
        """Of a process that has ended."""
        self._reader.join(timeout=_LEAVE_S)
        return list(self.tail)


class Cluster:
    """The children of a plan. Leaving the context stops them in order, whatever happened."""

    def __init__(self, plan: Plan, interrupts: Interrupts, quiet: bool = False):
        self.plan = plan
        self._interrupts = interrupts
        self._echo: Callable[[str], None] = (lambda line: None) if quiet else say
        self._children: dict[str, _Child] = {}
        self.orderly = True  # no child failed or had to be killed

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._interrupts.quiet = True
        if any(child.alive for child in self._children.values()):
            say("stopping (Ctrl-C: without finishing what runs)")
        self._stop()

    def start(self, timeout: float) -> None:
        """Start every process and wait until all serve.

        Raises Unavailable when a process ends, DeadlineExceeded after `timeout` seconds of waiting.
        """
        with self._interrupts.held():  # else a process could be started and not yet be known
            for name, command in self.plan.commands.items():
                self._children[name] = _Child(name, command, self.plan.env, self._echo)
        say(f"started {', '.join(self._children)} (process ids {', '.join(self._pids())})")
        began = time.monotonic()
        missing, said, said_at = list(self._children), "", began
        with Client(self.plan.address) as client:
            while missing:
                for child in self._children.values():
                    if not child.alive:
                        raise self._death(child)
                now = time.monotonic()
                line = f"waiting for {', '.join(missing)}"
                if line != said or now - said_at >= SIGN_OF_LIFE_S:
                    say(f"  {line}: {now - began:.0f} s")
                    said, said_at = line, now
                if now - began > timeout:
                    raise DeadlineExceeded(f"{', '.join(missing)} not serving after {timeout:g} s", phase="start")
                time.sleep(_POLL_S)
                missing = self._missing(client)

    def watch(self) -> None:
        """Return never: ends by KeyboardInterrupt, or raises Unavailable when a process that is needed has ended."""
        while True:
            for child in self._children.values():
                if child.alive or child.reported:
                    continue
                error = self._death(child)
                role = self.plan.roles[child.name]
                if not any(self._children[name].alive for name, other in self.plan.roles.items() if other == role):
                    raise error
                say(f"{error}; the others go on")
            time.sleep(_POLL_S)

    def _pids(self) -> list[str]:
        return [str(child.process.pid) for child in self._children.values()]

    def _missing(self, client: Client) -> list[str]:
        """Names of the children that do not serve yet."""
        try:
            with client.errors():
                listing = client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=2.0)
        except KVRelayError:
            return list(self._children)
        serving = {node.node_id for node in listing.nodes if node.stats.serving} | {_BOOTSTRAP}
        return [name for name in self._children if name not in serving]

    def _death(self, child: _Child) -> Unavailable:
        """Report a process that has ended, with its last lines unless it simply left."""
        child.reported = True
        code = child.process.wait()
        if code == 0:
            return Unavailable(f"{child.name} has left")
        self.orderly = False
        for line in child.last_lines():
            say(f"  {child.name} | {line}")
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        return Unavailable(f"{child.name} ended with {how}")

    # ---- stopping ----

    def _stop(self) -> None:
        nodes = [child for name, child in self._children.items() if self.plan.roles[name] != _BOOTSTRAP]
        self._end(nodes, self.plan.node.drain_timeout + _LEAVE_S)
        self._end([child for child in self._children.values() if child not in nodes], 3 * _LEAVE_S)

    def _end(self, children: list[_Child], patience: float) -> None:
        """SIGTERM, wait, SIGKILL. Another signal to us is passed on: it makes a node leave at once."""
        children = [child for child in children if child.alive]
        if not children:
            return
        deadline = time.monotonic() + patience
        passed_on = self._interrupts.count
        for child in children:
            child.process.terminate()
        with Waiting("stopping", lambda: f", {', '.join(child.name for child in children if child.alive)} left"):
            while any(child.alive for child in children) and time.monotonic() < deadline:
                if self._interrupts.count > passed_on:
                    passed_on = self._interrupts.count
                    deadline = min(deadline, time.monotonic() + _LEAVE_S)
                    for child in children:
                        child.process.terminate()  # does nothing to one that has ended
                time.sleep(_POLL_S)
        for child in children:
            if child.alive:
                say(f"{child.name} did not leave in time and is killed")
                child.process.kill()
                child.process.wait()
                self.orderly = False
            elif child.process.returncode not in (0, -signal.SIGTERM):  # the latter: it was still starting
                say(str(self._death(child)))


# ---- the command ----


def up(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay up`."""
    parser.add_argument("--prefill", type=_count, default=1, metavar="N", help="prefill nodes (default: 1)")
    parser.add_argument("--decode", type=_count, default=1, metavar="N", help="decode nodes (default: 1)")
    text = "host:port for clients and nodes; port 0 picks one (default: 127.0.0.1:7070)"
    parser.add_argument("--address", default="127.0.0.1:7070", metavar="HOST:PORT", help=text)
    text = "give up when not all serve after so long (default: 300)"
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="SECONDS", help=text)
    parser.add_argument("--quiet", action="store_true", help="do not show the log lines of the processes")
    seen = set(_DECIDED_HERE)
    for config in _CONFIGS.values():
        add_arguments(parser, config, skip=seen)
        seen |= set(option_names(config))
    parser.set_defaults(run=_up)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _up(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    plan = plan_cluster(flags.prefill, flags.decode, claim_address(flags.address), vars(flags), env)
    serving = False
    with Interrupts() as interrupts:
        cluster = Cluster(plan, interrupts, flags.quiet)
        try:
            prepare_model(plan.node.model, plan.node.model_dir)
            with cluster:
                cluster.start(flags.start_timeout)
                serving = True
                print(f"serving {plan.node.model} at {plan.address}", flush=True)
                say(f'try: kvrelay chat --bootstrap {plan.address} "Why is the sky blue?"; Ctrl-C stops the cluster')
                cluster.watch()
        except KeyboardInterrupt:
            if not serving:
                raise
    say("stopped")
    return 0 if cluster.orderly else 1
