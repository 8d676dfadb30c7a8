"""Rooms on a decode engine that the test drives, written to by a node in this process."""

from __future__ import annotations

from decode_service.loop import DecodeEngine
from engine.core.handoff_note import HandoffNote
from engine.core.messages import Grant, Reserve, RoomFailed
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import NodeIdentity, Reservation, RoomKey
from tests.helpers.engines import Driven
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import LocalNode, NodeProcess

__all__ = [
    "PAGES",
    "Decode",
    "arriving",
    "failed",
    "grant_of",
    "key_of",
    "note",
    "pages",
    "reserve",
    "running",
    "write",
]

GREEDY = SamplingParams(temperature=0)
PAGES = 16  # of a decode node, where a test does not say otherwise
Decode = Driven[DecodeEngine]


def reserve(
    writer: LocalNode | NodeProcess | NodeIdentity,
    prompt: int = 6,
    max_new: int = 8,
    *,
    first_index: int = 0,
    stopping: StoppingParams | None = None,
    sampling: SamplingParams = GREEDY,
    priority: int | None = None,
) -> Reserve:
    key = RoomKey.new(0)
    identity = writer if isinstance(writer, NodeIdentity) else writer.identity
    stopping = stopping or StoppingParams(first_index + max_new, ignore_eos=True)
    history = tuple(range(3, 3 + prompt)) if sampling.needs_history else ()
    reservation = Reservation(f"r{key}", key, prompt, first_index, sampling, stopping, identity, priority, history)
    return Reserve(reservation)


def key_of(reserved: Reserve) -> RoomKey:
    return reserved.reservation.key


def grant_of(d: Decode, link: RecordingLink, key: RoomKey) -> Grant:
    def find() -> list[Grant]:
        return [grant for grant in link.of(Grant) if grant.key == key]

    d.until(lambda: bool(find()), f"grant of {key}")
    (grant,) = find()
    return grant


def write(writer: LocalNode, d: Decode, grant: Grant, note: HandoffNote | bytes, *, first: int = 0) -> None:
    """All pages of a room, from the writer's page `first` on, and with them the note."""
    writer.sender.open(grant.key, d.agent.identity, grant.pages, lambda: True)
    last = note if isinstance(note, bytes) else note.encode()
    writer.sender.send(grant.key, 0, range(first, first + len(grant.pages)), last=last)


def note(index: int = 0, token_id: int = 5) -> HandoffNote:
    return HandoffNote(token_id, index, -0.5, 0, 1)


def arriving(d: Decode, link: RecordingLink, writer: LocalNode | NodeProcess, *, prompt: int, max_new: int) -> RoomKey:
    """A room that was granted and whose pages are not here yet."""
    asked = reserve(writer, prompt, max_new)
    d.tell(link, asked)
    grant_of(d, link, key_of(asked))
    return key_of(asked)


def running(d: Decode, link: RecordingLink, writer: LocalNode, *asked: Reserve) -> list[RoomKey]:
    """Rooms whose pages have all arrived, and for which no pass was run yet."""
    d.tell(link, *asked)
    for one in asked:
        write(writer, d, grant_of(d, link, key_of(one)), note(one.reservation.first_index))
    before = d.stats.running
    d.until(lambda: d.stats.running == before + len(asked), "they arrive", passes=False)
    return [key_of(one) for one in asked]


def failed(link: RecordingLink) -> list[tuple[RoomKey, str, bool]]:
    return [(report.key, report.phase, report.retriable) for report in link.of(RoomFailed)]


def pages(d: Decode) -> tuple[int, int, int]:
    """Free, held, fenced."""
    stats = d.stats
    assert stats.pages_free + stats.pages_held + stats.pages_fenced == stats.pages_total
    return stats.pages_free, stats.pages_held, stats.pages_fenced
