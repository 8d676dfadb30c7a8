"""Two bootstraps and nodes that are attached to both, over links that a test can cut or stall one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvrelay.v1.admin_pb2 import LiveRequest
from tests.faults.forge import Forge
from tests.faults.harness import FAST_LEASE, FaultyCluster
from tests.faults.proxy import Proxy
from tests.helpers.cluster import assert_eventually

__all__ = ["PHASES", "Doors", "doors", "hold", "reach"]

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
    """Wait until a request of a bootstrap is in this phase; none is held from then on.

    nodes: what owns the nodes, if not the bootstrap's own cluster.
    """
    found: list[LiveRequest] = []

    def there() -> bool:
        found[:] = [request for request in door.live() if request.state == phase]
        return bool(found)

    assert_eventually(there, f"a request is {phase}")
    nodes = nodes or door
    for name in nodes.processes:
        if name.startswith(PHASES[phase][0]):
            nodes.disarm(name)
    return found[0]


class Doors:
    """`first` owns the processes of all nodes, `second` only its bootstrap's."""

    def __init__(self, directory: Path, model: Path, forge: Forge, bootstrap_flags: Sequence[str] = FAST_LEASE):
        for name in ("first", "second"):
            (directory / name).mkdir(parents=True)
        self.first = FaultyCluster(directory / "first", str(model), forge=forge)
        self.second = FaultyCluster(directory / "second", str(model), forge=forge)
        self.both = (self.first, self.second)
        self.links: dict[tuple[str, int], Proxy] = {}
        for door in self.both:
            door.start("bootstrap", "bootstrap", *bootstrap_flags)

    def start_node(self, role: str, name: str, *flags: str) -> None:
        """Start a node; after that, `first` can restart it."""
        links = [self.links.setdefault((name, door.port), Proxy(door.address)) for door in self.both]
        self.first.start(role, name, *flags, "--bootstrap", ",".join(link.address for link in links))

    def link(self, name: str, door: FaultyCluster) -> Proxy:
        """Between a node and a bootstrap."""
        return self.links[name, door.port]

    def wait_serving(self, prefill: int, decode: int) -> None:
        for door in self.both:
            door.wait_serving(prefill, decode)

    def check_after(self) -> None:
        for door in self.both:
            door.check_after()

    def close(self) -> None:
        """May be called twice."""
        for door in self.both:
            door.close()
        for link in self.links.values():
            link.close()


@contextmanager
def doors(
    directory: Path,
    model: Path,
    forge: Forge,
    *,
    prefill: int = 2,
    decode: int = 2,
    node_flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    bootstrap_flags: Sequence[str] = FAST_LEASE,
) -> Iterator[Doors]:
    """Both bootstraps, serving; stopped at the end whatever happens."""
    made = Doors(directory, model, forge, bootstrap_flags)
    try:
        for role, count, flags in (("prefill", prefill, prefill_flags), ("decode", decode, ())):
            for i in range(count):
                made.start_node(role, f"{role}-{i}", *node_flags, *flags)
        made.wait_serving(prefill, decode)
        yield made
    finally:
        made.close()
