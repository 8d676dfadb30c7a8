"""Which node a request goes to. Pure functions of what the front door knows of the nodes.

Prefill: the node with the least estimated time to first token, (uncached tokens queued there + this request's
uncached tokens there) / the node's rate. With a routing key: the node that rendezvous hashing gives the key to, so
that a key keeps its node while others come and go. Either way a balance guard sets aside nodes that have far more
requests than the least loaded one, since estimates and keys may both be wrong.

Decode: the node with most head-room among those with room, bound as late as possible.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

__all__ = ["DecodeView", "PrefillView", "cached_pages", "choose_decode", "choose_prefill"]

GUARD_FACTOR = 2.0  # a node may have this many times the requests of the least loaded one,
GUARD_SLACK = 8  # and this many on top
NEAR_TIE = 1.05  # estimates within 5 % are equal: rates are measurements


@dataclass(frozen=True, slots=True)
class PrefillView:
    """What matters of one prefill node that may be chosen."""

    node_id: str
    cached: Container[bytes]  # page keys; the cached ones of any chain are a prefix of it
    queued_tokens: int  # uncached tokens not yet computed
    tokens_per_second: float  # 0: not known yet
    requests: int  # submitted and not yet computed
    last_chosen: int  # a counter that grows with each choice


@dataclass(frozen=True, slots=True)
class DecodeView:
    """What matters of one decode node that may be chosen."""

    node_id: str
    head_room: int  # tokens, less those asked for and not yet granted
    required: int  # tokens of head-room without which it would not grant this request
    rows: int | None  # requests it may still take; None: no limit
    idle: bool  # nothing there, and nothing on its way
    last_chosen: int


def cached_pages(keys: Sequence[bytes], cached: Container[bytes]) -> int:
    """Pages of a chain that a node has cached. O(log pages)."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in cached:
            low = middle + 1
        else:
            high = middle
    return low


def uncached_tokens(prompt_tokens: int, keys: Sequence[bytes], page_size: int, cached: Container[bytes]) -> int:
    """Tokens a node would compute: at least one, since the last one is never taken from the cache."""
    return max(1, prompt_tokens - cached_pages(keys, cached) * page_size)


def choose_prefill(
    nodes: Sequence[PrefillView], prompt_tokens: int, keys: Sequence[bytes], page_size: int, routing_key: str = ""
) -> PrefillView | None:
    """The node to submit to; None when there is none."""
    if not nodes:
        return None
    limit = GUARD_FACTOR * min(node.requests for node in nodes) + GUARD_SLACK
    nodes = [node for node in nodes if node.requests <= limit]
    if routing_key:
        return max(nodes, key=lambda node: _affinity(routing_key, node.node_id))
    # What a node says of its rate may be anything; of NaN, say, there is no least.
    rates = {n.node_id: n.tokens_per_second for n in nodes if 0 < n.tokens_per_second < math.inf}
    usual = sum(rates.values()) / len(rates) if rates else 1.0
    seconds = {
        node.node_id: (node.queued_tokens + uncached_tokens(prompt_tokens, keys, page_size, node.cached))
        / rates.get(node.node_id, usual)
        for node in nodes
    }
    best = min(seconds.values())
    near = [node for node in nodes if seconds[node.node_id] <= best * NEAR_TIE]
    return min(near, key=lambda node: (node.requests, node.last_chosen))


def choose_decode(nodes: Sequence[DecodeView]) -> DecodeView | None:
    """The node to ask for room; None while none has it. An idle node may always be asked."""
    able = [
        node
        for node in nodes
        if node.idle or (node.head_room >= node.required and (node.rows is None or node.rows > 0))
    ]
    return max(able, key=lambda node: (node.head_room, -node.last_chosen), default=None)


def _affinity(routing_key: str, node_id: str) -> bytes:
    return hashlib.blake2b(node_id.encode(), key=hashlib.blake2b(routing_key.encode()).digest(), digest_size=8).digest()
