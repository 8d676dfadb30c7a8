"""Two bootstraps and nodes that are attached to both, over links that a test can cut or stall one by one."""

from __future__ import annotations

from pathlib import Path

from kvrelay.v1.admin_pb2 import LiveRequest
from tests.faults.harness import FaultyCluster
from tests.faults.proxy import Proxy
from tests.helpers.cluster import assert_eventually

__all__ = ["PHASES", "Doors", "hold", "let_go", "reach"]

# Of each phase: the nodes that can keep a request in it, the point at which they do, and hits that pass before that.
PHASES = {
    "queued": ("decode", "report.Grant", 0),
    "reserved": ("prefill", "command.Granted", 0),
    "prefilling": ("prefill", "forwarded", 0),
    "transferring": ("prefill", "post.last", 0),
    "decoding": ("decode", "forward", 4),
}


def hold(nodes: FaultyCluster, phase: str, seconds: float = 1.5) -> None:
    """Let the next request that comes to this phase stay there for a while."""
    role, point, after = PHASES[phase]
    for name in nodes.processes:
        if name.startswith(role):
            nodes.arm(name, point, "delay", after=after, seconds=seconds)


def reach(door: FaultyCluster, phase: str, nodes: FaultyCluster | None = None) -> LiveRequest:
    """Wait until a request of a bootstrap is in this phase and one is held there; no other will be.

    nodes: what owns the nodes, if not the bootstrap's own cluster.
    """
    role, point, _ = PHASES[phase]
    nodes = nodes or door
    holders = [name for name in nodes.processes if name.startswith(role)]
    found: list[LiveRequest] = []

    def there() -> bool:
        found[:] = [request for request in door.live() if request.state == phase]
        return bool(found) and any(nodes.tripped(name, point) for name in holders)

    assert_eventually(there, f"a request is {phase}")
    for name in holders:
        nodes.disarm(name)
    return found[0]


def let_go(nodes: FaultyCluster) -> None:
    """End all holds before their time."""
    for name in nodes.processes:
        nodes.release(name)


class Doors:
    """`first` owns the processes of all nodes, `second` only its bootstrap's."""

    def __init__(self, directory: Path, model: Path):
        self.first = FaultyCluster(directory / "first", str(model))
        self.second = FaultyCluster(directory / "second", str(model))
        self.both = (self.first, self.second)
        self.links: dict[tuple[str, int], Proxy] = {}

    def start(self, role: str, name: str, *flags: str) -> None:
        """Start both bootstraps, or a node of both; after that, `first` can restart the node."""
        if role == "bootstrap":
            for door in self.both:
                door.start(role, name, *flags)
        else:
            links = [self.links.setdefault((name, door.port), Proxy(door.address)) for door in self.both]
            self.first.start(role, name, *flags, "--bootstrap", ",".join(link.address for link in links))

    def link(self, name: str, door: FaultyCluster) -> Proxy:
        """Between a node and a bootstrap."""
        return self.links[name, door.port]

    def wait_serving(self, prefill: int, decode: int, unified: int = 0) -> None:
        for door in self.both:
            door.wait_serving(prefill, decode, unified)

    def check_after(self) -> None:
        for door in self.both:
            door.check_after()

    def close(self) -> None:
        """May be called twice."""
        for door in self.both:
            door.close()
        for link in self.links.values():
            link.close()
