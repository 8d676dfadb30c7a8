"""Which node a request goes to. Pure functions of what the front door knows of the nodes.

Prefill: the node with the least estimated time to first token, (uncached tokens queued there + this request's
uncached tokens there) / the node's rate. A node measures its rate while it computes; one that is given nothing would
keep a rate of a bad moment for good, so the longer it is passed over, the faster it is taken to be.

With a routing key: the node that rendezvous hashing gives the key to, so that a key keeps its node while others come
and go. Either way a balance guard sets aside nodes that have far more requests than the least loaded one, since
estimates and keys may both be wrong.

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
PASSED_OVER = 32  # a node that was passed over so many times for each node of its pool counts as twice as fast


@dataclass(frozen=True, slots=True)
class PrefillView:
    """What matters of one prefill node that may be chosen."""

    node_id: str
    cached: Container[bytes]  # page keys; the cached ones of any chain are a prefix of it
    queued_tokens: int  # uncached tokens not yet computed
    tokens_per_second: float  # 0: not known yet
    requests: int  # submitted and not yet computed
    last_chosen: int  # number of the choice that was this node, counted over its pool; 0: none yet


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
    rates = _rates(nodes)
    seconds = {
        node.node_id: (node.queued_tokens + uncached_tokens(prompt_tokens, keys, page_size, node.cached))
        / rates[node.node_id]
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


def _rates(nodes: Sequence[PrefillView]) -> dict[str, float]:
    """Tokens a second to reckon with, of each node: none more than the fastest has measured.

    So of idle nodes one that is k times slower than the fastest gets one request in log2(k) * PASSED_OVER * nodes.
    """
    # What a node says of its rate may be anything; of NaN, say, there is no least.
    known = {n.node_id: n.tokens_per_second for n in nodes if 0 < n.tokens_per_second < math.inf}
    fastest = max(known.values(), default=1.0)
    usual = sum(known.values()) / len(known) if known else fastest
    newest = max(node.last_chosen for node in nodes)
    doubled = {node.node_id: (newest - node.last_chosen) / (len(nodes) * PASSED_OVER) for node in nodes}
    return {name: min(fastest, known.get(name, usual) * 2 ** min(times, 64)) for name, times in doubled.items()}


def _affinity(routing_key: str, node_id: str) -> bytes:
    return hashlib.blake2b(node_id.encode(), key=hashlib.blake2b(routing_key.encode()).digest(), digest_size=8).digest()
