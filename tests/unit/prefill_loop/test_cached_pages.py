"""A prefill engine announces what it has cached, and moves it to host memory and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.loop import FATAL_FAILURES
from engine.core.messages import CacheDelta, LinkUp
from engine.core.page_keys import page_keys
from engine.device.kv_pool import KVPool
from prefill_service import announce
from prefill_service.tier_copier import TierCopier
from tests.helpers.engines import PAGE, prefill_engine
from tests.helpers.prefill_rooms import CHUNK, Pages, Prefill, answer, arrived, failed, key_of, prompt, rest, submit
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import LocalNode

# ---- the cache is announced ----


def test_a_bootstrap_learns_what_is_cached(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = submit(prompt(30))
    p.tell(link, asked, grants.grant(asked))
    rest(p)
    known: set[bytes] = set()
    for delta in link.of(CacheDelta):
        known = (set() if delta.reset else known) - set(delta.removed) | set(delta.added)
    assert known == set(asked.task.page_keys)
    monkeypatch.setattr(announce, "KEYS_A_MESSAGE", 3)
    new, empty = RecordingLink(), RecordingLink()
    p.tell(new, LinkUp())
    deltas = new.of(CacheDelta)
    assert [len(delta.added) for delta in deltas] == [3, 3, 1]
    assert [delta.reset for delta in deltas] == [True, False, False]
    assert tuple(key for delta in deltas for key in delta.added) == asked.task.page_keys, "parents first"
    for i in range(4):  # fills the pool: what is oldest leaves, and both are told
        more = submit(prompt(30, 50 * i))
        p.tell(link, more, grants.grant(more))
        rest(p)
    for one in (link, new):
        known = set()
        for delta in one.of(CacheDelta):
            known = (set() if delta.reset else known) - set(delta.removed) | set(delta.added)
        assert known == set(p.engine._cache.keys())
        assert any(delta.removed for delta in one.of(CacheDelta))
    with prefill_engine(4, chunk_size=CHUNK) as fresh:
        fresh.tell(empty, LinkUp())
    assert empty.reports == [CacheDelta((), (), reset=True)], "an empty cache is said to be so"


# ---- the host tier ----

WITH_HOST = pytest.mark.parametrize("p", [64], indirect=True, ids=["host"])


def kept_away(p: Prefill) -> int:
    return p.stats.host_pages_cached  # type: ignore[no-any-return]


@WITH_HOST
def test_pages_come_back_from_the_host_and_the_answer_is_the_same(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages
) -> None:
    """Five prompts of 30 tokens, each with 7 whole pages, take turns in a pool of 24 pages."""
    prompts = [prompt(30, 50 * i) for i in range(5)]
    arrivals: list[list[bytes]] = []
    for token_ids in prompts * 2:
        asked = submit(token_ids)
        grant = grants.grant(asked)
        p.tell(link, asked, grant)
        rest(p)
        (token,) = link.tokens(key_of(asked))
        assert token.token_id == answer(token_ids)
        arrived(d, key_of(asked))
        arrivals.append([d.pool.pages[page].tobytes() for page in grant.pages[:7]])
    first, second = arrivals[:5], arrivals[5:]
    assert first == second, "what is sent from loaded pages is what was computed, byte by byte"
    found = [report.cached_tokens for output in link.outputs for report in output.admitted]
    assert found == [0] * 5 + [28] * 5
    assert p.stats.cached_tokens_total == 5 * 28
    assert p.stats.host_hit_tokens_total >= 3 * 28
    assert kept_away(p) > 0
    assert p.stats.host_pages_free + kept_away(p) == p.stats.host_pages_total == 64
    known: set[bytes] = set()
    for delta in link.of(CacheDelta):
        assert not delta.removed, "both tiers together have room for all"
        known |= set(delta.added)
    assert known == {key for token_ids in prompts for key in page_keys(token_ids, PAGE)}


@WITH_HOST
def test_loaded_pages_are_there_before_they_are_sent_or_computed_on(
    p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        asked = submit(prompt(30, 50 * i))
        p.tell(link, asked, grants.grant(asked))
        rest(p)
    again = submit(prompt(30, 0))
    assert p.engine._cache.match(again.task.page_keys).host >= 0
    done: list[str] = []
    for owner, name in ((p.engine._copier, "execute"), (p.engine._sender, "send"), (p.device.runner, "forward")):
        plain = getattr(owner, name)

        def noted(*args: Any, plain: Callable[..., Any] = plain, name: str = name, **more: Any) -> Any:
            done.append(name)
            return plain(*args, **more)

        monkeypatch.setattr(owner, name, noted)
    p.tell(link, again, grants.grant(again))
    p.turn()
    assert done[:3] == ["execute", "send", "forward"]
    rest(p)


@WITH_HOST
def test_a_copy_that_fails_ends_the_engine(p: Prefill, d: LocalNode, link: RecordingLink, grants: Pages) -> None:
    first = [submit(prompt(30, 50 * i)) for i in range(3)]
    for asked in first:
        p.tell(link, asked, grants.grant(asked))
        rest(p)
    p.engine._copier = TierCopier(p.device.pool, KVPool(p.device.layout, 1))  # it lacks the pages that are offloaded to
    link.outputs.clear()
    again = submit(prompt(30, 200))
    p.tell(link, again, grants.grant(again))
    while not p.incidents:
        p.turn()
    assert failed(link) == [(key_of(again), "prefilling", False)]
    assert not link.tokens(key_of(again))
    for count in range(2, FATAL_FAILURES + 1):
        p.turn()
        assert len(p.incidents) == count, "also where nothing is to be copied, so the engine gives up"
