"""The NIXL agent of a node: its registered pool, the peers it knows, and writes into their pools.

What NIXL (1.5, over UCX) does, found by experiment, and what follows from it:

- A notification needs nothing known of its sender. So a receiver needs no peer to be written to; it adds its writers
  only to learn that one has ended (`watch`, `probe`).
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
from dataclasses import dataclass, field
from typing import Any

import nixl
import numpy as np
from nixl._bindings import nixlBackendError, nixlRemoteDisconnectError

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
    pages: Any = None  # prepared descriptor list of its pool; None: not connected
    active: set[Write] = field(default_factory=set)  # in progress; held, since NIXL may not lose their handles
    retired: bool = False  # nothing new; dropped once no write is in progress
    watched: bool = False  # not dropped while it is
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
        # Else a connection to a host that is gone, where nobody refuses it, blocks for a minute inside the lock.
        os.environ.setdefault("UCX_TCP_CONN_NB", "y")
        _adopt_nixl_logs()
        self.identity = identity
        self.memory = memory
        self._lock = threading.RLock()
        self._peers: dict[NodeIdentity, _Peer] = {}
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

        One that cannot be reached, since it has ended already or for now, is known all the same. Raises PeerRefused.
        """
        with self._lock:
            known = self._peers.get(identity)
            if identity == self.identity or (known and (known.metadata, known.memory) != (metadata, memory)):
                raise PeerRefused(identity, "this identity is taken; a new process has a new incarnation")
            if memory.page_bytes != self.memory.page_bytes:
                raise PeerRefused(identity, f"page_bytes is {memory.page_bytes}, here {self.memory.page_bytes}")
            for other in list(self._peers.values()):
                if other.identity.node_id == identity.node_id and other.identity != identity:
                    self._retire(other)
            if known is None:
                known = _Peer(identity, metadata, memory)
                try:
                    self._connect(known)
                except PeerDisconnected as error:  # whoever writes to it or probes it tries again
                    log.info("no connection", extra={"peer": known.name, "error": str(error)})
                    known.broken = True
                self._peers[identity] = known
            known.retired = known.watched = False

    def remove_peer(self, identity: NodeIdentity) -> None:
        """Post nothing more to a peer, and forget it once no write to it is in progress. Fine for one not known."""
        with self._lock:
            peer = self._peers.get(identity)
            if peer is not None:
                self._retire(peer)

    def knows(self, identity: NodeIdentity) -> bool:
        """Whether a peer was added and not removed since."""
        with self._lock:
            peer = self._peers.get(identity)
            return peer is not None and not peer.retired

    def watch(self, identity: NodeIdentity) -> bool:
        """Keep a peer, also when it is removed, so that `probe` can tell whether it has ended. False when unknown.

        Until `unwatch`, or until the peer is added again.
        """
        with self._lock:
            peer = self._peers.get(identity)
            if peer is not None:
                peer.watched = True
            return peer is not None

    def probe(self, identity: NodeIdentity) -> bool:
        """Whether the connection to a watched peer was lost since the last probe; if so, a new one is begun.

        A stopped or cut-off process loses none, an ended one all. A single loss proves nothing: either side may have
        closed or lost a connection some time ago. Raises UnknownPeer when the peer is not watched any more.
        """
        with self._lock:
            peer = self._peers.get(identity)
            if peer is None or not peer.watched:
                raise UnknownPeer(identity)
            if not peer.broken:
                self._send(peer, GREETING)
            if not peer.broken or peer.active:
                return False
            try:
                self._reconnect(peer)
            except (PeerRefused, PeerDisconnected) as error:
                log.info("no connection", extra={"peer": peer.name, "error": str(error)})
            return True

    def unwatch(self, identity: NodeIdentity) -> bool:
        """End watching a peer, and forget it. False, and nothing done, when it was not watched any more."""
        with self._lock:
            peer = self._peers.get(identity)
            if peer is None or not peer.watched:
                return False
            peer.watched = False
            self._retire(peer)
            return True

    # ---- writes ----

    def write(
        self, identity: NodeIdentity, local_pages: Sequence[int], remote_pages: Sequence[int], notice: bytes
    ) -> Write:
        """Post a write of whole pages, one list into the other; `notice` follows when they have landed.

        Raises UnknownPeer, or PeerDisconnected while writes on a broken connection are not all accounted for.
        """
        assert len(local_pages) == len(remote_pages) > 0
        ours, theirs = np.array(local_pages, dtype=np.int32), np.array(remote_pages, dtype=np.int32)
        with self._lock:
            peer = self._usable(identity)
            if not peer.active:
                # A connection that broke meanwhile is noticed only when it is used: by this, and not by the pages.
                # To post a write again would be no way: of the first one bytes may still land, when the room is over.
                self._send(peer, GREETING)
                peer = self._usable(identity)
            write = Write(peer, self._nixl.make_prepped_xfer("WRITE", self._pages, ours, peer.pages, theirs, notice))
            peer.active.add(write)
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
                return not self._peers
            self._closed = True
            for peer in list(self._peers.values()):
                peer.watched = False
                self._retire(peer)
            if self._peers:
                log.warning("closed with writes in progress", extra={"peers": [str(peer) for peer in self._peers]})
                _unquiet.append(self)
                return False
            self._nixl.release_dlist_handle(self._pages)
            self._nixl.deregister_memory(self._registered)
            self._nixl = None
            return True

    def stats(self) -> AgentStats:
        with self._lock:
            retired = sum(peer.retired for peer in self._peers.values())
            active = sum(len(peer.active) for peer in self._peers.values())
            return AgentStats(len(self._peers) - retired, retired, active, self._reconnects)

    # ---- inside the lock ----

    def _find(self, identity: NodeIdentity) -> _Peer:
        peer = self._peers.get(identity)
        if peer is None or peer.retired:
            raise UnknownPeer(identity)
        return peer

    def _usable(self, identity: NodeIdentity) -> _Peer:
        """The peer, with a new connection in place of a broken one."""
        peer = self._find(identity)
        if peer.broken:
            if peer.active:
                raise PeerDisconnected(identity)
            self._reconnect(peer)
        return peer

    def _reconnect(self, peer: _Peer) -> None:
        self._disconnect(peer)
        self._connect(peer)
        self._reconnects += 1

    def _connect(self, peer: _Peer) -> None:
        """Raises PeerDisconnected when nobody is there, PeerRefused when somebody else is."""
        try:
            name = self._nixl.add_remote_agent(peer.metadata).decode()
        except nixlBackendError as error:
            raise PeerDisconnected(peer.identity) from error
        except Exception as error:  # NIXL raises one class per status, all directly below Exception
            raise PeerRefused(peer.identity, f"NIXL cannot use its metadata ({type(error).__name__})") from error
        try:
            if name != peer.name:
                raise PeerRefused(peer.identity, f"its metadata is of agent {name}")
            peer.pages = self._prepare(name, peer.memory)
        except Exception as error:
            self._nixl.remove_remote_agent(name)
            if isinstance(error, PeerRefused):
                raise
            raise PeerRefused(peer.identity, f"its pool is not what it registered ({type(error).__name__})") from error
        peer.broken = False
        self._send(peer, GREETING)  # connecting takes some round trips: start now, not with the first pages

    def _disconnect(self, peer: _Peer) -> None:
        assert not peer.active
        if peer.pages is None:  # an attempt to connect failed
            return
        self._nixl.release_dlist_handle(peer.pages)
        peer.pages = None
        try:
            self._nixl.remove_remote_agent(peer.name)
        except Exception as error:  # NIXL forgets by itself an agent whose connection broke
            log.debug("agent was gone", extra={"peer": peer.name, "error": type(error).__name__})

    def _retire(self, peer: _Peer) -> None:
        peer.retired = True
        if not peer.active and not peer.watched:
            self._disconnect(peer)
            del self._peers[peer.identity]

    def _prepare(self, agent: str, memory: PoolMemory) -> Any:
        return self._nixl.prep_xfer_dlist(agent, page_descriptors(memory), memory_type(memory))

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
        peer.active.remove(write)
        self._nixl.release_xfer_handle(write._handle)
        if peer.retired:
            self._retire(peer)


def _adopt_nixl_logs() -> None:
    """NIXL's Python logger writes to stdout by itself; let the process's own logging have its lines."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(max(logger.level, logging.WARNING))
