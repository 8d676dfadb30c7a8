"""Who goes into the next forward, and how far: one throw-away `Adder` per pass, with three accounts in tokens.

    rem_input   how much to compute in this forward
    rem_chunk   how far one long prompt may advance (None: prompts are not cut)
    total       what memory can hold in the end, the growth of what is admitted counted in
    current     what memory can hold right now

`admit` locks the request's match while it decides, which lowers `total` and `current` by what the lock protects; a
refusal takes the lock back and changes nothing. What is admitted keeps its lock and is charged. No page is allocated
here. Pages of the match that are on the host are charged to `total` and `current` like pages to compute, and to
nothing else: they are copied to the device before the forward. It is all of them or no admission, since to compute
their tokens again would take as much memory.

Chunks end on page boundaries, except the one that ends the prompt, and one prompt at most is partly computed: the
continuation. It goes first, and when memory is too short for a page of it nobody else is admitted, so that what is
released collects until it fits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.journal import Accounts, Refusal
from engine.core.room_budget import CLIP_NEW_TOKENS
from engine.core.types import ceil_div
from engine.device.page_allocator import PageAllocator
from prefill_service.prefix_cache import Node, PrefixCache
from prefill_service.request import PrefillRequest

__all__ = ["Accounts", "Adder", "Attempt", "DecodeRow", "Verdict", "running_growth", "shortest_first_limit"]


class Verdict(enum.StrEnum):
    """What the next candidate may expect. Anything but CONTINUE ends the pass."""

    CONTINUE = "CONTINUE"
    NO_TOKEN = "NO_TOKEN"  # memory
    OTHER = "OTHER"  # a budget of this forward


@dataclass(frozen=True, slots=True)
class Attempt:
    """One decision about one request, in tokens. Refused: extend is 0."""

    request: PrefillRequest
    prefix: int  # already in pages, so not computed again
    wanted: int  # left to compute
    extend: int  # to compute in this forward
    chunked: bool  # extend < wanted
    verdict: Verdict
    before: Accounts
    after: Accounts
    need: int  # memory that must be there for it to be admitted at all,
    room: float  # and what there was once its own prefix was locked: need < room
    refusal: Refusal | None = None
    loaded: int = 0  # of the prefix, to be copied from the host first

    @property
    def short(self) -> float:
        """Tokens of memory that were missing; 0 or less: memory was not why it was refused."""
        return self.need + 1 - self.room


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A running decode request: its pages may grow until max_new tokens are generated."""

    max_new: int
    generated: int
    ignore_eos: bool = False


def running_growth(rows: Iterable[DecodeRow], ratio: float) -> float:
    """Tokens that running decode rows are expected to add; `ratio` is the share of max_new that is usual."""
    return sum(min(r.max_new - r.generated, CLIP_NEW_TOKENS) * (1.0 if r.ignore_eos else ratio) for r in rows)


class Adder:
    """`mixed` decode rows share the forward and grow by `growth` tokens: both 0 on a prefill node.

    decodes: whether requests stay here to decode. On a prefill node they do not, and each counts as generating one.
    """

    def __init__(
        self,
        cache: PrefixCache,
        allocator: PageAllocator,
        page_size: int,
        *,
        max_prefill_tokens: int,
        chunk_size: int | None = None,
        max_requests: int | None = None,
        decodes: bool = False,
        mixed: int = 0,
        growth: float = 0,
    ):
        self.admitted: list[Attempt] = []
        self.continuation: PrefillRequest | None = None  # partly computed when this forward is done
        self._cache = cache
        self._allocator = allocator
        self._page_size = page_size
        self._max_requests = max_requests
        self._decodes = decodes
        self._rem_input = max_prefill_tokens - mixed
        self._rem_chunk = None if chunk_size is None else chunk_size - mixed
        self._total_used = mixed + growth
        self._current_used = mixed
        self._loads: set[Node] = set()  # nodes on the host that what was admitted brings back

    def accounts(self) -> Accounts:
        memory = (self._allocator.available + self._cache.evictable) * self._page_size
        return Accounts(self._rem_input, self._rem_chunk, memory - self._total_used, memory - self._current_used)

    def holds(self, request: PrefillRequest) -> int:
        """Most memory that a request will ever keep from others, once admitted: what must be less than the pool."""
        growth = request.max_new if self._decodes else 1
        return self._ceil(request.length) + growth + self._page_size

    def short(self, request: PrefillRequest) -> float:
        """Tokens of memory that are missing for it to be admitted; 0 or less: none. Its match must be fresh."""
        node, _, _, _, need = self._asks(request)
        self._cache.lock(node)
        room = self.accounts().total
        self._cache.unlock(node)
        return need + 1 - room

    def give_back(self, growth: float) -> None:
        """A decode row leaves, and will not grow by so much. The token it had in this forward is given to nobody."""
        self._total_used -= growth

    def proceed(self, request: PrefillRequest, limit: int | None = None) -> Attempt:
        """Let the continuation advance, by at most `limit` tokens. Must come before any `admit`."""
        assert not self.admitted
        before = self.accounts()
        wanted = request.length - request.computed
        memory = min(before.total, before.current)
        need = min(wanted, self._page_size) - 1
        room = self._floor(int(memory))
        bounds = [bound for bound in (self._rem_chunk, limit) if bound is not None]
        most = min(room, *bounds)
        extend = wanted if self._ceil(wanted) <= most else max(0, self._floor(most))
        self.continuation = request if extend < wanted else None
        if extend == 0:
            refusal = Refusal.CHUNK if room else Refusal.MEMORY
            return _refused(request, request.computed, wanted, before, need, memory, refusal)
        return self._commit(request, request.computed, wanted, extend, before, need, memory)

    def admit(self, request: PrefillRequest, spare: int | None = None) -> Attempt:
        """Decide about a waiting request, whose match must be fresh. spare: it may hold less than so much memory."""
        before = self.accounts()
        node, prefix, wanted, loads, need = self._asks(request)
        if spare is not None and (held := self.holds(request)) >= spare:
            return _refused(request, prefix, wanted, before, held, spare, Refusal.SPARE)
        self._cache.lock(node)
        room = self.accounts().total
        extend, refusal = self._decide(prefix, wanted, need, room)
        if refusal is not None:
            self._cache.unlock(node)
            return _refused(request, prefix, wanted, before, need, room, refusal)
        request.node = node
        request.computed = prefix
        if extend < wanted:
            self.continuation = request
        self._loads.update(loads)
        return self._commit(request, prefix, wanted, extend, before, need, room, len(loads) * self._page_size)

    def _asks(self, request: PrefillRequest) -> tuple[Node, int, int, list[Node], int]:
        """(its match, tokens of that, tokens to compute, what comes back from the host, memory it needs)."""
        node = request.reusable(self._page_size)
        prefix = node.depth * self._page_size
        wanted = request.length - prefix
        loads = self._on_host(node)
        return node, prefix, wanted, loads, self._need(request, prefix, wanted) + len(loads) * self._page_size

    def _on_host(self, node: Node) -> list[Node]:
        """What the chain down to `node` has on the host, and nobody admitted before brings back."""
        found = []
        while node.host >= 0 and node not in self._loads:
            found.append(node)
            node = node.parent
        return found

    def _need(self, request: PrefillRequest, prefix: int, wanted: int) -> int:
        if not self._decodes:
            return wanted + 1 + self._page_size
        growth = min(max(request.max_new - request.generated, 0), CLIP_NEW_TOKENS)
        if request.generated:  # what has begun is admitted by an idle node, however long it may yet become
            idle = self._allocator.num_pages * self._page_size - prefix
            growth = min(growth, max(1, idle - 1 - wanted - self._page_size))
        return wanted + growth + self._page_size

    def _decide(self, prefix: int, wanted: int, need: int, room: float) -> tuple[int, Refusal | None]:
        """(tokens to compute, None) or (0, why not)."""
        if self._max_requests is not None and len(self.admitted) >= self._max_requests:
            return 0, Refusal.REQUESTS
        if need >= room:
            return 0, Refusal.MEMORY
        if self._rem_chunk is None:
            if self.admitted and self._ceil(wanted) >= self._rem_input:
                return 0, Refusal.INPUT
            return wanted, None
        if self._ceil(wanted) <= self._rem_chunk:
            return wanted, None
        extend = self._floor(prefix + self._floor(self._rem_chunk)) - prefix
        if extend <= 0:
            return 0, Refusal.CHUNK
        if self.continuation is not None:
            return 0, Refusal.CUT
        return extend, None

    def _commit(
        self,
        request: PrefillRequest,
        prefix: int,
        wanted: int,
        extend: int,
        before: Accounts,
        need: int,
        room: float,
        loaded: int = 0,
    ) -> Attempt:
        assert 0 < extend <= wanted
        request.end = prefix + extend
        charge = self._ceil(extend)
        self._rem_input -= charge
        if self._rem_chunk is not None:
            self._rem_chunk -= charge
        growth = min(request.max_new, CLIP_NEW_TOKENS) if self._decodes else 1
        self._current_used += loaded + charge + self._page_size
        self._total_used += loaded + charge + self._page_size + (growth if extend == wanted else 0)
        after = self.accounts()
        chunked, verdict = extend < wanted, _state(after)
        attempt = Attempt(request, prefix, wanted, extend, chunked, verdict, before, after, need, room, loaded=loaded)
        self.admitted.append(attempt)
        return attempt

    def _ceil(self, tokens: int) -> int:
        return ceil_div(tokens, self._page_size) * self._page_size

    def _floor(self, tokens: int) -> int:
        return tokens // self._page_size * self._page_size


def _refused(
    request: PrefillRequest, prefix: int, wanted: int, at: Accounts, need: int, room: float, refusal: Refusal
) -> Attempt:
    verdict = Verdict.NO_TOKEN if refusal in (Refusal.MEMORY, Refusal.SPARE) else Verdict.OTHER
    return Attempt(request, prefix, wanted, 0, False, verdict, at, at, need, room, refusal)


def _state(accounts: Accounts) -> Verdict:
    if accounts.total <= 0 or accounts.current <= 0:
        return Verdict.NO_TOKEN
    if accounts.rem_input <= 0 or (accounts.rem_chunk is not None and accounts.rem_chunk <= 0):
        return Verdict.OTHER
    return Verdict.CONTINUE


def shortest_first_limit(queue: Iterable[PrefillRequest], left: int, budget: int, page_size: int) -> int | None:
    """How many of `budget` tokens a continuation with `left` to compute may take under shortest-prefill-first.

    Sets aside what the shorter requests at the head of the queue need, one page excepted. None: no limit.
    """
    if budget < 2 * page_size:
        return None
    reserved = 0
    for request in queue:
        charge = ceil_div(request.uncached, page_size) * page_size
        if request.uncached >= left or reserved + charge > budget - page_size:
            break
        reserved += charge
    return (budget - reserved) // page_size * page_size if reserved else None
