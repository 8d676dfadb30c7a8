"""Named points in a real process at which a test can inject a fault. The product itself holds none of this.

`install` wraps the functions at which messages come and go, work is done and bytes move, and listens on a socket for
what is to happen where. A hit is named "point" or "point.Kind"; arming "point" is for every kind.

    any node    command.<Kind>      a message from the bootstrap, before the session takes it
                report.<Kind>       Connection.report
                publish.<part>      Connection.publish of output that has this part (tokens, admitted, …)
                ack                 a heartbeat was answered
                handle.<Kind>       the engine handles a command or an event
                step                a pass of the engine begins
                forward, forwarded  before and after the model runs
    prefill     post[.last], posted[.last]   before and after a write is posted; post.to.<node id>
                poll                         a write in progress is asked how it stands
                notify                       a notice that rides on no write
    decode      notice[.last]       the receiver takes a notice
    bootstrap   submit              a client's request is taken in
                on_report.<Kind>, on_output  what a node said
                send.<Kind>         a command to a node
                tick                the clock; with the action "rested" the rest of pairs that are set aside is over
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nixl._bindings import nixlRemoteDisconnectError

from bootstrap.front import FrontDoor
from bootstrap.servicers.nodes import _StreamLink
from decode_service.loop import DecodeEngine
from prefill_service.loop import PrefillEngine
from rpc.session import Connection, Session
from transfer.agent import TransferAgent, Write
from transfer.notice import MalformedNotice, Notice
from transfer.receiver import PageReceiver
from unified_service.loop import UnifiedEngine

__all__ = ["ACTIONS", "Injected", "install"]

ACTIONS = ("kill", "stop", "raise", "delay", "drop", "duplicate", "fail", "slow", "corrupt", "cut", "rested")


class Injected(Exception):
    """What the action `raise` raises."""


@dataclass
class Fault:
    point: str
    action: str
    after: int = 0  # hits that pass first
    seconds: float = 0.0
    times: int | None = 1  # hits that trip; None: all

    def matches(self, name: str) -> bool:
        return name == self.point or name.startswith(self.point + ".")


@dataclass
class Points:
    """Faults that are armed, and how often one has struck at each point since it was armed. Asked by any thread."""

    faults: list[Fault] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    release: threading.Event = field(default_factory=threading.Event)  # of what is delayed now

    def hit(self, *names: str) -> Fault | None:
        """The fault for this hit, if there is one. What stops or ends this thread or process is done here."""
        with self.lock:
            fault = self._due(names)
        if fault is None:
            return None
        try:
            match fault.action:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raise":
                    raise Injected(f"injected at {names[-1]}")
                case "cut":
                    cut()
        finally:
            # Only now: whoever waits for a stop must not wake this process before it has stopped.
            self.struck[fault.point] += 1
        return fault

    def _due(self, names: tuple[str, ...]) -> Fault | None:
        for fault in self.faults:
            if any(fault.matches(name) for name in names):
                if fault.after > 0:
                    fault.after -= 1
                    return None
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        self.faults.remove(fault)
                return fault
        return None


points = Points()


def install(path: Path) -> None:
    """Wrap the points of this process, and take orders at `path` from now on."""
    _wrap_session()
    _wrap_engines()
    _wrap_transfer()
    _wrap_bootstrap()
    server = socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)
    server.bind(str(path))
    server.listen()
    threading.Thread(target=_serve, args=(server,), name="fault-points", daemon=True).start()


def _serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        with contextlib.suppress(OSError), connection, connection.makefile("rw") as stream:  # who asked may have left
            for line in stream:
                stream.write(json.dumps(_answer(json.loads(line))) + "\n")
                stream.flush()


def _answer(request: dict[str, Any]) -> dict[str, int]:
    """Obey; returns how often faults have struck, by point."""
    match request.pop("do"):
        case "arm":
            new = Fault(**request)
            with points.lock:  # in place of an equal one that has not struck
                points.faults = [one for one in points.faults if (one.point, one.action) != (new.point, new.action)]
                points.faults.append(new)
                points.struck.pop(new.point, None)
        case "disarm":
            with points.lock:
                points.faults.clear()
                points.struck.clear()
        case "release":
            release, points.release = points.release, threading.Event()
            release.set()
        case "cut":
            return {"cut": cut()}
    return dict(points.struck)


def cut() -> int:
    """Shut down every established TCP connection of this process but those to its bootstraps."""
    addresses = [words[1] for words in zip(sys.argv, sys.argv[1:], strict=False) if words[0] == "--bootstrap"]
    spared = {int(address.rpartition(":")[2]) for address in ",".join(addresses).split(",") if address}
    count = 0
    for name in os.listdir("/proc/self/fd"):
        # What is closed meanwhile, no socket, or not connected raises.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] not in spared:
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


# ---- wrapping ----


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around(original, self, *arguments)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _carry(fault: Fault | None, go: Callable[[], Any]) -> Any:
    """Let a message through: never, twice, or late. A late one holds up nothing behind it."""
    match fault.action if fault else None:
        case "drop":
            return None
        case "duplicate":
            go()
        case "delay":
            assert fault is not None
            _later(fault.seconds, go)
            return None
    return go()


def _later(seconds: float, go: Callable[[], Any]) -> None:
    """In this thread, if it runs an event loop; else in one of its own."""
    release = points.release
    with contextlib.suppress(RuntimeError):
        go = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, go)

    def wait() -> None:
        release.wait(seconds)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            go()

    threading.Thread(target=wait, daemon=True).start()


def _block(fault: Fault | None) -> None:
    if fault is not None and fault.action == "delay":
        points.release.wait(fault.seconds)


def _wrap_session() -> None:
    def take(original: Any, self: Session, connection: Connection, message: Any) -> None:
        fault = points.hit("command." + _camel(message.WhichOneof("command")))
        _carry(fault, lambda: original(self, connection, message))

    def report(original: Any, self: Connection, report: Any) -> None:
        _carry(points.hit("report." + type(report).__name__), lambda: original(self, report))

    def publish(original: Any, self: Connection, output: Any) -> None:
        parts = ("tokens", "admitted", "prefilled", "relayed", "decoded")
        fault = points.hit(*(f"publish.{part}" for part in parts if getattr(output, part)))
        _carry(fault, lambda: original(self, output))

    async def acknowledged(original: Any, self: Connection) -> None:
        fault = points.hit("ack")
        if fault is not None and fault.action == "delay":
            await asyncio.sleep(fault.seconds)
        if fault is None or fault.action != "drop":
            await original(self)

    _wrap(Session, "_take", take)
    _wrap(Connection, "report", report)
    _wrap(Connection, "publish", publish)
    _wrap(Connection, "acknowledged", acknowledged)


def _camel(name: str | None) -> str:
    return "".join(part.title() for part in (name or "unknown").split("_"))


def _wrap_engines() -> None:
    def handle(original: Any, self: Any, link: Any, item: Any) -> None:
        _block(points.hit("handle." + type(item).__name__))
        original(self, link, item)

    def forward(original: Any, self: Any, rows: Any) -> Any:
        _block(points.hit("forward"))
        logits = original(self, rows)
        _block(points.hit("forwarded"))
        return logits

    def step(original: Any, self: Any) -> Any:
        _block(points.hit("step"))
        return original(self)

    for engine in (PrefillEngine, DecodeEngine, UnifiedEngine):
        _wrap(engine, "handle", handle)
        _wrap(engine, "_forward", forward)
        _wrap(engine, "step", step)


def _is_last(notice: bytes) -> bool:
    with contextlib.suppress(MalformedNotice):
        return Notice.decode(notice).last is not None
    return False


def _wrap_transfer() -> None:
    posting = threading.local()  # .fault: of the post that this thread is in
    slow: dict[Write, float] = {}  # counts as in progress until then
    failing: set[Write] = set()  # lands, and is then said to have failed

    def write(original: Any, self: TransferAgent, identity: Any, local: Any, remote: Any, notice: bytes) -> Any:
        kind = ".last" if _is_last(notice) else ".part"
        posting.fault = points.hit("post" + kind, "post.to." + identity.node_id)
        _block(posting.fault)
        try:
            made = original(self, identity, local, remote, notice)
        finally:
            posting.fault = None
        _block(points.hit("posted" + kind))
        return made

    def advance(original: Any, self: TransferAgent, write: Write, call: Any) -> None:
        is_post = call == self._nixl.transfer
        fault: Fault | None = getattr(posting, "fault", None) if is_post else points.hit("poll")
        action = fault.action if fault else None
        if fault is not None and action == "slow":
            slow[write] = time.monotonic() + fault.seconds
        elif action == "fail" and not is_post:
            failing.add(write)

        def told(handle: Any) -> Any:
            if action == "fail" and is_post:
                raise nixlRemoteDisconnectError("injected")
            if not is_post and slow.get(write, 0.0) > time.monotonic():
                return "PROC"
            if not is_post:
                slow.pop(write, None)
            state = call(handle)
            if write in slow:
                return "PROC"
            if write in failing and state != "PROC":
                failing.discard(write)
                raise nixlRemoteDisconnectError("injected")
            return state

        original(self, write, told)

    def notify(original: Any, self: TransferAgent, identity: Any, notice: bytes) -> None:
        _carry(points.hit("notify"), lambda: original(self, identity, notice))

    def notice(original: Any, self: PageReceiver, data: bytes) -> None:
        fault = points.hit("notice.last" if _is_last(data) else "notice.part")
        if fault is not None and fault.action == "corrupt":
            _corrupt(self, Notice.decode(data))
        _carry(fault, lambda: original(self, data))

    _wrap(TransferAgent, "write", write)
    _wrap(TransferAgent, "_advance", advance)
    _wrap(TransferAgent, "notify", notify)
    _wrap(PageReceiver, "_take", notice)


def _corrupt(receiver: PageReceiver, notice: Notice) -> None:
    """Flip bits of the newest page of a room, as a faulty network card would."""
    engine: Any = receiver._on_event.__self__  # type: ignore[attr-defined]
    room = engine._rooms.get(notice.room)
    if room is not None:  # else the notice is late
        engine._device.pool.data[room.pages[notice.pages - 1]].view(-1)[:8] += 1.0


def _wrap_bootstrap() -> None:
    def submit(original: Any, self: FrontDoor, *args: Any) -> Any:
        _block(points.hit("submit"))
        return original(self, *args)

    def on_report(original: Any, self: FrontDoor, node: Any, report: Any) -> None:
        _carry(points.hit("on_report." + type(report).__name__), lambda: original(self, node, report))

    def on_output(original: Any, self: FrontDoor, node: Any, output: Any) -> None:
        _carry(points.hit("on_output"), lambda: original(self, node, output))

    def send(original: Any, self: _StreamLink, command: Any) -> None:
        _carry(points.hit("send." + type(command).__name__), lambda: original(self, command))

    def tick(original: Any, self: FrontDoor) -> None:
        fault = points.hit("tick")
        _block(fault)
        if fault is not None and fault.action == "rested":
            for pair in self.attempts.pairs._pairs.values():
                pair.until = pair.until and self._clock()
        original(self)

    _wrap(FrontDoor, "submit", submit)
    _wrap(FrontDoor, "on_report", on_report)
    _wrap(FrontDoor, "on_output", on_output)
    _wrap(_StreamLink, "send", send)
    _wrap(FrontDoor, "tick", tick)
