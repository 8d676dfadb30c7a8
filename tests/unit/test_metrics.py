"""Metrics: what a scrape shows."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import pytest

from engine.core.errors import ConfigError
from engine.core.messages import NodeStats
from engine.core.metrics import FrontDoorMetric, Metric, Metrics, NodeMetric, serve_metrics
from engine.core.types import Role


def test_counters_gauges_and_histograms() -> None:
    metrics = Metrics(FrontDoorMetric)
    metrics.count(FrontDoorMetric.FINISHED, 2, "stop")
    metrics.set(FrontDoorMetric.QUEUED, 3)
    metrics.observe(FrontDoorMetric.PHASE, 0.003, "prefill")
    shown = metrics.expose()
    assert 'kvrelay_requests_finished_total{outcome="stop"} 2.0' in shown
    assert "kvrelay_queued_requests 3.0" in shown
    assert 'kvrelay_phase_seconds_bucket{le="0.005",phase="prefill"} 1.0' in shown
    assert 'kvrelay_phase_seconds_bucket{le="0.0025",phase="prefill"} 0.0' in shown


def test_node_snapshot_is_shown_until_the_node_leaves() -> None:
    metrics = Metrics(NodeMetric)
    metrics.set_node("p1", Role.PREFILL, NodeStats(pages_total=10, pages_free=6, pages_cached=4, waiting=2))
    metrics.set_node("p1", Role.PREFILL, NodeStats(pages_total=10, pages_free=9, pages_cached=1, requests_total=7))
    shown = metrics.expose()
    assert 'kvrelay_node_pages{node="p1",role="prefill",state="free"} 9.0' in shown
    assert 'kvrelay_node_requests{node="p1",role="prefill",state="waiting"} 0.0' in shown
    assert 'kvrelay_node_requests_total{node="p1",role="prefill"} 7.0' in shown
    metrics.set_node("p1", Role.PREFILL, None)
    assert 'node="p1"' not in metrics.expose()


def test_every_field_of_a_snapshot_is_shown() -> None:
    numbers: dict[str, Any] = dict.fromkeys(NodeStats.__dataclass_fields__, 41)
    metrics = Metrics(NodeMetric)
    metrics.set_node("d1", Role.DECODE, NodeStats(**numbers))
    assert sum(line.endswith(" 41.0") for line in metrics.expose().splitlines()) == len(numbers)


@pytest.mark.parametrize("kind", [FrontDoorMetric, NodeMetric])
def test_names_and_help(kind: type[Metric]) -> None:
    shown = Metrics(kind).expose()
    for one in kind:
        assert f"# HELP {one.metric} {one.help_text}" in shown
        assert one.metric.endswith("_total") == (one.kind == "counter")
    assert len({one.metric for one in kind}) == len(kind)


def test_endpoint_on_a_free_port() -> None:
    metrics = Metrics(NodeMetric)
    endpoint = serve_metrics(metrics, "127.0.0.1:0")
    try:
        assert endpoint.port > 0
        metrics.count(NodeMetric.FAILED, 1, "transferring")
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5) as answer:
            assert b'kvrelay_rooms_failed_total{phase="transferring"} 1.0' in answer.read()
        for listen in (f"127.0.0.1:{endpoint.port}", "192.0.2.1:0", "127.0.0.1", "127.0.0.1:99999"):
            with pytest.raises(ConfigError, match="metrics_listen"):
                serve_metrics(metrics, listen)
    finally:
        endpoint.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5)
