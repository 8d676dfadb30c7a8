"""Which node is chosen, by what the front door knows of the nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container

import pytest

from bootstrap.routing import DecodeView, PrefillView, cached_pages, choose_decode, choose_prefill
from engine.core.page_keys import page_keys

PAGE = 16
PROMPT = range(1000)
KEYS = page_keys(PROMPT, PAGE)


def prefill(
    node_id: str,
    *,
    cached: Container[bytes] = frozenset(),
    queued: int = 0,
    rate: float = 1000.0,
    requests: int = 0,
    last: int = 0,
) -> PrefillView:
    return PrefillView(node_id, cached, queued, rate, requests, last)


def chosen(*nodes: PrefillView, routing_key: str = "") -> str:
    view = choose_prefill(nodes, len(PROMPT), KEYS, PAGE, routing_key)
    assert view is not None
    return view.node_id


def test_no_node() -> None:
    assert choose_prefill([], 10, (), PAGE) is None
    assert choose_decode([]) is None


def test_cached_pages_are_found_by_binary_search() -> None:
    for count in (0, 1, 30, len(KEYS)):
        assert cached_pages(KEYS, frozenset(KEYS[:count])) == count


def test_a_cached_prefix_wins_among_idle_nodes() -> None:
    assert chosen(prefill("cold"), prefill("warm", cached=frozenset(KEYS[:30]))) == "warm"


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    warm = prefill("warm", cached=frozenset(KEYS[:30]), queued=5000)
    assert chosen(prefill("cold"), warm) == "cold"


def test_a_faster_node_wins_with_equal_queues() -> None:
    assert chosen(prefill("slow", rate=500, queued=100), prefill("fast", rate=2000, queued=100)) == "fast"


def test_a_node_of_unknown_rate_is_taken_to_be_as_fast_as_the_others() -> None:
    assert chosen(prefill("old", rate=3000, queued=2000), prefill("new", rate=0)) == "new"
    assert chosen(prefill("old", rate=3000), prefill("new", rate=0, queued=2000)) == "old"


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf, -1.0, 5e-324, 1e308])
def test_a_node_that_says_nonsense_of_its_rate_holds_up_nobody(rate: float) -> None:
    for nodes in ([prefill("odd", rate=rate)], [prefill("odd", rate=rate), prefill("a", rate=100.0), prefill("b")]):
        assert chosen(*nodes) in {node.node_id for node in nodes}


def test_a_node_that_is_passed_over_counts_as_faster_and_faster() -> None:
    for last, first in ((0, "slow"), (64, "slow"), (80, "fast")):
        nodes = prefill("fast", rate=4000, last=192), prefill("slow", rate=1000, last=last)
        assert chosen(*nodes) == first, "twice as fast for each 32 choices that went by, for each of the two"


def test_a_node_that_is_passed_over_counts_as_no_faster_than_the_fastest() -> None:
    warm = prefill("warm", rate=4000, cached=frozenset(KEYS[:30]), last=10**9)
    assert chosen(warm, prefill("cold", rate=1000), prefill("new", rate=0)) == "warm"


def test_near_ties_go_to_the_node_with_fewer_requests_then_to_the_one_chosen_longest_ago() -> None:
    assert chosen(prefill("a", rate=1010, requests=2), prefill("b", requests=1)) == "b"
    assert chosen(prefill("a", rate=1010, last=7), prefill("b", last=3)) == "b"


def test_the_guard_sets_aside_a_node_with_far_more_requests() -> None:
    everything = frozenset(KEYS)
    assert chosen(prefill("hot", cached=everything, requests=8), prefill("cold")) == "hot"
    assert chosen(prefill("hot", cached=everything, requests=9), prefill("cold")) == "cold"


def test_a_routing_key_keeps_its_node() -> None:
    nodes = [prefill(f"node-{i}") for i in range(4)]
    keys = [f"session-{i}" for i in range(200)]
    before = {key: chosen(*nodes, routing_key=key) for key in keys}
    assert all(count > 20 for count in Counter(before.values()).values()), "keys spread over all nodes"
    after = {key: chosen(*nodes[:-1], routing_key=key) for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert all(before[key] == "node-3" for key in moved), "only the keys of the node that left move"


def test_a_routing_key_gives_way_to_the_guard() -> None:
    nodes = [prefill("a"), prefill("b")]
    home = chosen(*nodes, routing_key="k")
    crowded = [prefill(node.node_id, requests=50 if node.node_id == home else 0) for node in nodes]
    assert chosen(*crowded, routing_key="k") != home


def decode(
    node_id: str, room: int, *, required: int = 50, rows: int | None = None, idle: bool = False, last: int = 0
) -> DecodeView:
    return DecodeView(node_id, room, required, rows, idle, last)


def chosen_decode(*nodes: DecodeView) -> str | None:
    view = choose_decode(nodes)
    return view.node_id if view else None


def test_decode_goes_to_most_head_room() -> None:
    assert chosen_decode(decode("a", 100), decode("b", 300), decode("c", 200)) == "b"


def test_decode_waits_when_no_node_has_room() -> None:
    assert chosen_decode(decode("a", 49), decode("b", 300, rows=0)) is None


def test_what_a_request_requires_may_differ_from_node_to_node() -> None:
    assert chosen_decode(decode("a", 100, required=101), decode("b", 60)) == "b"


def test_an_idle_decode_node_may_always_be_asked() -> None:
    assert chosen_decode(decode("a", 10, idle=True)) == "a"


def test_equal_decode_nodes_take_turns() -> None:
    assert chosen_decode(decode("a", 100, last=5), decode("b", 100, last=2)) == "b"
