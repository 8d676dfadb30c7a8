"""What the scheduler hands out: frozen values that a forward, the sender and the logs are made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prefill_service.adder import Attempt
from prefill_service.cost_model import pairs
from prefill_service.policy import Policy
from prefill_service.request import PrefillRequest

__all__ = ["BatchRow", "PassRecord", "PrefillBatch", "SchedulerStats", "SendSpan"]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Part of one request in a forward: compute tokens [start, end)."""

    request: PrefillRequest
    start: int
    end: int
    is_last: bool  # the prompt ends here: sample its next token
    pages: tuple[int, ...]  # cover tokens [0, end)
    admitted: bool  # in a forward for the first time: its start // page_size cached pages can be sent now


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    rows: tuple[BatchRow, ...]

    @property
    def tokens(self) -> int:
        """Tokens to compute."""
        return sum(row.end - row.start for row in self.rows)

    @property
    def pairs(self) -> float:
        """Of tokens to compute and tokens they attend to (`prefill_service.cost_model`)."""
        return sum(pairs(row.end - row.start, row.start) for row in self.rows)


@dataclass(frozen=True, slots=True)
class SendSpan:
    """Pages of a request whose KV has become final: its pages first to first + len(pages) - 1, by their ids now."""

    request: PrefillRequest
    first: int
    pages: tuple[int, ...]
    is_last: bool  # ends the prompt: the last page may be partly filled


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass saw and decided. Only passes that had something to decide leave one."""

    number: int
    time: float  # seconds of the scheduler's clock
    policy: Policy  # asked for
    in_effect: Policy
    bootstrap: int  # lengths of the queues when the pass began
    waiting: int
    in_flight: int
    batch_tokens: int
    cached_tokens: int  # of requests admitted in this pass
    attempts: tuple[Attempt, ...]
    continues: bool  # the first attempt is of the request that was partly computed already
    deferred: tuple[PrefillRequest, ...] = ()  # they wait for others that compute what both share

    def placed(self) -> Iterator[tuple[int | None, Attempt]]:
        """Each attempt and its request's position in the queue, from 1; None for the one that goes ahead of it."""
        position, before = 0, None
        for index, attempt in enumerate(self.attempts):
            if index == 0 and self.continues:
                yield None, attempt
                continue
            position += attempt.request is not before  # one for which others were preempted is tried twice
            before = attempt.request
            yield position, attempt


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts at one moment. free + evictable + protected + held == num_pages."""

    bootstrap: int
    waiting: int
    running: int
    in_flight: int
    queued_tokens: int  # left to compute for all requests that are not in flight
    num_pages: int
    free: int
    evictable: int
    protected: int
    held: int
    passes: int
    requests_total: int  # submitted
    computed_tokens_total: int
    cached_tokens_total: int  # not computed, since they were found
    host_pages: int  # of the host pool
    host_free: int
    host_hit_tokens_total: int  # of those cached: brought back from the host for it
