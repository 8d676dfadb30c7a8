"""A decode engine runs out of pages: who gives way, and what becomes of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.core.messages import Abort, LinkUp, RoomFailed, WriterQuiesced
from engine.core.sampling import FinishReason
from engine.core.types import NodeIdentity, RoomKey
from tests.helpers.decode_rooms import (
    PAGES,
    Decode,
    arriving,
    failed,
    grant_of,
    key_of,
    note,
    pages,
    reserve,
    running,
    write,
)
from tests.helpers.engines import PAGE, decode_engine
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FilePool, LocalNode


def together(d: Decode, link: RecordingLink, writer: LocalNode, rooms: Sequence[tuple[int, int]]) -> list[RoomKey]:
    """Rooms of (prompt tokens, first index) that decode together."""
    asked = [reserve(writer, prompt, 12, first_index=first_index) for prompt, first_index in rooms]
    return running(d, link, writer, *asked)


@pytest.mark.parametrize(
    ("rooms", "order"),
    [
        ([(4, 0), (4, 0), (4, 0), (4, 0)], [0, 1, 2]),  # all alike: the first, which is as good as any
        ([(4, 3), (4, 2), (4, 1), (4, 0)], [3, 2, 1]),  # fewest tokens of the answer, those of earlier attempts too
        ([(4, 0), (8, 0), (4, 1), (8, 0)], [1, 3]),  # then the longest prompt; two are enough here
        ([(12, 8), (8, 0), (4, 0), (16, 12)], [1, 2]),
        ([(8, 4), (12, 4), (8, 4)], [1]),  # a prompt is counted without the answer's part of it
    ],
)
def test_who_gives_way_when_pages_run_out(
    d: Decode, link: RecordingLink, writer: LocalNode, rooms: list[tuple[int, int]], order: list[int]
) -> None:
    held = sum(prompt for prompt, _ in rooms) // PAGE
    blocker = arriving(d, link, writer, prompt=(PAGES - held - 3) * PAGE, max_new=1)  # leaves three pages to grow
    keys = together(d, link, writer, rooms)
    assert pages(d)[0] == 3
    d.until(lambda: d.stats.running == 0, "some give way, one after another, and the others are done")
    assert [keys.index(key) for key, _, _ in failed(link)] == order
    assert {(phase, retriable) for _, phase, retriable in failed(link)} == {("decoding", True)}
    assert {report.reason for report in link.of(RoomFailed)} == {"retracted: out of pages"}
    for i in set(range(len(keys))) - set(order):
        assert link.tokens(keys[i])[-1].finish is FinishReason.LENGTH
    assert pages(d) == (held + 3, PAGES - held - 3, 0)
    assert blocker not in [key for key, _, _ in failed(link)]


@pytest.mark.parametrize(("low_first", "order"), [(False, [2, 1]), (True, [2, 0])])
def test_the_least_important_gives_way_first(tmp_path: Path, low_first: bool, order: list[int]) -> None:
    with decode_engine(PAGES, priority_scheduling=True, low_priority_first=low_first) as d:
        link = RecordingLink()
        d.tell(link, LinkUp())
        writer = LocalNode(NodeIdentity.new("p"), FilePool(tmp_path / "pool", PAGES, d.device.pool.page_bytes))
        writer.agent.add_peer(d.agent.identity, d.agent.metadata, d.agent.memory)
        writer.start_sender()
        try:
            # What is left of the pool is three pages; the first room has the fewest tokens, the third no priority.
            arriving(d, link, writer, prompt=(PAGES - 6) * PAGE, max_new=1)
            asked = [reserve(writer, 4, 12, priority=p, first_index=i) for p, i in ((9, 0), (1, 1), (None, 2))]
            keys = running(d, link, writer, *asked)
            d.until(lambda: d.stats.running == 0, "some give way, and the others are done")
        finally:
            writer.close()
        assert [keys.index(key) for key, _, _ in failed(link)] == order


def test_a_prompt_counts_without_the_answer_in_it(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    """Two of equal progress: the one whose own prompt is longer gives way, though fewer tokens came with its pages."""
    arriving(d, link, writer, prompt=(PAGES - 7) * PAGE, max_new=1)
    fresh, resumed = reserve(writer, 8, 20), reserve(writer, 10, 10, first_index=4)
    d.tell(link, fresh, resumed)
    write(writer, d, grant_of(d, link, key_of(fresh)), note())
    d.until(lambda: len(link.tokens(key_of(fresh))) == 4, "one has a start of four tokens")
    write(writer, d, grant_of(d, link, key_of(resumed)), note(4))
    d.until(lambda: d.stats.running == 2, "the other joins it", passes=False)
    d.until(lambda: d.stats.running == 0, "both are over")
    assert failed(link) == [(key_of(fresh), "decoding", True)]
    assert link.tokens(key_of(resumed))[-1].finish is FinishReason.LENGTH


def test_the_last_one_waits_for_pages_of_others(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    """Pages that arrive, or are fenced, come back: nothing is wrong with the one that needs them."""
    keys = running(d, link, writer, *(reserve(writer, prompt=4, max_new=14) for _ in range(2)))
    blocker = arriving(d, link, writer, prompt=48, max_new=1)  # what admission lets in comes a page too near
    while d.turn():
        pass
    assert [(key, retriable) for key, _, retriable in failed(link)] == [(keys[0], True)]
    said = len(link.tokens(keys[1]))
    assert (d.turn(), d.stats.running, pages(d)) == (False, 1, (0, PAGES, 0))
    d.tell(link, Abort(blocker, "given up"))
    assert (d.turn(), len(link.tokens(keys[1]))) == (False, said), "fenced pages are not free"
    d.tell(link, WriterQuiesced(blocker))
    d.until(lambda: d.stats.running == 0, "it goes on")
    assert [token.index for token in link.tokens(keys[1])] == list(range(1, 14))
    assert len(failed(link)) == 1
    assert pages(d) == (PAGES, 0, 0)


def test_the_last_one_fails_when_it_has_the_whole_pool(d: Decode, link: RecordingLink, writer: LocalNode) -> None:
    """Not admitted by the formula unless it was resumed: there, what fitted at arrival is not refused."""
    asked = reserve(writer, prompt=(PAGES - 1) * PAGE, max_new=9, first_index=PAGE)
    (key,) = running(d, link, writer, asked)
    d.until(lambda: bool(failed(link)), "it fails")
    assert failed(link) == [(key, "decoding", False)]
    (report,) = link.of(RoomFailed)
    assert report.reason == f"out of pages: this node has {PAGES} pages of {PAGE} tokens"
    assert report.code == "RESOURCE_EXHAUSTED"
    assert [token.index for token in link.tokens(key)] == [5, 6, 7, 8]
    assert pages(d) == (PAGES, 0, 0)
