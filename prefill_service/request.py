"""One request as a prefill node keeps it. The scheduler is its only writer; the engine loop reads.

    BOOTSTRAP ──grant──► WAITING ──admitted──► RUNNING ──last chunk done──► IN_FLIGHT ──writes terminal──► ENDED
        └─────abort────────┴──────────► ENDED     └──────abort──────────────►┘ (marked `aborted`)

On a node that also decodes, a request is IN_FLIGHT while it does, and goes back to WAITING if retracted or preempted.

Page table of an admitted request, whose KV is known up to `computed`:

    pages[: node.depth]   in the cache, kept by this request's one lock on `node`
    pages[node.depth :]   private, owned by `key` in the allocator: being computed, the partial last page, or all of
                          them where the prefix cache is off
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from engine.core.lifetime import Timeline
from engine.core.page_keys import page_keys
from engine.core.types import PrefillTask, RoomKey
from prefill_service.prefix_cache import Node

__all__ = ["PrefillRequest", "RequestState", "sibling_key"]


class RequestState(enum.StrEnum):
    BOOTSTRAP = "bootstrap"  # submitted; no decode node has granted pages yet
    WAITING = "waiting"  # granted; in the queue the policy orders
    RUNNING = "running"  # admitted, and chunks are left to compute
    IN_FLIGHT = "in-flight"  # nothing left to compute; pages stay until every write from them is terminal
    ENDED = "ended"  # holds nothing


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """`keys` is the task's chain, or empty where the prefix cache is off: then nothing matches or is inserted."""

    task: PrefillTask
    keys: tuple[bytes, ...]
    sibling: bytes | None  # equal for requests that deduplication treats as siblings; None: has none
    priority: float | None  # None: none given, or priorities are off
    node: Node  # deepest match of the last pass; once admitted, the node this request locks
    times: Timeline
    arrival_tokens: int = 0  # the node's count of tokens processed when this arrived
    deadline: float = math.inf  # for its first token, on the scheduler's clock
    queue_time: float = 0.0  # when it entered the waiting queue
    state: RequestState = RequestState.BOOTSTRAP
    aborted: bool = False
    writes_terminal: bool = False  # no write is posted, none will be
    deprioritized: bool = False  # in the last pass that matched
    matched: int = 0  # tokens found cached in that pass, at most length - 1
    cached_tokens: int = 0  # tokens that were not computed, fixed at admission
    computed: int = 0  # tokens whose KV is in the pages
    end: int = 0  # where the chunk in the running forward ends
    chunks: int = 0  # forwards that computed a part of it
    sent: int = 0  # leading pages that were named to the sender
    pages: list[int] = field(default_factory=list)
    length: int = field(init=False)  # tokens to prefill

    def __post_init__(self) -> None:
        self.length = len(self.task.token_ids)

    @property
    def key(self) -> RoomKey:
        return self.task.key

    @property
    def max_new(self) -> int:
        """Tokens to generate, those of earlier attempts included."""
        return self.task.stopping.max_new_tokens

    @property
    def generated(self) -> int:
        """Tokens of the answer that earlier attempts generated; they are the end of token_ids."""
        return self.task.first_index

    @property
    def uncached(self) -> int:
        """Tokens left to compute, as far as is known: at least 1 until the last chunk is done."""
        return self.length - (self.computed or self.matched)

    @property
    def private_pages(self) -> list[int]:
        return self.pages[self.node.depth :]

    def wait_again(self, task: PrefillTask, keys: tuple[bytes, ...]) -> None:
        """Forget what was computed: whoever calls has given pages and lock back."""
        self.task, self.keys, self.length = task, keys, len(task.token_ids)
        self.state = RequestState.WAITING
        self.deprioritized = False
        self.matched = self.computed = self.end = self.chunks = self.sent = 0
        self.pages = []

    def observe(self, node: Node, page_size: int) -> None:
        """Note the deepest match. At least the last token is computed, since its logits are wanted."""
        self.node = node
        self.matched = min(node.depth * page_size, self.length - 1)

    def reusable(self, page_size: int) -> Node:
        """Deepest match that leaves a token to compute, so at most page_floor(length - 1) tokens."""
        return self.node if self.node.depth * page_size < self.length else self.node.parent


def sibling_key(task: PrefillTask, tokens: int) -> bytes | None:
    """Name of the first `tokens` tokens (and extra key) of a task; None when it is shorter, or tokens < 1."""
    if not 0 < tokens <= len(task.token_ids):
        return None
    return page_keys(task.token_ids[:tokens], tokens, task.extra_key)[0]
