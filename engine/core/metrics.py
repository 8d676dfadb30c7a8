"""What a process tells Prometheus: counters and histograms it keeps, and gauges read from node snapshots.

    metrics = Metrics(NodeMetric)
    metrics.observe(NodeMetric.STEP_SECONDS, 0.021, "prefill")
    metrics.set_node("prefill-1", Role.PREFILL, stats)
    endpoint = serve_metrics(metrics, "127.0.0.1:0")

A metric is an enum member that holds its name, help text and labels. Each `Metrics` has a registry of its own, so one
process may hold several. Safe to use from any thread.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from typing import Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.core.errors import ConfigError
from engine.core.messages import NodeStats
from engine.core.types import Role

__all__ = [
    "FrontDoorMetric",
    "Metric",
    "Metrics",
    "MetricsEndpoint",
    "NodeMetric",
    "serve_metrics",
]

# Seconds. A phase takes from a loopback hop to a long prompt on a slow machine; a token is bounded more tightly.
_PHASE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metric(enum.Enum):
    """Base of the metric enums. Members are (name, kind, help, labels[, buckets])."""

    def __init__(
        self,
        metric: str,
        kind: Literal["counter", "gauge", "histogram"],
        help_text: str,
        labels: tuple[str, ...] = (),
        buckets: tuple[float, ...] = _PHASE,
    ):
        self.metric = metric
        self.kind = kind
        self.help_text = help_text
        self.labels = labels
        self.buckets = buckets


class FrontDoorMetric(Metric):
    """Kept by the bootstrap service, which sees whole requests."""

    FINISHED = (
        "kvrelay_requests_finished_total",
        "counter",
        "Requests ended, by reason or status",
        ("outcome",),
    )
    REFUSED = ("kvrelay_requests_refused_total", "counter", "Requests turned away at arrival, by reason", ("reason",))
    QUEUED = ("kvrelay_queued_requests", "gauge", "Requests waiting for a decode node, or on a unified node")
    LIVE = ("kvrelay_live_requests", "gauge", "Requests arrived and not ended")
    SET_ASIDE = ("kvrelay_pairs_set_aside", "gauge", "Pairs of a prefill and a decode node not used: transfers failed")
    TTFT = ("kvrelay_time_to_first_token_seconds", "histogram", "Arrival to token 0")
    TPOT = ("kvrelay_time_per_output_token_seconds", "histogram", "Mean time between a request's tokens", (), _TOKEN)
    TOTAL = ("kvrelay_request_seconds", "histogram", "Arrival to the last message")
    PHASE = ("kvrelay_phase_seconds", "histogram", "Time a request spent in one phase", ("phase",))
    PROMPT_TOKENS = ("kvrelay_prompt_tokens_total", "counter", "Prompt tokens, by where they came from", ("source",))
    OUTPUT_TOKENS = ("kvrelay_output_tokens_total", "counter", "Tokens sent to clients")
    RETRIES = ("kvrelay_attempts_retried_total", "counter", "Attempts given up and tried again, by phase", ("phase",))
    LATE = ("kvrelay_late_messages_total", "counter", "Messages dropped because their attempt had ended", ("kind",))


class NodeMetric(Metric):
    """Kept by prefill and decode nodes."""

    STEP_SECONDS = ("kvrelay_step_seconds", "histogram", "One forward and what belongs to it", (), _TOKEN)
    STEP_TOKENS = ("kvrelay_step_tokens", "histogram", "Tokens computed in one forward", (), _ROWS)
    RELAY_SECONDS = ("kvrelay_relay_seconds", "histogram", "Prefill: time in which a room's writes were in progress")
    HANDOFF_SECONDS = ("kvrelay_handoff_seconds", "histogram", "Decode: last prefill forward's end to the first step")
    FAILED = ("kvrelay_rooms_failed_total", "counter", "Attempts that failed on this node, by phase", ("phase",))
    RETRACTED = (
        "kvrelay_retractions_total",
        "counter",
        "Decode: requests that gave way as pages ran out, by where they went: host, or through prefill again",
        ("where",),
    )
    LATE = ("kvrelay_late_messages_total", "counter", "Messages dropped because their attempt had ended", ("kind",))
    CORRUPT_PAGES = ("kvrelay_corrupt_pages_total", "counter", "Decode: pages that came otherwise than they were sent")
    INTEGRITY = ("kvrelay_integrity_problems_total", "counter", "Mistakes that a check of the node's own books found")


class Metrics:
    """All metrics of one enum, and the latest snapshot of each node."""

    def __init__(self, kind: type[Metric]):
        self.registry = CollectorRegistry()
        self._nodes = _NodeCollector()
        self.registry.register(self._nodes)
        self._counters: dict[Metric, Counter] = {}
        self._gauges: dict[Metric, Gauge] = {}
        self._histograms: dict[Metric, Histogram] = {}
        for one in kind:
            if one.kind == "counter":
                self._counters[one] = Counter(one.metric, one.help_text, one.labels, registry=self.registry)
            elif one.kind == "gauge":
                self._gauges[one] = Gauge(one.metric, one.help_text, one.labels, registry=self.registry)
            else:
                self._histograms[one] = Histogram(
                    one.metric, one.help_text, one.labels, registry=self.registry, buckets=one.buckets
                )

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        counter = self._counters[metric]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        gauge = self._gauges[metric]
        (gauge.labels(*labels) if labels else gauge).set(value)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        histogram = self._histograms[metric]
        (histogram.labels(*labels) if labels else histogram).observe(value)

    def set_node(self, node_id: str, role: Role, stats: NodeStats | None) -> None:
        """Show `stats` as this node's gauges from now on; None: the node is gone."""
        self._nodes.set(node_id, role, stats)

    def expose(self) -> str:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry).decode()


_BY_STATE = (  # metric, help text, beginning of the fields' names, states
    ("pages", "Pages, by who has them", "pages_", ("free", "cached", "held", "fenced")),
    ("host_pages", "Pages of the host pool, by who has them", "host_pages_", ("free", "cached")),
    ("requests", "Requests, by where they are", "", ("ungranted", "waiting", "running", "transferring", "retracted")),
)
_GAUGES = {
    "pages_total": "Pages of the pool",
    "host_pages_total": "Pages of the host pool; on decode nodes those not free are of retracted requests",
    "queued_tokens": "Uncached prompt tokens not yet computed",
    "tokens_per_second": "Measured rate: output tokens of a decode node, computed prompt tokens of any other",
    "head_room": "Tokens that decode admission would still accept",
    "retractable": "Tokens that retracting every running request would give back",
    "serving": "1 while the node takes requests",
    "draining": "1 while the node finishes what it has and takes no more",
}
_COUNTERS = {
    "requests_total": "Requests taken in",
    "cached_tokens_total": "Prompt tokens found in the prefix cache",
    "host_hit_tokens_total": "Of those, tokens brought back from the host tier",
    "computed_tokens_total": "Prompt tokens computed",
    "output_tokens_total": "Tokens sampled",
    "relayed_bytes_total": "KV bytes written to decode nodes, or arrived on one",
}


class _NodeCollector(Collector):
    """Turns snapshots into metric families when scraped, so that nothing is copied between scrapes."""

    def __init__(self) -> None:
        self._stats: dict[tuple[str, str], NodeStats] = {}

    def set(self, node_id: str, role: Role, stats: NodeStats | None) -> None:
        nodes = dict(self._stats)
        nodes.pop((node_id, str(role)), None)
        if stats is not None:
            nodes[node_id, str(role)] = stats
        self._stats = nodes  # replaced whole: a scrape in another thread iterates over the old one

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        nodes = self._stats
        who = ("node", "role")
        for name, help_text, prefix, states in _BY_STATE:
            gauge = GaugeMetricFamily(f"kvrelay_node_{name}", help_text, labels=(*who, "state"))
            for node, stats in nodes.items():
                for state in states:
                    gauge.add_metric((*node, state), getattr(stats, prefix + state))
            yield gauge
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, help_text in names.items():
                metric = family(f"kvrelay_node_{name}", help_text, labels=who)
                for node, stats in nodes.items():
                    metric.add_metric(node, float(getattr(stats, name)))
                yield metric


class MetricsEndpoint:
    """A running HTTP endpoint: `port` is the one it listens on."""

    def __init__(self, server: WSGIServer, thread: threading.Thread):
        self._server = server
        self._thread = thread
        self.port = server.server_port

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(metrics: Metrics, listen: str) -> MetricsEndpoint:
    """Serve `metrics` over HTTP on "host:port" from a thread; port 0 picks one. ConfigError when it cannot be had."""
    host, _, port = listen.rpartition(":")
    try:
        return MetricsEndpoint(*start_http_server(int(port), host.strip("[]"), metrics.registry))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError([f"metrics_listen: cannot bind {listen!r}: {error}"]) from error
