"""A live request, its attempts, and where its time went. State of the front door, on its one thread."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from bootstrap.fit import Size
from bootstrap.merge import TokenMerge
from bootstrap.registry import Node
from engine.core.errors import KVRelayError
from engine.core.handoff import HandoffState
from engine.core.sampling import FinishReason, SamplingParams, StoppingParams
from engine.core.types import RoomKey, TokenOutput

__all__ = ["Ask", "Attempt", "LiveRequest", "Phase", "Timing"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants of the nodes: checked, tokenized, every default filled in."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    priority: int | None = None
    routing_key: str = ""
    cache_salt: str = ""
    ttft_target: float | None = None  # seconds from arrival to token 0; None: as the node is set
    deadline: float | None = None  # on the front door's clock
    resumed: tuple[int, ...] = ()  # tokens of the answer that an earlier stream has delivered
    client: str | None = None  # name of the API key it came with; None where none is needed

    @property
    def owned_id(self) -> tuple[str | None, str]:
        """By which it is found while it lives: two clients may choose the same id, and know nothing of each other."""
        return self.client, self.request_id

    @property
    def size(self) -> Size:
        """Of the first attempt at it."""
        return Size(
            len(self.token_ids) + len(self.resumed),
            self.stopping.max_new_tokens - len(self.resumed),
            resumed=bool(self.resumed),
        )


class Phase(enum.StrEnum):
    """`QUEUE`, `GRANT_WAIT` and `DECODE` are measured here, the rest is what nodes report."""

    QUEUE = "queue"
    GRANT_WAIT = "grant_wait"
    PREFILL_WAIT = "prefill_wait"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    DECODE = "decode"


@dataclass(slots=True)
class Timing:
    """Seconds, summed over attempts."""

    phases: dict[Phase, float] = field(default_factory=dict)  # without those that are not known
    relayed_bytes: int = 0
    relay: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    prefill_node: str = ""  # of the last attempt
    decode_node: str = ""

    def add(self, phase: Phase, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request from arrival to its end, over all its attempts."""

    ask: Ask
    order: tuple[bool, int, int]  # in the bootstrap queue, smaller first: no priority, signed priority, arrival
    arrived: float
    wake: Callable[[], None]  # called when there is something to `take`, or the request has ended
    timing: Timing = field(default_factory=Timing)
    merge: TokenMerge = field(init=False)
    output: list[int] = field(init=False)  # token ids in order: what a new attempt goes on from
    cached_tokens: int | None = None  # prompt tokens the first prefill node had cached; None: no node has begun
    attempt: Attempt | None = None
    attempts: int = 0
    failures: int = 0  # attempts that failed before they made a token
    losses: int = 0  # attempts that failed because a node was lost while others served
    avoid: set[str] = field(default_factory=set)  # node ids on which attempts failed
    doubted: set[str] = field(default_factory=set)  # node ids of either end of transfers that failed
    failure: KVRelayError | None = None  # of the last attempt that failed
    finish: FinishReason | None = None  # set when the request ended well, or was aborted
    error: KVRelayError | None = None  # set when it ended badly
    _ready: list[TokenOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.merge = TokenMerge(len(self.ask.resumed))
        self.output = list(self.ask.resumed)

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def state(self) -> HandoffState:
        return self.attempt.state if self.attempt else HandoffState.QUEUED

    @property
    def made(self) -> int:
        """Tokens of the answer that were made for this request, and not for an earlier stream of it."""
        return len(self.output) - len(self.ask.resumed)

    def give(self, token: TokenOutput) -> None:
        self.output.append(token.token_id)
        self._ready.append(token)

    def take(self) -> list[TokenOutput]:
        """Tokens that came since the last call, in order."""
        ready, self._ready = self._ready, []
        return ready


@dataclass(slots=True, eq=False)
class Attempt:
    """One try at one request: one room, one prefill node, one decode node. A unified node is both."""

    key: RoomKey
    request: LiveRequest
    token_ids: tuple[int, ...]  # the prompt and what earlier attempts generated
    first_index: int  # how many those were
    started: float
    since: float  # start of the present phase; while decoding, of the wait for the next token
    state: HandoffState = HandoffState.QUEUED
    prefill: Node | None = None  # None: not chosen yet, or gone when it was no longer needed
    decode: Node | None = None  # None: not asked yet
    asked: float = 0.0  # when the decode node was asked
    decoding: float | None = None  # when the decode node's first token came
    quiesced: bool = False  # the prefill node has said that it is done writing

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those that have a part in it, each once."""
        return tuple(dict.fromkeys(node for node in (self.prefill, self.decode) if node is not None))

    @property
    def unified(self) -> bool:
        """One node does all of it: nothing is granted and nothing is written elsewhere."""
        return self.prefill is not None and self.prefill is self.decode

    @property
    def size(self) -> Size:
        new_tokens = self.request.ask.stopping.max_new_tokens - self.first_index
        return Size(len(self.token_ids), new_tokens, resumed=self.first_index > 0)
