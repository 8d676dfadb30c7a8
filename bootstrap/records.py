"""What is left of a request when it has ended: one log line and its share of the metrics."""

from __future__ import annotations

import logging

from bootstrap.requests import LiveRequest
from engine.core.metrics import FrontDoorMetric, Metrics
from engine.core.sampling import FinishReason

__all__ = ["record_end"]

log = logging.getLogger("kvrelay.bootstrap")


def record_end(request: LiveRequest, metrics: Metrics) -> None:
    """Latencies are recorded of answers that came to their own end, since others say nothing of the system."""
    timing, ask, cached = request.timing, request.ask, request.cached_tokens or 0
    outcome = request.error.code.lower() if request.error else str(request.finish)
    log.info(
        "request ended",
        extra={
            "request_id": ask.request_id,
            "client": ask.client,
            "outcome": outcome,
            "error": str(request.error) if request.error else None,
            "prompt_tokens": len(ask.token_ids),
            "cached_tokens": cached,
            "output_tokens": len(request.output),
            "resumed_tokens": len(ask.resumed),
            "attempts": request.attempts,
            "seconds": round(timing.total, 4),
            "prefill_node": timing.prefill_node,
            "decode_node": timing.decode_node,
        },
    )
    metrics.count(FrontDoorMetric.FINISHED, 1, outcome)
    metrics.count(FrontDoorMetric.OUTPUT_TOKENS, request.made)
    if request.made:
        metrics.observe(FrontDoorMetric.TTFT, timing.first_token)
        metrics.count(FrontDoorMetric.PROMPT_TOKENS, cached, "cached")
        metrics.count(FrontDoorMetric.PROMPT_TOKENS, len(ask.token_ids) - cached, "computed")
    if request.finish not in (FinishReason.STOP, FinishReason.LENGTH) or not request.made:
        return
    metrics.observe(FrontDoorMetric.TOTAL, timing.total)
    if request.made > 1:
        between = (timing.total - timing.first_token) / (request.made - 1)
        metrics.observe(FrontDoorMetric.TPOT, between)
    for phase, seconds in timing.phases.items():
        metrics.observe(FrontDoorMetric.PHASE, seconds, phase)
