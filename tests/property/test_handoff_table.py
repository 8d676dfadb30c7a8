"""The one table of hand-off states: whatever order two nodes report in, an attempt only moves forward and ends once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.handoff import HandoffEvent, HandoffState, advance

EVENTS = st.lists(st.sampled_from(HandoffEvent), max_size=12)
ENDINGS = (HandoffEvent.FINISHED, HandoffEvent.FAILED, HandoffEvent.CANCELLED)


def run(events: list[HandoffEvent]) -> tuple[HandoffState, list[HandoffEvent]]:
    """The state after `events` from the start, and those that were dropped as late."""
    state, late = HandoffState.QUEUED, []
    for event in events:
        after = advance(state, event)
        if after is None:
            late.append(event)
        else:
            state = after
    return state, late


@given(st.sampled_from(HandoffState), st.sampled_from(HandoffEvent))
def test_an_event_never_takes_an_attempt_back(state: HandoffState, event: HandoffEvent) -> None:
    after = advance(state, event)
    assert (after is None) == state.ended
    if after is not None:
        assert after >= state
        assert after >= event.value


@given(EVENTS)
def test_ended_is_ended(events: list[HandoffEvent]) -> None:
    first = next((i for i, event in enumerate(events) if event in ENDINGS), None)
    state, late = run(events)
    if first is None:
        assert not late
        assert not state.ended
    else:
        assert state is events[first].value
        assert late == events[first + 1 :]


@given(st.lists(st.sampled_from([e for e in HandoffEvent if e not in ENDINGS]), max_size=12), st.randoms())
def test_the_order_of_reports_does_not_matter(events: list[HandoffEvent], random: object) -> None:
    shuffled = list(events)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # random.Random, which hypothesis wraps
    assert run(shuffled) == run(events)


@pytest.mark.parametrize("state", list(HandoffState))
def test_every_state_but_the_first_has_its_event(state: HandoffState) -> None:
    assert state is HandoffState.QUEUED or HandoffEvent(state)
    assert state.phase == state.name.lower()
