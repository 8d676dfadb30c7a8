"""What nodes and the bootstrap service say to each other, as plain values.

Engines speak these and nothing else; `rpc.wire` turns them into protobuf messages and back, one to one with
proto/kvrelay/v1/bootstrap.proto, where the order of the conversation is written down.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.handoff import FailureCause
from engine.core.journal import RoomRecord
from engine.core.types import (
    PROTOCOL_VERSION,
    NodeIdentity,
    PageLayout,
    PeerInfo,
    PoolMemory,
    PrefillTask,
    Reservation,
    Role,
    RoomKey,
    TokenOutput,
)

# ---- bootstrap to node ----


@dataclass(frozen=True, slots=True)
class Submit:
    """To a prefill node: compute this prompt. `Granted` follows."""

    task: PrefillTask


@dataclass(frozen=True, slots=True)
class Reserve:
    """To a decode node: set pages aside and answer with `Grant` when there is room."""

    reservation: Reservation


@dataclass(frozen=True, slots=True)
class Granted:
    """To a prefill node: the pages of this room are `pages` on `peer`."""

    key: RoomKey
    peer: NodeIdentity
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """To both nodes: this attempt is over. Unknown and finished rooms are fine."""

    key: RoomKey
    reason: str


@dataclass(frozen=True, slots=True)
class PeerJoined:
    peer: PeerInfo


@dataclass(frozen=True, slots=True)
class PeerLeft:
    identity: NodeIdentity


@dataclass(frozen=True, slots=True)
class WriterQuiesced:
    """To a decode node: the writer of this room has no write in progress and will post none."""

    key: RoomKey


@dataclass(frozen=True, slots=True)
class Drain:
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Inspect:
    inspection_id: int


@dataclass(frozen=True, slots=True)
class Explain:
    """Answer with `Explanation`: what is known of a request, live or ended."""

    inspection_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """From the session itself: a bootstrap took this node in. Tell it what the node holds."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """From the session itself: the bootstrap behind this link is gone, and so is everything it carried."""


Command = Submit | Reserve | Granted | Abort | PeerJoined | PeerLeft | WriterQuiesced | Drain | Inspect | Explain
LinkEvent = LinkUp | LinkLost

# ---- node to bootstrap ----


@dataclass(frozen=True, slots=True)
class NodeStats:
    """What a node holds at one moment. free + cached + held + fenced == total. Fields as in types.proto."""

    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    pages_fenced: int = 0
    ungranted: int = 0
    waiting: int = 0
    running: int = 0
    transferring: int = 0
    queued_tokens: int = 0
    tokens_per_second: float = 0.0
    head_room: int = 0
    serving: bool = False
    draining: bool = False
    requests_total: int = 0
    cached_tokens_total: int = 0
    computed_tokens_total: int = 0
    output_tokens_total: int = 0
    relayed_bytes_total: int = 0
    retractable: int = 0
    host_pages_total: int = 0
    host_pages_free: int = 0
    host_pages_cached: int = 0
    host_hit_tokens_total: int = 0
    retracted: int = 0

    @property
    def idle(self) -> bool:
        """No request is in any queue and none holds a page."""
        requests = self.ungranted + self.waiting + self.running + self.transferring + self.retracted
        return not (requests or self.pages_held)


@dataclass(frozen=True, slots=True)
class Registration:
    """How a node introduces itself. Fields as in bootstrap.proto."""

    identity: NodeIdentity
    role: Role
    model: str
    layout: PageLayout
    memory: PoolMemory
    agent_metadata: bytes
    max_context: int
    reserved_decode_tokens: int = 0
    max_running: int = 0
    host_pages: int = 0
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Heartbeat:
    stats: NodeStats


@dataclass(frozen=True, slots=True)
class Grant:
    key: RoomKey
    pages: tuple[int, ...]
    head_room: int


@dataclass(frozen=True, slots=True)
class RoomFailed:
    key: RoomKey
    phase: str
    reason: str
    retriable: bool = True
    code: str = "INTERNAL"  # name of the gRPC status the request ends with when it is not tried again
    cause: FailureCause = FailureCause.FAULT


@dataclass(frozen=True, slots=True)
class RoomQuiesced:
    key: RoomKey


@dataclass(frozen=True, slots=True)
class RoomFenced:
    """Pages of an ended room wait for its writer's acknowledgement. Said again whenever that writer (re)joins."""

    key: RoomKey
    writer: NodeIdentity


@dataclass(frozen=True, slots=True)
class CacheDelta:
    added: tuple[bytes, ...]  # parents before children
    removed: tuple[bytes, ...]
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Inspection:
    inspection_id: int
    stats: NodeStats
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    inspection_id: int
    rooms: tuple[RoomRecord, ...]  # oldest first


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is left on this node."""


Report = Heartbeat | Grant | RoomFailed | RoomQuiesced | RoomFenced | CacheDelta | Inspection | Explanation | Drained

# ---- output, one StepOutput an engine step ----


@dataclass(frozen=True, slots=True)
class AdmitReport:
    """The room is in a prefill forward for the first time."""

    key: RoomKey
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """With token 0. Times in seconds."""

    key: RoomKey
    chunks: int
    prefill_wait: float
    prefill: float


@dataclass(frozen=True, slots=True)
class RelayReport:
    """When every write of a room is terminal."""

    key: RoomKey
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """With the first token of the decode node. Times in seconds."""

    key: RoomKey
    handoff: float


@dataclass(frozen=True, slots=True)
class StepOutput:
    tokens: tuple[TokenOutput, ...] = ()
    prefilled: tuple[PrefillReport, ...] = ()
    relayed: tuple[RelayReport, ...] = ()
    decoded: tuple[DecodeReport, ...] = ()
    admitted: tuple[AdmitReport, ...] = ()
