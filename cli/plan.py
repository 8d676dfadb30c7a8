"""What `kvrelay up` and `demo` start: the command of every child, checked before any is started."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootstrap.config import BootstrapConfig
from cli.services import CONFIGS, load_service, ranks_of
from engine.core.access import BootstrapAccess, ClientAccess, find_key
from engine.core.config import MAX_PORT, option_names
from engine.core.errors import ConfigError
from engine.core.node_config import NodeConfig
from engine.core.types import Role
from rpc.node import rank_ids

__all__ = ["BOOTSTRAP", "DECIDED_HERE", "Plan", "claim_addresses", "invitation", "plan_cluster"]

BOOTSTRAP = "bootstrap"
DECIDED_HERE = ("bootstrap", "node_id", "listen", "metrics_listen")
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # of addresses that stand for all of this machine


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start."""

    addresses: tuple[str, ...]  # of the bootstrap services
    metrics: tuple[str, ...]  # host:port of their Prometheus endpoints
    node: NodeConfig  # what all nodes share
    commands: Mapping[str, tuple[str, ...]]  # by the child's name
    roles: Mapping[str, str]  # by the child's name
    env: Mapping[str, str]
    ranks: int = 1  # of each prefill node
    access: ClientAccess = field(default_factory=ClientAccess)  # how to ask the bootstrap services

    @property
    def bootstraps(self) -> str:
        """The value of `--bootstrap`."""
        return ",".join(self.addresses)

    def node_ids(self, name: str) -> tuple[str, ...]:
        """What a child is called in the cluster."""
        return rank_ids(name, self.ranks if self.roles[name] == Role.PREFILL else 1)


def plan_cluster(
    nodes: Mapping[Role, int],
    listen: Sequence[str],
    flags: Mapping[str, object],
    env: Mapping[str, str],
    file: Path | None = None,
    metrics: str = "127.0.0.1:0",
) -> Plan:
    """Work out every child's command. `nodes`: how many of each role. `listen`: where each bootstrap service shall.
    `flags` are options of any service, and of clients. `metrics`: where the first bootstrap service shows its own.

    Raises ConfigError for all mistakes.
    """
    _refuse_strays((*nodes, BOOTSTRAP), flags)
    configs: list[Any] = [load_service(CONFIGS[role], file, env, flags) for role in nodes]
    bootstrap = load_service(BootstrapConfig, file, env, {**flags, "listen": listen[0]})  # they differ by port only
    access = load_service(ClientAccess, file, env, flags)
    _check_key(bootstrap.access, access)
    addresses = tuple(map(_dialled, listen))
    node: NodeConfig = configs[0].node
    threads = node.threads
    ranks = max(map(ranks_of, configs))
    if threads is None and "OMP_NUM_THREADS" not in env:
        engines = sum(count * (ranks if role is Role.PREFILL else 1) for role, count in nodes.items())
        threads = max(1, len(os.sched_getaffinity(0)) // engines)
    if threads is not None:
        flags = {**flags, "threads": threads}
        env = {**env, "OMP_NUM_THREADS": str(threads)}
    ports = claim_addresses(metrics, len(listen), "--metrics-address")
    if both := sorted({*listen} & {*ports}):
        raise ConfigError([f"--metrics-address: {', '.join(both)} is one of the bootstrap's own addresses"])
    names = [BOOTSTRAP] if len(listen) == 1 else [f"{BOOTSTRAP}-{i}" for i in range(len(listen))]
    places = {name: (at, port) for name, at, port in zip(names, listen, ports, strict=True)}
    roles: dict[str, str] = dict.fromkeys(names, BOOTSTRAP)
    roles |= {f"{role}-{i}": role for role, count in nodes.items() for i in range(count)}
    commands = {}
    for name, role in roles.items():
        at, port = places.get(name, ("127.0.0.1:0", "127.0.0.1:0"))
        own = ["--listen", at, "--metrics-listen", port]
        own += [] if role == BOOTSTRAP else ["--bootstrap", ",".join(addresses), "--node-id", name]
        own += [f"--config={file.absolute()}"] if file else []
        # -P: a folder `engine` where the user stands is not ours.
        commands[name] = (sys.executable, "-P", "-m", "cli.main", role, *own, *_as_flags(CONFIGS[role], flags))
    return Plan(addresses, ports, node, commands, roles, env, ranks, access)


def _check_key(bootstrap: BootstrapAccess, client: ClientAccess) -> None:
    """Raise ConfigError when the bootstrap would not tell us of its nodes."""
    if keys := bootstrap.keys():
        key = find_key(keys, client.api_key or "")
        if key is None or not key.admin:
            wanted = "`kvrelay up` asks for the state of the nodes, so it needs an admin key of the API keys"
            raise ConfigError([f"KVRELAY_API_KEY or --api-key-file: {wanted}"])


def _dialled(listen: str) -> str:
    """Where to reach what listens there."""
    host, _, port = listen.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def _refuse_strays(roles: Collection[str], flags: Mapping[str, object]) -> None:
    """Raise ConfigError for options that none of these services has."""
    theirs = {name for role in roles for name in option_names(CONFIGS[role])}
    strays = {
        name: " and ".join(role for role, config in CONFIGS.items() if name in option_names(config))
        for name in sorted(
            {name for config in CONFIGS.values() for name in option_names(config)} & flags.keys() - theirs
        )
    }
    if strays:
        raise ConfigError(
            [f"--{name.replace('_', '-')}: an option of {of} nodes, and none is started" for name, of in strays.items()]
        )


def _as_flags(config: type, options: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for name in option_names(config):
        if name in options and name not in DECIDED_HERE:
            flag, value = name.replace("_", "-"), options[name]
            words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}={value}"]
    return words


def claim_addresses(listen: str, count: int = 1, flag: str = "--address") -> tuple[str, ...]:
    """`count` addresses: `listen`, and then the next ports; a port of 0 becomes free ones. Raises ConfigError when
    something listens at one already, naming `flag`.

    Asked before anything is started: nodes of a second cluster must never attach to a first one.
    """
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where = repr(listen) if count == 1 else f"{count} ports from {listen!r} on"
    claimed: list[str] = []
    try:
        with contextlib.ExitStack() as probes:
            for i in range(count):
                at = int(port) and int(port) + i
                probe = probes.enter_context(socket.socket(family))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what lingers of an earlier one is fine
                probe.bind((host.strip("[]"), at))
                claimed.append(f"{host}:{probe.getsockname()[1]}")
    except (ValueError, OverflowError) as error:
        limit = f"host:port, a port of 0 to {MAX_PORT}"
        raise ConfigError([f"{flag}: cannot listen on {where}; allowed: {limit}"]) from error
    except OSError as error:
        hint = f"; {flag} 127.0.0.1:0 picks a free port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError([f"{flag}: cannot listen on {where}: {error}{hint}"]) from error
    return tuple(claimed)


def invitation(plan: Plan) -> str:
    """A command that asks the cluster something, as a shell takes it from where we stand."""
    access, tls = plan.access, plan.access.tls
    files = {"ca": tls.tls_ca, "cert": tls.tls_cert, "key": tls.tls_key}
    flags = [f"--tls-{name}={path}" for name, path in files.items() if path is not None]
    flags += [f"--api-key-file={access.api_key_file}"] if access.api_key_file else []
    command = shlex.join(["kvrelay", "chat", "--bootstrap", plan.bootstraps, *flags])
    secret = "KVRELAY_API_KEY=… " if access.api_key and access.api_key_file is None else ""
    return f'{secret}{command} "Why is the sky blue?"'
