"""A process told to stop drains; told again, and not by the echo of the first signal, it hurries."""

from __future__ import annotations

from engine.core.clock import ManualClock
from rpc.signals import SAME_S, StopSignals


def test_the_echo_of_a_signal_is_not_a_second_one() -> None:
    told: list[str] = []
    clock = ManualClock()
    signals = StopSignals(lambda: told.append("drain"), lambda: told.append("hurry"), clock)
    signals.signalled()
    signals.signalled()
    clock.now += SAME_S / 2
    signals.signalled()
    assert told == ["drain"]
    clock.now += SAME_S
    signals.signalled()
    assert told == ["drain", "hurry"]
