"""Which nodes are let in, what they hear of each other, and what the registry makes of their reports."""

from __future__ import annotations

import dataclasses

import pytest

from bootstrap.registry import Node, Registry
from engine.core.clock import ManualClock
from engine.core.errors import InvalidField, Overloaded, Refused
from engine.core.messages import CacheDelta, NodeStats, PeerJoined, PeerLeft, Registration
from engine.core.types import Role
from tests.helpers.front_door import FINGERPRINT, MODEL, SERVING, RecordingLink, registration


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(50.0)


@pytest.fixture
def registry(clock: ManualClock) -> Registry:
    return Registry(MODEL, FINGERPRINT, clock)


def add(registry: Registry, entry: Registration) -> tuple[Node, RecordingLink]:
    link = RecordingLink()
    registry.check(entry)
    node = registry.add(entry, link)
    registry.check_integrity()
    return node, link


@pytest.mark.parametrize(
    ("change", "field", "theirs", "ours"),
    [
        ({"page_size": 16}, "layout.page_size", "16", "4"),
        ({"dtype": "float16"}, "layout.dtype", "float16", "float32"),
        ({"fingerprint": "e" * 32}, "layout.fingerprint", "e" * 32, FINGERPRINT),
        ({"model": "other"}, "model", "other", MODEL),
        ({"protocol_version": 2}, "protocol_version", "2", "1"),
    ],
)
def test_a_node_that_does_not_fit(
    registry: Registry, change: dict[str, object], field: str, theirs: str, ours: str
) -> None:
    add(registry, registration(Role.PREFILL))
    with pytest.raises(Refused) as refused:
        registry.check(registration(Role.DECODE, **change))  # type: ignore[arg-type]
    assert refused.value.metadata == {"field": field, "value": theirs, "expected": ours}


def test_choices_are_counted_by_pool(registry: Registry) -> None:
    prefill, _ = add(registry, registration(Role.PREFILL))
    decode, _ = add(registry, registration(Role.DECODE))
    for _ in range(3):
        registry.chosen(decode.node_id)
    registry.chosen(prefill.node_id)
    assert (prefill.last_chosen, decode.last_chosen) == (1, 3)


def test_a_pool_that_is_not_made_of_such_pages(registry: Registry) -> None:
    entry = registration(Role.PREFILL)
    wrong = dataclasses.replace(entry, memory=dataclasses.replace(entry.memory, page_bytes=100))
    with pytest.raises(Refused) as refused:
        registry.check(wrong)
    assert refused.value.metadata["field"] == "memory.page_bytes"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"page_size": 0}, "layout.page_size"),
        ({"num_pages": 0}, "memory.num_pages"),
        ({"max_context": 0}, "max_context"),
        ({"dtype": "int3"}, "layout.dtype"),
        ({"device": "x" * 5000}, "memory.device"),
        ({"agent_metadata": b"x" * ((1 << 20) + 1)}, "agent_metadata"),
    ],
)
def test_values_no_node_can_have(registry: Registry, change: dict[str, object], field: str) -> None:
    with pytest.raises(Refused) as refused:
        registry.check(registration(Role.PREFILL, **change))  # type: ignore[arg-type]
    assert refused.value.metadata["field"] == field


def test_the_first_node_fixes_the_layout_and_the_last_one_takes_it_away(registry: Registry) -> None:
    assert registry.layout is None
    node, _ = add(registry, registration(Role.PREFILL, page_size=4))
    registry.remove(node)
    add(registry, registration(Role.PREFILL, page_size=8))
    assert registry.layout is not None
    assert registry.layout.page_size == 8


def test_a_node_may_come_back_with_another_layout_when_it_was_alone(registry: Registry) -> None:
    add(registry, registration(Role.PREFILL, page_size=4))
    registry.check(registration(Role.PREFILL, page_size=8, incarnation="2"))


def test_a_nodes_id_is_not_another_roles(registry: Registry) -> None:
    """A decode node by the id of a live prefill node would take it down, and be taken down by it in turn."""
    add(registry, registration(Role.PREFILL, "n1"))
    with pytest.raises(Refused) as refused:
        registry.check(registration(Role.DECODE, "n1", incarnation="2"))
    assert refused.value.metadata == {
        "field": "identity.node_id",
        "value": "n1",
        "expected": "an id that no prefill node has",
    }
    registry.check(registration(Role.PREFILL, "n1", incarnation="2"))


def test_peers_are_announced_to_the_other_role_only(registry: Registry) -> None:
    prefill, prefill_link = add(registry, registration(Role.PREFILL, "p1"))
    _, second_link = add(registry, registration(Role.PREFILL, "p2"))
    decode, decode_link = add(registry, registration(Role.DECODE, "d1"))
    assert prefill_link.sent == second_link.sent == [PeerJoined(decode.peer)]
    assert [c.peer.identity.node_id for c in decode_link.of(PeerJoined)] == ["p1", "p2"]
    registry.remove(prefill)
    registry.announce_left(prefill)
    assert decode_link.of(PeerLeft) == [PeerLeft(prefill.identity)]
    assert not second_link.of(PeerLeft)


def test_serving_is_what_the_node_says_unless_it_was_asked_to_drain(registry: Registry) -> None:
    node, _ = add(registry, registration(Role.PREFILL))
    assert not registry.serving(Role.PREFILL)
    assert registry.update(node, SERVING)
    assert registry.serving(Role.PREFILL) == [node]
    assert not registry.update(node, SERVING)
    registry.ask_drain(node)
    assert not registry.serving(Role.PREFILL)
    registry.check_integrity()


def test_a_missing_role_is_named_after_the_grace(registry: Registry, clock: ManualClock) -> None:
    clock.advance(5.0)
    assert registry.missing(1.0) == [Role.PREFILL, Role.DECODE]
    prefill, _ = add(registry, registration(Role.PREFILL))
    decode, _ = add(registry, registration(Role.DECODE))
    for node in (prefill, decode):
        registry.update(node, SERVING)
    assert registry.missing(1.0) == []
    registry.remove(decode)
    assert registry.missing(1.0) == []
    clock.advance(1.5)
    assert registry.missing(1.0) == [Role.DECODE]


def test_the_context_is_what_some_node_of_each_role_can_take(registry: Registry) -> None:
    add(registry, registration(Role.PREFILL, max_context=512))
    add(registry, registration(Role.DECODE, max_context=256))
    add(registry, registration(Role.PREFILL, "odd", max_context=1))
    assert registry.max_context == 256


def test_cached_pages_follow_the_deltas(registry: Registry) -> None:
    node, _ = add(registry, registration(Role.PREFILL))
    node.apply(CacheDelta((b"a", b"b"), ()))
    node.apply(CacheDelta((b"c",), (b"a",)))
    assert node.cached == {b"b", b"c"}
    node.apply(CacheDelta((b"d",), (), reset=True))
    assert node.cached == {b"d"}


def test_a_node_has_a_cached_page_for_each_key(registry: Registry) -> None:
    node, _ = add(registry, dataclasses.replace(registration(Role.PREFILL, num_pages=2), host_pages=1))
    node.apply(CacheDelta((b"a", b"b", b"c"), ()))
    node.apply(CacheDelta((b"d",), (b"a",)))
    with pytest.raises(InvalidField) as refused:
        node.apply(CacheDelta((b"e",), ()))
    limit = "at most 3 with those added before, one a page"
    assert refused.value.metadata == {"field": "cache_delta.added", "value": "4", "limit": limit}


def test_so_many_nodes_and_no_more(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootstrap.registry.MAX_NODES", 2)
    add(registry, registration(Role.PREFILL))
    add(registry, registration(Role.DECODE))
    with pytest.raises(Overloaded) as refused:
        registry.check(registration(Role.DECODE, "third"))
    assert (refused.value.reason, refused.value.metadata) == ("TOO_MANY_NODES", {"limit": "nodes", "value": "2"})
    registry.check(registration(Role.DECODE, incarnation="2"))  # in its own place


def test_other_front_doors_requests_count_as_queued(registry: Registry) -> None:
    node, _ = add(registry, registration(Role.PREFILL))
    registry.update(node, NodeStats(queued_tokens=500, serving=True))
    assert node.prefill_view().queued_tokens == 500


def test_silent_nodes(registry: Registry, clock: ManualClock) -> None:
    node, _ = add(registry, registration(Role.PREFILL))
    clock.advance(5.0)
    assert registry.silent(5.0) == []
    clock.advance(0.1)
    assert registry.silent(5.0) == [node]
