"""The nodes that are attached, and what they last said of themselves.

Nodes own the truth; this is a view of it, gone and rebuilt whenever a node attaches. The first node fixes the page
layout of the cluster, and whether it is one of unified nodes or of prefill and decode nodes; the last one to leave
takes that away again. Every node hears of all nodes of the other role: `PeerJoined` before it can be asked to have to
do with one, `PeerLeft` when that one is gone.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from bootstrap.fit import Size, answer_room
from bootstrap.routing import DecodeView, PrefillView
from engine.core.clock import Clock
from engine.core.errors import InvalidField, KVRelayError, Overloaded, Refused
from engine.core.messages import CacheDelta, Command, NodeStats, PeerJoined, PeerLeft, Registration
from engine.core.node_config import Device
from engine.core.types import DTYPE_BYTES, PROTOCOL_VERSION, NodeIdentity, PageLayout, PeerInfo, Role, RoomKey

__all__ = ["Link", "Node", "Registry"]


class Link(Protocol):
    """The way to one attached node. Sending on a link that has ended does nothing."""

    def send(self, command: Command) -> None: ...

    def close(self, error: KVRelayError) -> None:
        """End the node's session with this status."""
        ...


@dataclass(slots=True, eq=False)
class Node:
    """One attached node. Only the front door and the registry write to it."""

    registration: Registration
    link: Link
    heard: float  # clock time of its last message
    stats: NodeStats = field(default_factory=NodeStats)  # not serving until its first heartbeat says so
    drain_asked: bool = False
    last_chosen: int = 0
    rooms: set[RoomKey] = field(default_factory=set)  # attempts that need this node
    cached: set[bytes] = field(default_factory=set)  # prefill: keys of cached pages
    uncomputed: dict[RoomKey, int] = field(default_factory=dict)  # prefill: uncached tokens of what was submitted
    head_room: int = 0  # decode: tokens, by its last heartbeat or grant
    ungranted: dict[RoomKey, int] = field(default_factory=dict)  # decode: tokens asked for and not yet granted
    overdue: set[RoomKey] = field(default_factory=set)  # decode: ungranted for too long, so nothing more is asked for

    @property
    def identity(self) -> NodeIdentity:
        return self.registration.identity

    @property
    def node_id(self) -> str:
        return self.registration.identity.node_id

    @property
    def role(self) -> Role:
        return self.registration.role

    @property
    def serving(self) -> bool:
        """May be given new work."""
        return self.stats.serving and not self.stats.draining and not self.drain_asked

    @property
    def peer(self) -> PeerInfo:
        registration = self.registration
        return PeerInfo(registration.identity, registration.role, registration.memory, registration.agent_metadata)

    def prefill_view(self) -> PrefillView:
        # The node's own count knows other front doors' requests, ours those it has not taken in yet.
        queued = max(self.stats.queued_tokens, sum(self.uncomputed.values()))
        rate = self.stats.tokens_per_second
        # On a unified node those that decode take part of every forward.
        requests = len(self.rooms if self.role is Role.UNIFIED else self.uncomputed)
        return PrefillView(self.node_id, self.cached, queued, rate, requests, self.last_chosen)

    def decode_view(self, size: Size) -> DecodeView:
        required = size.required(self.registration, self.stats.retractable)
        free = self.head_room - sum(self.ungranted.values())
        limit = self.registration.max_running
        rows = limit - len(self.rooms) if limit else None
        return DecodeView(self.node_id, free, required, rows, self.stats.idle and not self.rooms, self.last_chosen)

    def apply(self, delta: CacheDelta) -> None:
        """Raises InvalidField when that makes more keys than the node has pages."""
        if delta.reset:
            self.cached.clear()
        self.cached.difference_update(delta.removed)
        self.cached.update(delta.added)
        pages = self.registration.memory.num_pages + self.registration.host_pages
        if len(self.cached) > pages:
            limit = f"at most {pages} with those added before, one a page"
            raise InvalidField("cache_delta.added", len(self.cached), limit)


DEVICES = (Device.CPU, Device.CUDA)
MAX_NODES = 1024
MAX_AGENT_METADATA = 1 << 20  # bytes; a few KB are usual
MAX_REPLACED = 1024  # processes remembered; by then the oldest have long given up


class Registry:
    """At most one node a node id, whatever its role.

    `model` and `fingerprint` are of the model that the front door has the text of.
    """

    def __init__(self, model: str, fingerprint: str, clock: Clock):
        self._model = model
        self._fingerprint = fingerprint
        self._clock = clock
        self._nodes: dict[str, Node] = {}
        self._choices: Counter[Role] = Counter()
        self.roles = Role.PREFILL.pools  # of the cluster; while no node is attached, of that of the last one
        self._empty_since: dict[Role, float | None] = dict.fromkeys(Role, clock())
        self._replaced: deque[NodeIdentity] = deque(maxlen=MAX_REPLACED)

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, node_id: str) -> Node | None:
        return self._nodes.get(node_id)

    def nodes(self, role: Role | None = None) -> list[Node]:
        """In order of attaching."""
        return [node for node in self._nodes.values() if role is None or node.role is role]

    def serving(self, role: Role) -> list[Node]:
        return [node for node in self._nodes.values() if node.role is role and node.serving]

    @property
    def layout(self) -> PageLayout | None:
        """Of every node; None while there is none."""
        return next((node.registration.layout for node in self._nodes.values()), None)

    @property
    def max_context(self) -> int | None:
        """Tokens of prompt and answer that some node of each role can take; None while there is none.

        Not that every node can take: one odd node would make the whole cluster small.
        """
        contexts = [[node.registration.max_context for node in self.nodes(role)] for role in self.roles]
        return min((max(ones) for ones in contexts if ones), default=None)

    def check(self, registration: Registration) -> None:
        """Raise Refused, naming the field and both values, when this node can fit no cluster, or not this one.
        Overloaded when there are too many already.

        A node of its role that is attached under the same id does not count: it would be replaced. One of the other
        role is another node, and keeps its id.
        """
        if registration.identity in self._replaced:
            raise Refused(f"a newer process is {registration.identity.node_id} now", reason="NODE_REPLACED")
        namesake = self._nodes.get(registration.identity.node_id)
        if namesake is not None and namesake.role is not registration.role:
            raise _refused("identity.node_id", namesake.node_id, f"an id that no {namesake.role} node has")
        others = [node for node in self._nodes.values() if node is not namesake]
        if len(others) >= MAX_NODES:
            told = f"{len(others)} other nodes are attached"
            raise Overloaded(told, reason="TOO_MANY_NODES", limit="nodes", value=str(MAX_NODES))
        layout = registration.layout
        _refuse("protocol_version", registration.protocol_version, PROTOCOL_VERSION)
        _sane(registration)
        _refuse("model", registration.model, self._model)
        _refuse("layout.fingerprint", layout.fingerprint, self._fingerprint)
        if others:
            expected = others[0].registration.layout
            if registration.role not in self.roles:
                raise _refused("role", str(registration.role), f"{' and '.join(self.roles)} nodes only")
            field_name = layout.mismatch(expected)
            if field_name is not None:
                _refuse(f"layout.{field_name}", getattr(layout, field_name), getattr(expected, field_name))
        _refuse("memory.page_bytes", registration.memory.page_bytes, layout.page_bytes)

    def replaced(self, identity: NodeIdentity) -> None:
        """A newer process has this one's node id: never take it in again, though it may not have heard why it left."""
        self._replaced.append(identity)

    def add(self, registration: Registration, link: Link) -> Node:
        """Take in a node that fits and whose id is free, and make it and its peers known to each other."""
        assert registration.identity.node_id not in self._nodes
        node = Node(registration, link, self._clock())
        self.roles = node.role.pools
        for other in self._nodes.values():
            if other.role is not node.role:
                other.link.send(PeerJoined(node.peer))
                link.send(PeerJoined(other.peer))
        self._nodes[node.node_id] = node
        return node

    def remove(self, node: Node) -> None:
        """Forget a node. `announce_left` is due when its requests have been dealt with."""
        assert self._nodes.get(node.node_id) is node
        del self._nodes[node.node_id]
        self._note_pools()

    def announce_left(self, node: Node) -> None:
        for other in self._nodes.values():
            if other.role is not node.role:
                other.link.send(PeerLeft(node.identity))

    def update(self, node: Node, stats: NodeStats) -> bool:
        """Take in a node's new counts; True when it thereby began or ceased to serve."""
        before = node.serving
        node.stats = stats
        node.head_room = stats.head_room
        self._note_pools()
        return node.serving != before

    def ask_drain(self, node: Node) -> None:
        node.drain_asked = True
        self._note_pools()

    def chosen(self, node_id: str) -> Node:
        """The node of a view that routing chose."""
        node = self._nodes[node_id]
        self._choices[node.role] += 1
        node.last_chosen = self._choices[node.role]
        return node

    def silent(self, seconds: float) -> list[Node]:
        """Nodes not heard of for so long."""
        now = self._clock()
        return [node for node in self._nodes.values() if now - node.heard > seconds]

    def missing(self, grace: float) -> list[Role]:
        """Roles no node has served in for longer than `grace` seconds, which a node that re-attaches may take."""
        now, since = self._clock(), self._empty_since
        return [role for role in self.roles if (began := since[role]) is not None and now - began > grace]

    def answer_room(self, prompt_tokens: int) -> int | None:
        """Tokens that the node with most room holds after a prompt; None while none is attached that answers."""
        rooms = [answer_room(node.registration) for node in self.nodes(self.roles[-1])]
        return max(rooms) - prompt_tokens if rooms else None

    def refusal(self, size: Size) -> InvalidField | None:
        """Why no attached node of some role could ever run a request; None when each role has one that can."""
        for role in self.roles:
            refusals = [(node, size.refusal(node.registration)) for node in self.nodes(role)]
            if refusals and all(refused for _, refused in refusals):
                return max(refusals, key=lambda pair: pair[0].registration.memory.num_pages)[1]
        return None

    def check_integrity(self) -> None:
        for node_id, node in self._nodes.items():
            assert node.node_id == node_id
            assert node.registration.layout == self.layout
            assert node.role in self.roles
            assert node.uncomputed.keys() <= node.rooms
            assert node.ungranted.keys() <= node.rooms
            assert node.overdue <= node.ungranted.keys()
        for role, since in self._empty_since.items():
            assert (since is None) == bool(self.serving(role))

    def _note_pools(self) -> None:
        for role in Role:
            if self.serving(role):
                self._empty_since[role] = None
            elif self._empty_since[role] is None:
                self._empty_since[role] = self._clock()


def _sane(registration: Registration) -> None:
    """Raise Refused for values that no node can have, before anything is computed from them or kept."""
    layout = registration.layout
    if layout.dtype not in DTYPE_BYTES:
        raise _refused("layout.dtype", layout.dtype, f"one of {', '.join(DTYPE_BYTES)}")
    for name, value in (
        ("layout.page_size", layout.page_size),
        ("layout.layers", layout.layers),
        ("layout.kv_heads", layout.kv_heads),
        ("layout.head_dim", layout.head_dim),
        ("memory.num_pages", registration.memory.num_pages),
        ("max_context", registration.max_context),
    ):
        if value < 1:
            raise _refused(name, value, "at least 1")
    if registration.memory.device not in DEVICES:
        raise _refused("memory.device", registration.memory.device, f"one of {', '.join(DEVICES)}")
    size = len(registration.agent_metadata)
    if size > MAX_AGENT_METADATA:
        raise _refused("agent_metadata", size, f"at most {MAX_AGENT_METADATA} bytes")


def _refuse(field_name: str, value: object, expected: object) -> None:
    if value != expected:
        raise _refused(field_name, value, str(expected))


def _refused(field_name: str, value: object, expected: str) -> Refused:
    message = f"{field_name} is {value!r}; in this cluster: {expected}"
    return Refused(message, field=field_name, value=str(value), expected=expected)
