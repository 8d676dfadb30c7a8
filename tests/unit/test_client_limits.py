"""The token bucket and the count of one client, by a clock the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap.limits import ClientLimits
from engine.core.clock import ManualClock
from engine.core.errors import Overloaded


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1e6)


def refused(limits: ClientLimits, name: str = "a") -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        limits.take(name)
    return caught.value


def test_without_limits_nothing_is_refused_and_nobody_remembered(clock: ManualClock) -> None:
    limits = ClientLimits(None, 1, None, clock)
    for _ in range(1000):
        limits.take("a")
    for end in (limits.begin("a"), limits.begin("a")):
        end()
    assert limits.clients == 0


def test_a_burst_then_the_rate(clock: ManualClock) -> None:
    limits = ClientLimits(4.0, 3, None, clock)
    for _ in range(3):
        limits.take("a")
    error = refused(limits)
    assert error.retry_after == pytest.approx(0.25)
    assert (error.reason, error.metadata) == ("CLIENT_RATE", {"limit": "client_rate", "value": "4"})
    assert refused(limits).retry_after == pytest.approx(0.25), "being refused costs nothing"
    limits.take("b")  # another's
    clock.advance(0.125)
    assert refused(limits).retry_after == pytest.approx(0.125)
    clock.advance(0.125)
    limits.take("a")
    refused(limits)
    clock.advance(1000)
    for _ in range(3):
        limits.take("a")
    refused(limits)


@given(st.floats(0.001, 1e4), st.integers(1, 20), st.lists(st.floats(0, 3), max_size=30))
def test_who_waits_as_told_is_taken(rate: float, burst: int, pauses: list[float]) -> None:
    clock = ManualClock(1e5)
    limits = ClientLimits(rate, burst, None, clock)
    taken, longest, began = 0, 0.0, clock()
    for pause in pauses:
        clock.advance(pause / rate)
        try:
            limits.take("a")
        except Overloaded as error:
            wait = error.retry_after or 0.0
            clock.advance(wait)
            limits.take("a")
            longest = max(longest, wait)
        taken += 1
    assert longest <= 1 / rate + 1e-6
    assert taken <= burst + (clock() - began + 1e-5 * len(pauses)) * rate + 1e-6


def test_live_calls_are_counted_until_they_end(clock: ManualClock) -> None:
    limits = ClientLimits(None, 1, 2, clock)
    ends = [limits.begin("a"), limits.begin("a")]
    with pytest.raises(Overloaded) as caught:
        limits.begin("a")
    assert caught.value.reason == "CLIENT_CONCURRENCY"
    assert caught.value.metadata == {"limit": "client_concurrency", "value": "2"}
    assert caught.value.retry_after is None, "nobody knows"
    ends.append(limits.begin("b"))
    limits.take("a")  # does not live
    ends[0]()
    ends[0]()
    ends.append(limits.begin("a"))
    with pytest.raises(Overloaded):
        limits.begin("a")
    for end in ends:
        end()
    assert limits.clients == 0


def test_what_the_count_refuses_costs_no_token_and_the_other_way_round(clock: ManualClock) -> None:
    limits = ClientLimits(1.0, 2, 1, clock)
    end = limits.begin("a")
    for _ in range(5):
        with pytest.raises(Overloaded, match="live Generate calls"):
            limits.begin("a")
    limits.take("a")
    end()
    for _ in range(2):
        with pytest.raises(Overloaded, match="more often"):
            limits.begin("a")
    clock.advance(1)
    limits.begin("a")


def test_clients_that_are_quiet_again_are_forgotten(clock: ManualClock) -> None:
    limits = ClientLimits(10.0, 5, 5, clock)
    end = limits.begin("long")
    for i in range(10_000):
        limits.take(f"once {i}")
        clock.advance(0.01)
    assert limits.clients < 50
    clock.advance(1)
    for _ in range(50):
        limits.take("last")
        clock.advance(0.2)
    assert limits.clients <= 2
    end()
    limits.take("last")
    clock.advance(1)
    limits.take("last")
    assert limits.clients == 1
