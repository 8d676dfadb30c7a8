"""What a process does when it is told to stop: once, and once more when it is told again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from engine.core.clock import Clock, monotonic

__all__ = ["StopSignals"]

SAME_S = 0.1  # a shell or a supervisor may signal a process and then its group: that is one wish, not two


class StopSignals:
    """Calls `first` at the first SIGTERM or SIGINT, and `again` at each one that is not the first one's echo."""

    def __init__(self, first: Callable[[], None], again: Callable[[], None], clock: Clock = monotonic):
        self._first = first
        self._again = again
        self._clock = clock
        self._told: float | None = None

    def install(self) -> None:
        """On the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled)

    def signalled(self) -> None:
        if self._told is None:
            self._told = self._clock()
            self._first()
        elif self._clock() - self._told > SAME_S:
            self._again()
