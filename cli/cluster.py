"""`kvrelay up`: a cluster of child processes on this machine.

    prepare the model ─► start bootstrap and nodes ─► wait until all serve ─► watch
                                                                               │
    exit ◄─ stop bootstrap ◄─ nodes have drained, or their deadline passed ◄─ Ctrl-C, SIGTERM, SIGHUP, or a pool empty

Children are in sessions of their own, so Ctrl-C reaches this process only and the order of leaving is ours. A second
Ctrl-C tells the nodes to leave without finishing. Nodes started by hand may join: a pool is empty when the bootstrap
has no node of it, whoever started it.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

from cli.children import Child, Interrupts
from cli.client import ROLES, Client
from cli.plan import BOOTSTRAP, DECIDED_HERE, Plan, claim_addresses, invitation, plan_cluster
from cli.services import CONFIGS, add_config_file, config_file, prepare_model
from cli.show import SIGN_OF_LIFE_S, Waiting, say
from engine.core.access import ClientAccess
from engine.core.config import add_arguments, option_names
from engine.core.errors import ConfigError, DeadlineExceeded, KVRelayError, Unavailable
from engine.core.types import Role
from kvrelay.v1 import admin_pb2

__all__ = ["Cluster", "Interrupts", "up"]

_POLL_S = 0.1
_ASK_S = 1.0  # between questions to the bootstrap, once they are needed
_LEAVE_S = 5.0  # on top of a drain deadline, and for what has nothing left to drain


class Cluster:
    """The children of a plan. Leaving the context stops them in order, whatever happened."""

    def __init__(self, plan: Plan, interrupts: Interrupts, quiet: bool = False, farewell: str = "stopping"):
        """`farewell` is said before children that run are stopped."""
        self.plan = plan
        self._interrupts = interrupts
        self._echo: Callable[[str], None] = (lambda line: None) if quiet else say
        self._farewell = farewell
        self._children: dict[str, Child] = {}
        self._incarnations: set[str] = set()  # of our nodes, once all serve
        self._served_by_others: set[str] = set()  # pools of which that has been said
        self.orderly = True  # no child failed or had to be killed

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._interrupts.quiet = True
        try:
            if any(child.alive for child in self._children.values()):
                say(self._farewell)
        finally:
            self._stop()

    def start(self, timeout: float) -> None:
        """Start every process and wait until all serve.

        Raises Unavailable when a process ends, DeadlineExceeded after `timeout` seconds of waiting.
        """
        with self._interrupts.held():  # else a process could be started and not yet be known
            for name, command in self.plan.commands.items():
                self._children[name] = Child(name, command, self.plan.env)
            for child in self._children.values():
                child.follow(self._echo)
        say(f"started {', '.join(self._children)} (process ids {', '.join(self._pids())})")
        began = time.monotonic()
        missing, said, said_at = list(self._children), "", began
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(one, self.plan.access)) for one in self.plan.addresses]
            while missing:
                with self._interrupts.held():  # as in `watch`
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
                missing = self._missing(clients)

    def watch(self) -> None:
        """Return never: ends by KeyboardInterrupt, or raises Unavailable when the bootstrap or a whole pool is gone."""
        without: dict[str, Unavailable] = {}  # pools in which no child of ours is left, and how the last one ended
        while True:
            with self._interrupts.held():  # a Popen.poll that is interrupted may never again find its child ended
                self._look_after_children(without)
                self._look_after_pools(without)
            time.sleep(_ASK_S if without else _POLL_S)

    def _look_after_children(self, without: dict[str, Unavailable]) -> None:
        for child in self._children.values():
            if child.alive or child.reported:
                continue
            error = self._death(child)
            role = self.plan.roles[child.name]
            if any(self._children[name].alive for name, other in self.plan.roles.items() if other == role):
                say(f"{error}; the others go on")
            elif role == BOOTSTRAP:
                raise error
            else:
                without[role] = error

    def _look_after_pools(self, without: Mapping[str, Unavailable]) -> None:
        for role, error in without.items():
            others = self._others(role)
            if others == []:
                raise Unavailable(f"{error}, and no {role} node is left")
            if others and role not in self._served_by_others:
                self._served_by_others.add(role)
                say(f"{error}; {', '.join(others)} goes on")

    def _others(self, role: str) -> list[str] | None:
        """Nodes of a role that somebody else started; None when no bootstrap says."""
        for address in self.plan.addresses:
            try:
                with Client(address, self.plan.access) as client:
                    nodes = _nodes(client)
            except KVRelayError:
                continue
            others = [node for node in nodes if node.incarnation not in self._incarnations]
            return [node.node_id for node in others if ROLES.get(node.role) == role]
        return None

    def _pids(self) -> list[str]:
        return [str(child.process.pid) for child in self._children.values()]

    def _missing(self, clients: Sequence[Client]) -> list[str]:
        """Names of the children that do not serve yet, each at every bootstrap."""
        ours = {name: self.plan.node_ids(name) for name, role in self.plan.roles.items() if role != BOOTSTRAP}
        missing: set[str] = set()
        for client in clients:
            try:
                nodes = _nodes(client)
            except KVRelayError:
                return list(self._children)
            serving = {node.node_id: node.incarnation for node in nodes if node.stats.serving}
            self._incarnations = {serving[one] for ids in ours.values() for one in ids if one in serving}
            missing |= {name for name, ids in ours.items() if not serving.keys() >= set(ids)}
        return [name for name in ours if name in missing]

    def _death(self, child: Child) -> Unavailable:
        """Report a process that has ended, with its last lines unless it simply left."""
        child.reported = True
        code = child.process.wait()
        if code == 0:
            return Unavailable(f"{child.name} has left")
        self.orderly = False
        if lines := child.last_lines():
            say(f"last lines of {child.name}:")
        for line in lines:
            say(f"  {child.name} | {line}")
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        return Unavailable(f"{child.name} ended with {how}")

    # ---- stopping ----

    def _stop(self) -> None:
        """Bootstraps first: they take nothing new, and leave when what they had is answered. Nodes are at rest then."""
        doors = [child for name, child in self._children.items() if self.plan.roles[name] == BOOTSTRAP]
        patience = self.plan.node.drain_timeout + 3 * _LEAVE_S
        self._end(doors, patience)
        self._end([child for child in self._children.values() if child not in doors], patience)

    def _end(self, children: list[Child], patience: float) -> None:
        """SIGTERM, wait, SIGKILL. Another signal to us is passed on: it makes a node leave at once."""
        children = [child for child in children if child.alive]
        if not children:
            return
        deadline = time.monotonic() + patience
        passed_on = self._interrupts.count
        for child in children:
            child.process.terminate()
        with Waiting(
            "stopping", lambda: f", still running: {', '.join(child.name for child in children if child.alive)}"
        ):
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


def _nodes(client: Client) -> list[admin_pb2.Node]:
    with client.errors():
        return list(client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=2.0).nodes)


# ---- the command ----


def up(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay up`."""
    parser.add_argument("--prefill", type=_count, metavar="N", help="prefill nodes (default: 1)")
    parser.add_argument("--decode", type=_count, metavar="N", help="decode nodes (default: 1)")
    text = "unified nodes, which do both, instead of prefill and decode nodes"
    parser.add_argument("--unified", type=_count, metavar="N", help=text)
    text = "bootstrap services, at the next ports: when one dies, answers go on at another (default: 1)"
    parser.add_argument("--bootstraps", type=_count, default=1, metavar="N", help=text)
    text = "host:port for clients and nodes; port 0 picks one (default: 127.0.0.1:7070)"
    parser.add_argument("--address", default="127.0.0.1:7070", metavar="HOST:PORT", help=text)
    text = "host:port of the bootstrap's Prometheus endpoint, which shows the nodes too (default: a free port)"
    parser.add_argument("--metrics-address", default="127.0.0.1:0", metavar="HOST:PORT", help=text)
    text = "give up when not all serve after so long (default: 300)"
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="SECONDS", help=text)
    parser.add_argument("--quiet", action="store_true", help="do not show the log lines of the processes")
    add_config_file(parser, f"TOML file of options of any service; {', '.join(DECIDED_HERE)} in it are not used")
    text = "torch threads of each engine (default: OMP_NUM_THREADS, or the cores shared out among the engines)"
    parser.add_argument("--threads", default=argparse.SUPPRESS, metavar="N", help=text)
    seen = {*DECIDED_HERE, "threads"}
    for config in (*CONFIGS.values(), ClientAccess):
        add_arguments(parser, config, skip=seen)
        seen |= set(option_names(config))
    parser.set_defaults(run=_up)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _nodes_wanted(flags: argparse.Namespace) -> Mapping[Role, int]:
    """How many of each role. Raises ConfigError for a mixture that no cluster can be."""
    if flags.unified is None:
        return {Role.PREFILL: flags.prefill or 1, Role.DECODE: flags.decode or 1}
    if flags.prefill is None and flags.decode is None:
        return {Role.UNIFIED: flags.unified}
    both = "a cluster is made of unified nodes, or of prefill and decode nodes, and never of both"
    raise ConfigError([f"--unified goes with neither --prefill nor --decode: {both}"])


def _up(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    file = config_file(flags, env)
    listen = claim_addresses(flags.address, flags.bootstraps)
    plan = plan_cluster(_nodes_wanted(flags), listen, vars(flags), env, file, flags.metrics_address)
    farewell = "stopping, finishing what runs (Ctrl-C again: at once)"
    serving = False
    with Interrupts() as interrupts:
        cluster = Cluster(plan, interrupts, flags.quiet, farewell)
        try:
            prepare_model(plan.node.model, plan.node.model_dir)
            with cluster:
                cluster.start(flags.start_timeout)
                serving = True
                print(f"serving {plan.node.model} at {plan.bootstraps}", flush=True)
                say(f"metrics: {', '.join(f'http://{at}/metrics' for at in plan.metrics)}")
                say(f"try: {invitation(plan)}; Ctrl-C stops the cluster")
                cluster.watch()
        except KeyboardInterrupt:
            if not serving:
                raise
    say("stopped")
    return 0 if cluster.orderly else 1
