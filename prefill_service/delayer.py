"""Whether data-parallel ranks prefill now, or hold prompts back so that more of them are computed together.

All ranks hand in a row and get one answer. Synchronous, of state and a clock; the threads meet in `ranks.py`.

    every rank has something:  wait while a full batch finds no places (max_running), or, if so set, queues are short
    some ranks have something: wait for the others
    none has:                  there is nothing to hold back

A rank far below its memory ends any wait. So does a bound, which is either a number of passes or, self-set, this: with
a rate of r arrivals a second and a wait for k more requests, ranks wait only while

    time the oldest request has waited + k / r  <=  DELAY_SHARE * target for the time to first token

k is the number of ranks with nothing, the requests that queues are short of, or 0 where places are waited for.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.clock import Clock, monotonic
from prefill_service.config import RankConfig

__all__ = ["DELAY_SHARE", "QUEUE_WAIT_S", "RATE_WINDOW_S", "Decision", "Delayer", "Reason", "Row", "Status"]

QUEUE_WAIT_S = 5.0  # a request that has waited longer is no longer kept for a fuller queue
DELAY_SHARE = 0.1  # self-set: of the target, what may be spent on waiting
RATE_WINDOW_S = 10.0  # an arrival so long ago weighs 1/e of one now


class Status(enum.StrEnum):
    """Which ranks have something to prefill."""

    ALL = "all"
    MIXED = "mixed"
    NONE = "none"


class Reason(enum.StrEnum):
    NOTHING = ""
    NO_WAIT = "no_wait"
    WAIT_SUCCESS = "wait_success"  # what was waited for is there
    WAIT_TIMEOUT = "wait_timeout"  # the bound has been reached
    TOKEN_WATERMARK = "token_watermark"
    DELAY = "delay"


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank says of itself."""

    prefillable: bool = False  # it has something that it could compute now
    watermark_force: bool = False  # its memory is too empty to wait
    running: int = 0  # requests admitted, being computed or in flight
    max_prefill_batch: int = 0  # requests of its largest batch
    queue: int = 0  # requests that may be admitted
    waited: float = 0.0  # seconds that the oldest of these has waited
    arrived: int = 0  # requests taken in since it started


@dataclass(frozen=True, slots=True)
class Decision:
    """The same for all ranks. delayed: passes held back in a row, this one included."""

    allow: bool
    reason: Reason
    status: Status
    delayed: int


class Delayer:
    """Decides for ranks, pass by pass. ttft_target: seconds."""

    def __init__(self, config: RankConfig, ttft_target: float, clock: Clock = monotonic):
        self._config = config
        self._longest_wait = DELAY_SHARE * ttft_target
        self._rate = _Rate(clock)
        self._delayed = 0
        self._met = False  # all ranks were ready and there was a reason to wait

    def decide(self, rows: Sequence[Row], max_running: int | None) -> Decision:
        """max_running: requests a rank may have admitted at once; None: there is no limit to wait for."""
        self._rate.observe(sum(row.arrived for row in rows))
        ready = sum(row.prefillable for row in rows)
        if not ready:
            return self._allow(Reason.NOTHING, Status.NONE)
        status = Status.ALL if ready == len(rows) else Status.MIXED
        if any(row.watermark_force for row in rows):
            return self._allow(Reason.TOKEN_WATERMARK, status)
        missing = self._reason_to_wait(rows, max_running) if status is Status.ALL else len(rows) - ready
        if missing is None:
            return self._allow(Reason.WAIT_SUCCESS if self._delayed else Reason.NO_WAIT, status)
        if not self._may_wait(rows, missing):
            return self._allow(Reason.WAIT_TIMEOUT, status)
        self._delayed += 1
        return Decision(False, Reason.DELAY, status, self._delayed)

    def _allow(self, reason: Reason, status: Status) -> Decision:
        self._delayed = 0
        return Decision(True, reason, status, 0)

    def _reason_to_wait(self, rows: Sequence[Row], max_running: int | None) -> int | None:
        """For how many more requests ranks that all have some wait; 0: for places. None: for nothing."""
        running = max(row.running for row in rows)
        batch = max(row.max_prefill_batch for row in rows)
        if max_running is not None and max_running - running < batch:
            missing = 0
        elif self._config.delay_queue_ratio is None or self._kept_too_long(rows):
            return None
        else:
            missing = min(int(running * self._config.delay_queue_ratio), batch) - max(row.queue for row in rows)
            if missing <= 0:
                return None
        if not self._met:  # the first time tells nothing yet: places may be short for good
            self._met = True
            return None
        return missing

    def _kept_too_long(self, rows: Sequence[Row]) -> bool:
        return not self._config.delay_self_set and any(row.waited >= QUEUE_WAIT_S for row in rows)

    def _may_wait(self, rows: Sequence[Row], missing: int) -> bool:
        if not self._config.delay_self_set:
            return self._delayed < self._config.max_delay_passes - 1
        expected = missing / max(self._rate.value, 1e-9)
        return max(row.waited for row in rows) + expected <= self._longest_wait


class _Rate:
    """Arrivals a second, from their number so far as read now and then."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._read_at = clock()
        self._total = 0
        self._weight = 0.0  # of arrivals, those long ago less

    def observe(self, total: int) -> None:
        now = self._clock()
        self._weight *= math.exp((self._read_at - now) / RATE_WINDOW_S)
        self._weight += max(0, total - self._total)  # less than before: a rank has left
        self._read_at, self._total = now, total

    @property
    def value(self) -> float:
        return self._weight / RATE_WINDOW_S
