"""The NIXL agent of a node: its registered pool, the peers it knows, and writes into their pools.

What NIXL (1.5, over UCX) does, found by experiment, and what follows from it:

- A notification needs nothing known of its sender. So a receiver needs no peer to be written to; it adds its writers
  only to learn that one has died (`connected`).
- Removing an agent neither stops its writes into our pool, nor ends ours into its: a write whose agent is removed
  reports "not found" while its bytes may still be on the way. So a peer with writes in progress is only *retired*
  (nothing new is posted) and dropped when the last one is terminal.
- Any error of any write breaks the whole connection: all later writes and notifications fail with a disconnect until
  the agent is removed and added again. A dead peer shows this at once, a stopped or unreachable one does not.
- The progress thread the Python binding would start spins on one core. There is none: whoever polls makes progress.
- A write's notification leaves when its status is polled and found done, not before.

Calls may come from any thread; one lock serialises them, also across the copy that a post between processes of one
host makes, so a call can take as long as one write's copy.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nixl
import numpy as np
from nixl._bindings import nixlRemoteDisconnectError

from engine.core.errors import ConfigError
from engine.core.types import NodeIdentity, PoolMemory
from transfer.errors import PeerDisconnected, PeerRefused, UnknownPeer
from transfer.layout import memory_type, page_descriptors, pool_region
from transfer.notice import GREETING

__all__ = ["AgentStats", "TransferAgent", "Write", "WriteState", "check_ucx_tls"]

log = logging.getLogger("kvrelay.transfer")

_unquiet: list[object] = []  # agents closed with writes in progress: their memory must stay registered to the end


class WriteState(enum.Enum):
    ACTIVE = "active"  # posted; may still read our pages and change the peer's
    DONE = "done"  # landed, and its notice handed over
    FAILED = "failed"  # nothing more of it leaves this node; it landed in part, or not at all


@dataclass(slots=True)
class _Peer:
    identity: NodeIdentity
    metadata: bytes
    memory: PoolMemory
    pages: Any = None  # prepared descriptor list of its pool; None: NIXL does not know the agent
    active: int = 0  # writes in progress
    retired: bool = False  # removed, and dropped as soon as that is safe
    awaited: bool = False  # until it is known to have ended: not dropped meanwhile
    broken: bool = False

    @property
    def name(self) -> str:
        return str(self.identity)


class Write:
    """One posted write. Changed by the agent only."""

    __slots__ = ("_handle", "_peer", "error", "state")

    def __init__(self, peer: _Peer, handle: Any):
        self._peer = peer
        self._handle = handle
        self.state = WriteState.ACTIVE
        self.error = ""


@dataclass(frozen=True, slots=True)
class AgentStats:
    peers: int
    retired_peers: int  # removed, but with writes in progress
    active_writes: int
    reconnects: int


def check_ucx_tls(environment: Mapping[str, str]) -> None:
    """UCX needs tcp to connect at all, whatever moves the data. Raises ConfigError when UCX_TLS rules it out."""
    value = environment.get("UCX_TLS", "").strip()
    if not value:
        return
    names = {name.strip() for name in value.removeprefix("^").split(",")}
    if ("tcp" in names) if value.startswith("^") else not names & {"tcp", "all"}:
        raise ConfigError([f"UCX_TLS={value} rules out tcp, which NIXL needs to connect nodes: allow tcp or unset it"])


class TransferAgent:
    """`identity` names the agent; `memory` is registered for as long as the agent is open."""

    def __init__(
        self, identity: NodeIdentity, memory: PoolMemory, *, backends: Sequence[str] = ("UCX",), num_threads: int = 0
    ):
        """Raises ConfigError when a backend or a transport that is needed is not there."""
        check_ucx_tls(os.environ)
        _adopt_nixl_logs()
        self.identity = identity
        self.memory = memory
        self._lock = threading.RLock()
        self._peers: dict[NodeIdentity, _Peer] = {}
        self._retired: list[_Peer] = []
        self._notices: list[bytes] = []
        self._reconnects = 0
        self._closed = False
        self._nixl: Any = nixl.nixl_agent(
            str(identity),
            nixl.nixl_agent_config(enable_prog_thread=False, num_threads=num_threads, backends=list(backends)),
        )
        missing = [name for name in backends if name not in self._nixl.backends]
        if missing:
            raise ConfigError([f"NIXL has no backend {name} here; it has {self._nixl.plugin_list}" for name in missing])
        self._registered = self._nixl.register_memory(pool_region(memory), memory_type(memory))
        self._pages = self._prepare("NIXL_INIT_AGENT", memory)
        self.metadata: bytes = self._nixl.get_agent_metadata()  # for the peers' add_peer

    # ---- peers ----

    def add_peer(self, identity: NodeIdentity, metadata: bytes, memory: PoolMemory) -> None:
        """Get to know a peer. Adding again what is known changes nothing; other incarnations of its node are removed.

        Raises PeerRefused.
        """
        with self._lock:
            known = self._peers.get(identity)
            if identity == self.identity or (known and (known.metadata, known.memory) != (metadata, memory)):
                raise PeerRefused(identity, "this identity is taken; a new process has a new incarnation")
            if memory.page_bytes != self.memory.page_bytes:
                raise PeerRefused(identity, f"page_bytes is {memory.page_bytes}, here {self.memory.page_bytes}")
            if known is None:
                known = _Peer(identity, metadata, memory)
                self._connect(known)
                self._peers[identity] = known
            known.retired = known.awaited = False
            for other in [other for other in self._peers if other.node_id == identity.node_id and other != identity]:
                if not self._peers[other].retired:
                    self.remove_peer(other)

    def remove_peer(self, identity: NodeIdentity) -> None:
        """Post nothing more to a peer, and forget it as soon as no write to it is in progress. Raises UnknownPeer."""
        with self._lock:
            peer = self._peers.pop(identity, None)
            if peer is None:
                raise UnknownPeer(identity)
            peer.retired = True
            self._retired.append(peer)
            self._drop_if_quiet(peer)

    def connected(self, identity: NodeIdentity) -> bool:
        """False once the connection to a peer is known to be broken: its process ended, or it let go of us.

        In either case it can write nothing more, except what already lies in our own socket buffers
        (`PageReceiver.settle`). True proves nothing. Raises UnknownPeer.
        """
        with self._lock:
            peer = self._find(identity)
            if not peer.broken:
                self._greet(peer)
            return not peer.broken

    # ---- writes ----

    def write(
        self, identity: NodeIdentity, local_pages: Sequence[int], remote_pages: Sequence[int], notice: bytes
    ) -> Write:
        """Post a write of whole pages, one list into the other; `notice` follows when they have landed.

        Raises UnknownPeer, or PeerDisconnected while writes on a broken connection are not all accounted for.
        """
        assert len(local_pages) == len(remote_pages) > 0
        with self._lock:
            peer = self._usable(identity)
            ours, theirs = np.array(local_pages, dtype=np.int32), np.array(remote_pages, dtype=np.int32)
            write = Write(peer, self._nixl.make_prepped_xfer("WRITE", self._pages, ours, peer.pages, theirs, notice))
            peer.active += 1
            self._advance(write, self._nixl.transfer)
            return write

    def poll(self, write: Write) -> WriteState:
        """Make progress and say how a write stands. A terminal one needs nothing more."""
        with self._lock:
            if write.state is WriteState.ACTIVE:
                self._advance(write, self._nixl.check_xfer_state)
            return write.state

    def notify(self, identity: NodeIdentity, notice: bytes) -> None:
        """Send a notice that rides on no write; it may overtake writes. Raises UnknownPeer and PeerDisconnected."""
        with self._lock:
            peer = self._usable(identity)
            self._send(peer, notice)
            if peer.broken:
                raise PeerDisconnected(identity)

    # ---- notices ----

    def progress(self) -> None:
        """Let NIXL move what it has in hand. Notices that come in are kept for `take_notices`."""
        with self._lock:
            if not self._closed:
                for notices in self._nixl.get_new_notifs().values():
                    self._notices += [notice for notice in notices if notice != GREETING]

    def take_notices(self) -> list[bytes]:
        """Make progress and return the notices that came in, of one sender in the order they were sent."""
        with self._lock:
            self.progress()
            notices, self._notices = self._notices, []
            return notices

    # ---- end ----

    def close(self) -> bool:
        """Forget peers and pool. False when writes were in progress: then their memory must outlive the process.

        May be called twice.
        """
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            for identity in list(self._peers):
                self.remove_peer(identity)
            if self._retired:
                log.warning("closed with writes in progress", extra={"peers": [peer.name for peer in self._retired]})
                _unquiet.append(self)
                return False
            self._nixl.release_dlist_handle(self._pages)
            self._nixl.deregister_memory(self._registered)
            self._nixl = None
            return True

    def stats(self) -> AgentStats:
        with self._lock:
            active = sum(peer.active for peer in [*self._peers.values(), *self._retired])
            return AgentStats(len(self._peers), len(self._retired), active, self._reconnects)

    # ---- inside the lock ----

    def _find(self, identity: NodeIdentity) -> _Peer:
        peer = self._peers.get(identity)
        if peer is None:
            raise UnknownPeer(identity)
        return peer

    def _usable(self, identity: NodeIdentity) -> _Peer:
        """The peer, with a new connection in place of a broken one."""
        peer = self._find(identity)
        if peer.broken:
            if peer.active:
                raise PeerDisconnected(identity)
            self._drop(peer)
            peer = self._peers[identity] = self._connect(identity, peer.metadata, peer.memory)
            self._reconnects += 1
        return peer

    def _connect(self, identity: NodeIdentity, metadata: bytes, memory: PoolMemory) -> _Peer:
        try:
            name = self._nixl.add_remote_agent(metadata).decode()
        except Exception as error:  # NIXL raises one class per status, all directly below Exception
            raise PeerRefused(identity, f"NIXL cannot use its metadata ({type(error).__name__})") from error
        try:
            if name != str(identity):
                raise PeerRefused(identity, f"its metadata is of agent {name}")
            pages = self._prepare(name, memory)
        except Exception as error:
            self._nixl.remove_remote_agent(name)
            if isinstance(error, PeerRefused):
                raise
            raise PeerRefused(identity, f"its pool is not what it registered ({type(error).__name__})") from error
        peer = _Peer(identity, metadata, memory, pages)
        self._greet(peer)  # connecting takes some round trips: start now, not with the first pages
        return peer

    def _prepare(self, agent: str, memory: PoolMemory) -> Any:
        return self._nixl.prep_xfer_dlist(agent, page_descriptors(memory), memory_type(memory))

    def _greet(self, peer: _Peer) -> None:
        self._send(peer, GREETING)

    def _send(self, peer: _Peer, notice: bytes) -> None:
        try:
            self._nixl.send_notif(peer.name, notice)
        except Exception as error:
            log.info("peer disconnected", extra={"peer": peer.name, "error": type(error).__name__})
            peer.broken = True

    def _advance(self, write: Write, call: Any) -> None:
        peer = write._peer
        try:
            if call(write._handle) == "PROC":
                return
            write.state = WriteState.DONE
        except nixlRemoteDisconnectError:
            write.error = "the peer disconnected"
        except Exception as error:
            log.exception("write failed", extra={"peer": peer.name})
            write.error = f"NIXL: {type(error).__name__}"
        if write.error:
            write.state = WriteState.FAILED
            peer.broken = True
        self._nixl.release_xfer_handle(write._handle)
        peer.active -= 1
        self._drop_if_quiet(peer)

    def _drop_if_quiet(self, peer: _Peer) -> None:
        if peer.retired and not peer.active:
            self._retired.remove(peer)
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._nixl.release_dlist_handle(peer.pages)
        try:
            self._nixl.remove_remote_agent(peer.name)
        except Exception as error:  # NIXL forgets by itself an agent whose connection broke
            log.debug("agent was gone", extra={"peer": peer.name, "error": type(error).__name__})


def _adopt_nixl_logs() -> None:
    """NIXL's Python logger writes to stdout by itself; let the process's own logging have its lines."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(max(logger.level, logging.WARNING))
