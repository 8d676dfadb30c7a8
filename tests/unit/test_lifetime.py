"""Timelines: differences of stamps."""

from __future__ import annotations

from engine.core.clock import ManualClock
from engine.core.lifetime import LifetimeEvent, Timeline


def test_between_is_from_the_first_to_the_last() -> None:
    clock = ManualClock(10.0)
    timeline = Timeline(clock)
    assert timeline.stamp(LifetimeEvent.ADMITTED) == 10.0
    for _ in range(3):
        clock.advance(2.0)
        timeline.stamp(LifetimeEvent.CHUNK_DONE)
    timeline.stamp(LifetimeEvent.ADMITTED)
    assert timeline.first(LifetimeEvent.CHUNK_DONE) == 12.0
    assert timeline.last(LifetimeEvent.CHUNK_DONE) == 16.0
    assert timeline.between(LifetimeEvent.ADMITTED, LifetimeEvent.CHUNK_DONE) == 6.0
    assert [timeline.count(event) for event in (LifetimeEvent.ADMITTED, LifetimeEvent.TOKEN_0)] == [2, 0]


def test_what_did_not_happen_has_no_time() -> None:
    timeline = Timeline(ManualClock())
    timeline.stamp(LifetimeEvent.ARRIVED)
    assert timeline.first(LifetimeEvent.TOKEN_0) is None
    assert timeline.last(LifetimeEvent.TOKEN_0) is None
    assert timeline.between(LifetimeEvent.ARRIVED, LifetimeEvent.TOKEN_0) is None
    assert timeline.between(LifetimeEvent.TOKEN_0, LifetimeEvent.ARRIVED) is None
