"""Rooms on a prefill engine that the test drives, and a node in this process that takes their pages in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.handoff_note import HandoffNote
from engine.core.messages import Granted, RoomFailed, RoomQuiesced, Submit
from engine.core.page_keys import page_keys
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import PrefillTask, RoomKey
from prefill_service.loop import PrefillEngine
from tests.helpers.engines import PAGE, Driven
from tests.helpers.models import prepared_tiny
from tests.helpers.reference import greedy
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import LocalNode, eventually
from transfer.agent import Write, WriteState
from transfer.receiver import RoomComplete

__all__ = [
    "CHUNK",
    "GREEDY",
    "PAGES",
    "Gate",
    "Pages",
    "Prefill",
    "answer",
    "arrived",
    "complete",
    "failed",
    "key_of",
    "prompt",
    "quiesced",
    "rest",
    "submit",
]

PAGES = 24
CHUNK = 8
GREEDY = SamplingParams(temperature=0)
Prefill = Driven[PrefillEngine]


def prompt(length: int, first: int = 10) -> tuple[int, ...]:
    return tuple(3 + (first + 7 * i) % 250 for i in range(length))


def submit(token_ids: Sequence[int], max_new: int = 8, *, first_index: int = 0, **stopping: Any) -> Submit:
    key, ids = RoomKey.new(0), tuple(token_ids)
    stop = StoppingParams(max_new, **({"ignore_eos": True} | stopping))
    return Submit(PrefillTask(f"r{key}", key, ids, first_index, page_keys(ids, PAGE), GREEDY, stop))


def key_of(asked: Submit) -> RoomKey:
    return asked.task.key


class Pages:
    """Which pages of the decode node are taken: each room gets the next ones."""

    def __init__(self, d: LocalNode):
        self._d = d
        self._next = 0

    def grant(self, asked: Submit) -> Granted:
        count = -(-len(asked.task.token_ids) // PAGE)
        pages = tuple(i % PAGES for i in range(self._next, self._next + count))
        self._next += count
        self._d.receiver.expect(key_of(asked), pages)
        return Granted(key_of(asked), self._d.identity, pages)


def rest(p: Prefill) -> None:
    """Everything that can be done is done."""
    p.until(lambda: p.stats.idle and not p.turn(), "the node is at rest")


def failed(link: RecordingLink) -> list[tuple[RoomKey, str, bool]]:
    return [(report.key, report.phase, report.retriable) for report in link.of(RoomFailed)]


def quiesced(link: RecordingLink) -> list[RoomKey]:
    return [report.key for report in link.of(RoomQuiesced)]


def complete(d: LocalNode, key: RoomKey) -> list[RoomComplete]:
    return [event for event in d.received.of(key) if isinstance(event, RoomComplete)]


def arrived(d: LocalNode, key: RoomKey) -> HandoffNote:
    """All pages of a room are on the other side, once; with what was said with the last."""
    eventually(lambda: bool(complete(d, key)))
    (event,) = complete(d, key)
    return HandoffNote.decode(event.last)


def answer(token_ids: Sequence[int]) -> int:
    return greedy(prepared_tiny().path, token_ids, 1)[0]


class Gate:
    """Writes look as if they were still in progress until it is opened."""

    def __init__(self, p: Prefill, monkeypatch: pytest.MonkeyPatch):
        self.open = False
        poll = p.agent.poll

        def gated(write: Write) -> WriteState:
            return poll(write) if self.open else WriteState.ACTIVE

        monkeypatch.setattr(p.agent, "poll", gated)
