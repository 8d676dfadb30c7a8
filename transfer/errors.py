"""What can go wrong on the way to a peer, and whose fault it is.

    NotFound
    └── UnknownPeer    the caller's: nothing of that name was added, or it was removed
    Refused
    └── PeerRefused    the peer's: its metadata or its pool does not fit ours
    Unavailable
    └── PeerDisconnected    nobody's: the connection broke, and writes on it are still being counted

Room failures are no exceptions: they come as events (`transfer.page_stream`, `transfer.receiver`).
"""

from __future__ import annotations

from engine.core.errors import NotFound, Refused, Unavailable
from engine.core.types import NodeIdentity

__all__ = ["PeerDisconnected", "PeerRefused", "UnknownPeer"]


class UnknownPeer(NotFound):
    reason = "UNKNOWN_PEER"

    def __init__(self, peer: NodeIdentity):
        super().__init__(f"no transfer peer {peer}", peer=str(peer))


class PeerRefused(Refused):
    reason = "PEER_REFUSED"

    def __init__(self, peer: NodeIdentity, why: str):
        super().__init__(f"transfer peer {peer} refused: {why}", peer=str(peer))


class PeerDisconnected(Unavailable):
    reason = "PEER_DISCONNECTED"

    def __init__(self, peer: NodeIdentity):
        super().__init__(f"disconnected from transfer peer {peer}", peer=str(peer))
