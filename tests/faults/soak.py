"""Random faults, one upon another, on a cluster under a steady load; every answer is checked as it comes.

    python -m tests.faults.soak --faults 300 --seed 7

Two bootstraps, two prefill and three decode nodes, each node attached to both over a link of its own. Faults overlap,
but of each pool at least one process has none that takes it down, unless the fault is the loss of a pool. A fault at a
point of a process strikes when the load next passes there. In the end all is healed, and what must hold is counted:
wrong tokens, leaked pages, hung requests. Exit code 1 unless all three are 0 and no process died or found its books
wrong by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvrelay.v1 import admin_pb2
from tests.faults.doors import Doors
from tests.faults.harness import FaultyCluster
from tests.faults.load import HANG_S, Ask, Load, Outcome, drive
from tests.faults.proxy import Proxy
from tests.helpers.models import tiny_model

__all__ = ["Tally", "soak"]

CLIENTS = 6
NODES = {"prefill": 2, "decode": 3}
BOOTSTRAP_FLAGS = (
    *("--heartbeat-seconds", "0.2", "--lease-seconds", "1.5", "--queue-timeout", "10", "--grant-timeout", "1"),
    *("--prefill-timeout", "4", "--transfer-timeout", "4", "--token-timeout", "4"),
)
# A decode node runs out of pages under a burst, and a prompt takes several chunks and writes.
NODE_FLAGS = {
    "prefill": ("--page-size", "16", "--num-pages", "128", "--chunk-size", "64", "--kv-checksum"),
    "decode": ("--page-size", "16", "--num-pages", "40", "--reserved-decode-tokens", "16"),
}
EVERY_NODE = ("--write-timeout", "2", "--drain-timeout", "8")
NO_HOST = ("--host-kv-memory", "none")  # one decode node returns what it retracts through prefill, the others do not
# The documented ways for a request to end badly; those after which a client asks again, at the other bootstrap.
TRY_AGAIN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
ALLOWED = TRY_AGAIN | {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL}
MOST_TRIES = 8
PAUSE_S = (0.1, 1.4)  # between faults
RECOVERY_S = 30.0
REATTACH_S = 1.0  # that a process which was stopped is given before it counts as one that works
ROLES = ("bootstrap", "prefill", "decode")
# Control messages, by the role that has their points. A stream loses no message while it lives; what is dropped here
# stands for one that a faulty process took and did nothing about.
LOST = {
    "prefill": ("command.Submit", "command.Granted", "command.Abort", "report.RoomFailed", "report.RoomQuiesced"),
    "decode": ("command.Reserve", "command.Abort", "command.WriterQuiesced", "report.Grant", "report.RoomFailed"),
    "bootstrap": ("on_output", "on_report.Heartbeat", "on_report.Grant", "on_report.RoomQuiesced", "send.Abort"),
}
LATE = {
    "prefill": (*LOST["prefill"], "command.PeerJoined", "command.PeerLeft", "publish.tokens"),
    "decode": (*LOST["decode"], "command.PeerJoined", "command.PeerLeft", "report.RoomFenced", "publish.tokens"),
    "bootstrap": (*LOST["bootstrap"], "send.Submit", "send.Reserve", "send.Granted", "send.WriterQuiesced"),
}
WRITES = {"prefill": ("post", "post.last")}
NOTICES = {"decode": ("notice", "notice.last")}
ENGINES = {"prefill": ("step", "forward"), "decode": ("step", "forward")}
RAISES = {
    "prefill": ("handle.Submit", "handle.Granted", "handle.WritesDone", "forward", "post"),
    "decode": ("handle.Reserve", "handle.RoomComplete", "forward", "forwarded"),
    "bootstrap": ("on_report.Grant", "on_output", "submit", "tick"),
}


@dataclass
class Tally:
    """What has happened."""

    faults: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    retries: int = 0
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # processes that died, or found their books wrong, by themselves

    @property
    def bad(self) -> bool:
        return bool(self.wrong or self.leaked or self.hung or self.broken)

    def lines(self) -> list[str]:
        return [
            f"faults    {self.faults.total()}: " + ", ".join(f"{kind} {n}" for kind, n in self.faults.most_common()),
            f"requests  {self.requests}, tried again {self.retries}",
            "statuses  " + ", ".join(f"{status} {n}" for status, n in self.statuses.most_common()),
            "          (UNAVAILABLE of a front door that was lost: asked again at the other one)",
            *self.wrong,
            *self.leaked,
            *self.hung,
            *self.broken,
            f"wrong tokens {len(self.wrong)}, leaked pages {len(self.leaked)}, hung requests {len(self.hung)}, "
            f"broken processes {len(self.broken)}",
        ]


Key = tuple[int, str]  # of a process: which bootstrap's cluster started it, and its name


class Soak:
    def __init__(self, doors: Doors, load: Load, seed: int):
        self.tally = Tally()
        self._doors = doors
        self._load = load
        self._seed = seed
        self._random = random.Random(seed)
        self._began = time.monotonic()
        self._over = threading.Event()
        self._order = itertools.count()
        self._lock = threading.Lock()  # of the tally
        self._asides: list[threading.Thread] = []  # requests that are part of a fault
        self._busy: set[Key] = set()  # something is wrong with these
        self._down: set[Key] = set()  # and these do no work meanwhile
        self._links: set[Proxy] = set()  # cut, stalled or slow
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # heap of what ends a fault, and when
        self._kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "kill": (5, self._kill),
            "stop": (5, self._stop),
            "lose a pool": (1, self._lose_pool),
            "cut link": (3, lambda: self._link(Proxy.cut)),
            "stall link": (3, lambda: self._link(Proxy.stall)),
            "slow link": (1, lambda: self._link(lambda link: link.delay(0.1))),
            "fail write": (3, lambda: self._at(WRITES, "fail")),
            "slow write": (3, lambda: self._at(WRITES, "slow", seconds=(0.2, 3.0))),
            "corrupt page": (3, lambda: self._at(NOTICES, "corrupt")),
            "drop message": (5, lambda: self._at(LOST, "drop")),
            "drop answers to heartbeats": (1, lambda: self._at({"prefill": ["ack"]}, "drop", times=8)),
            "delay message": (3, lambda: self._at(LATE, "delay", seconds=(0.1, 3.0))),
            "double message": (3, lambda: self._at(LATE, "duplicate")),
            "raise": (3, lambda: self._at(RAISES, "raise")),
            "slow engine": (2, lambda: self._at(ENGINES, "delay", seconds=(0.1, 2.0))),
            "cancel": (4, lambda: self._aside(self._cancel)),
            "deadline": (4, lambda: self._aside(self._hurry)),
            "burst": (2, lambda: self._aside(self._burst)),
            "drain": (3, self._drain),
        }
        self._asks = load.asks(36, new_tokens=(15, 50), sampled=0.3)
        self._long = load.asks(12, new_tokens=(90, 140))

    def run(self, faults: int) -> Tally:
        for ask in (*self._asks, *self._long):
            self._load.learn(self._doors.first, ask)
            self._load.reference(ask)
        clients = [threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        while self.tally.faults.total() < faults:
            self._tend()
            kind = self._random.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])[0]
            if self._kinds[kind][1]():
                self.tally.faults[kind] += 1
                print(f"{self._time():7.1f} s  {self.tally.faults.total():4}  {kind}", flush=True)
                self._tend_for(self._random.uniform(*PAUSE_S))
            else:
                self._tend_for(0.05)
        self._over.set()
        self._end([*clients, *self._asides])
        return self.tally

    def _time(self) -> float:
        return time.monotonic() - self._began

    def _note(self, kind: list[str], what: str) -> None:
        with self._lock:
            kind.append(f"seed {self._seed}, {self._time():.1f} s: {what}")

    # ---- clients ----

    def _client(self, number: int) -> None:
        """Ask one thing after the other; where the status says that it may work elsewhere, again there."""
        draw = random.Random(f"{self._seed}/{number}")
        while not self._over.is_set():
            ask, door = draw.choice(self._asks), draw.randrange(2)
            for _ in range(MOST_TRIES):
                (outcome,) = self._drive(door, [ask], HANG_S)
                if outcome.status not in TRY_AGAIN:
                    break
                with self._lock:
                    self.tally.retries += 1
                door = 1 - door
                time.sleep(draw.uniform(0.05, 0.3))

    def _drive(self, door: int, asks: Sequence[Ask], timeout: float) -> list[Outcome]:
        with drive(self._doors.both[door], asks, self._load, timeout) as running:
            pass
        for one in running.outcomes:
            with self._lock:
                self.tally.requests += 1
                self.tally.statuses["OK" if one.status is None else one.status.name] += 1
            if one.wrong or (one.status is not None and one.status not in ALLOWED):
                self._note(self.tally.wrong, f"{one.wrong or one.status} {one.details}; {one.ask}")
            elif timeout == HANG_S and one.seconds >= timeout:
                self._note(self.tally.hung, f"{one.ask}")
        return running.outcomes

    def _aside(self, run: Callable[[random.Random], None]) -> bool:
        thread = threading.Thread(target=run, args=(random.Random(self._random.random()),), daemon=True)
        thread.start()
        self._asides.append(thread)
        return True

    def _cancel(self, draw: random.Random) -> None:
        call = draw.choice(self._doors.both).generation.Generate(draw.choice(self._long).request(), timeout=HANG_S)
        with contextlib.suppress(grpc.RpcError):
            for _, _ in zip(call, range(draw.randrange(12)), strict=False):
                pass
        call.cancel()

    def _hurry(self, draw: random.Random) -> None:
        self._drive(draw.randrange(2), [draw.choice(self._long)], draw.uniform(0.05, 1.0))

    def _burst(self, draw: random.Random) -> None:
        self._drive(draw.randrange(2), draw.sample(self._long, 10), HANG_S)

    # ---- faults: each says whether it could be done now ----

    def _cluster(self, key: Key) -> FaultyCluster:
        return self._doors.both[key[0]]

    def _of(self, role: str) -> list[Key]:
        if role == "bootstrap":
            return [(0, role), (1, role)]
        return [(0, f"{role}-{i}") for i in range(NODES[role])]

    def _pick(self, role: str, *, takes_down: bool = False) -> Key | None:
        """A process that nothing is wrong with; if it is to be taken down, one that leaves another that works."""
        free = [key for key in self._of(role) if key not in self._busy]
        up = [key for key in self._of(role) if key not in self._down]
        if not free or (takes_down and len(up) < 2):
            return None
        return self._random.choice(free)

    def _take_down(self, roles: Sequence[str]) -> Key | None:
        key = self._pick(self._random.choice(roles), takes_down=True)
        if key is not None:
            self._busy.add(key)
            self._down.add(key)
        return key

    def _kill(self) -> bool:
        key = self._take_down(ROLES)
        if key is None:
            return False
        self._cluster(key).kill(key[1])
        self._later(self._random.uniform(0.0, 1.5), lambda: self._restart(key))
        return True

    def _lose_pool(self) -> bool:
        keys = [key for key in self._of(self._random.choice(ROLES)) if key not in self._busy]
        for key in keys:
            self._busy.add(key)
            self._down.add(key)
            self._cluster(key).kill(key[1])
            self._later(self._random.uniform(0.0, 1.5), lambda key=key: self._restart(key))  # type: ignore[misc]
        return bool(keys)

    def _stop(self) -> bool:
        key = self._take_down(ROLES)
        if key is None:
            return False
        self._signal(key, signal.SIGSTOP)

        def resume() -> None:
            self._signal(key, signal.SIGCONT)
            self._later(REATTACH_S, lambda: self._healthy(key))

        self._later(self._random.uniform(0.1, 4.0), resume)
        return True

    def _signal(self, key: Key, sig: signal.Signals) -> None:
        self._cluster(key).processes[key[1]].popen.send_signal(sig)

    def _drain(self) -> bool:
        key = self._take_down(("prefill", "decode"))
        if key is None:
            return False
        try:
            admin = self._random.choice(self._doors.both).admin
            admin.Drain(admin_pb2.DrainRequest(node_id=key[1]), timeout=1)
        except grpc.RpcError:  # that bootstrap does not know it now, or is not there
            self._signal(key, signal.SIGTERM)
        by = time.monotonic() + RECOVERY_S

        def left() -> None:
            code = self._cluster(key).processes[key[1]].popen.poll()
            if code is None and time.monotonic() < by:
                return self._later(0.1, left)
            if code != 0:
                self._note(self.tally.broken, f"{key[1]} was drained, exit code {code}")
            if code is not None:
                del self._cluster(key).processes[key[1]]
            self._restart(key)

        left()
        return True

    def _link(self, fault: Callable[[Proxy], None]) -> bool:
        link = self._random.choice([link for link in self._doors.links.values() if link not in self._links])
        self._links.add(link)
        fault(link)

        def heal() -> None:
            link.heal()
            self._links.remove(link)

        self._later(self._random.uniform(0.1, 4.0), heal)
        return True

    def _at(
        self,
        points: Mapping[str, Sequence[str]],
        action: str,
        *,
        seconds: tuple[float, float] = (0.0, 0.0),
        times: int = 1,
    ) -> bool:
        """Let something happen at a point of a process, when the load next comes there."""
        role = self._random.choice(list(points))
        key = self._pick(role)
        if key is None:
            return False
        point = self._random.choice(points[role])
        after, length = self._random.randrange(4), self._random.uniform(*seconds)
        try:
            self._cluster(key).arm(key[1], point, action, after=after, seconds=length, times=times)
        except (OSError, ValueError):  # not there at the moment
            return False
        return True

    # ---- the end of faults ----

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), what))

    def _tend(self, *, all_of_it: bool = False) -> None:
        """End what is due to end."""
        while self._due and (all_of_it or self._due[0][0] <= time.monotonic()):
            heapq.heappop(self._due)[2]()
        for key in (key for role in ROLES for key in self._of(role) if key not in self._busy):
            process = self._cluster(key).processes[key[1]]
            if (code := process.popen.poll()) is not None:
                self._note(self.tally.broken, f"{key[1]} ended with {code}:\n{process.tail()}")
                del self._cluster(key).processes[key[1]]
                self._busy.add(key)
                self._restart(key)

    def _tend_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tend()
            time.sleep(0.02)

    def _restart(self, key: Key) -> None:
        cluster, name = self._cluster(key), key[1]
        log = cluster.directory / f"{name}.log"
        size = log.stat().st_size
        cluster.restart(name)
        by = time.monotonic() + RECOVERY_S

        def there() -> None:
            with log.open(errors="replace") as file:
                file.seek(size)
                if ("listening" if name == "bootstrap" else "attached") in file.read():
                    return self._healthy(key)
            if time.monotonic() < by:
                return self._later(0.1, there)
            self._note(self.tally.broken, f"{name} does not come back:\n{cluster.processes[name].tail()}")
            self._healthy(key)

        self._later(0.5, there)

    def _healthy(self, key: Key) -> None:
        self._busy.discard(key)
        self._down.discard(key)

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        """Heal everything, wait until all requests have ended, and see what is left."""
        by = time.monotonic() + 2 * RECOVERY_S
        while self._due and time.monotonic() < by:
            self._tend()
            time.sleep(0.02)
        for key in (key for role in ROLES for key in self._of(role)):
            self._cluster(key).disarm(key[1])
        for thread in threads:
            thread.join(HANG_S + RECOVERY_S)
            if thread.is_alive():
                self._note(self.tally.hung, "a client has not come back")
        for door in self._doors.both:
            try:
                door.wait_serving(NODES["prefill"], NODES["decode"])
                door.settle()
            except AssertionError as error:
                self._note(self.tally.leaked, str(error))
        for key in (key for role in ROLES for key in self._of(role)):
            log = self._cluster(key).directory / f"{key[1]}.log"
            self._read_log(str(log), log.read_text(errors="replace"))

    def _read_log(self, name: str, text: str) -> None:
        """What went wrong by itself: wrong books, ends of threads, exceptions that nobody injected."""
        for line in text.splitlines():
            if re.search(r"integrity check failed|CRITICAL", line):
                self._note(self.tally.broken, f"{name}: {line}")
        for block in re.split(r"^Traceback ", text, flags=re.MULTILINE)[1:]:
            block = re.split(r"^\d\d:\d\d:", block, maxsplit=1, flags=re.MULTILINE)[0]
            if "njected" not in block:
                self._note(self.tally.broken, f"{name}: {block}")


def soak(directory: Path, model: Path, faults: int, seed: int) -> Tally:
    doors = Doors(directory, model)
    with closing(doors):
        doors.start("bootstrap", "bootstrap", *BOOTSTRAP_FLAGS)
        for role, count in NODES.items():
            for i in range(count):
                own = NO_HOST if (role, i) == ("decode", 0) else ()
                doors.start(role, f"{role}-{i}", *EVERY_NODE, *NODE_FLAGS[role], *own)
        doors.wait_serving(NODES["prefill"], NODES["decode"])
        return Soak(doors, Load(model, seed), seed).run(faults)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvrelay-soak-"))
    print(f"seed {arguments.seed}; logs in {directory}, kept if something is wrong", flush=True)
    tally = soak(directory, tiny_model("qwen3"), arguments.faults, arguments.seed)
    print("\n".join(tally.lines()))
    if tally.bad:
        print(f"to be looked into: seed {arguments.seed}, logs in {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
