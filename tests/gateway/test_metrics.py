from __future__ import annotations

from services.core.metrics import Labels
from services.gateway.metrics import METRICS, Metrics


def read(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    return {(each.name, each.labels): each.value for each in metrics.read()}


def test_the_observer_is_told_what_prometheus_would_read() -> None:
    metrics = Metrics()
    calls = 0
    metrics.watch("mesh_calls_in_flight", lambda: calls)
    metrics.watch("ready", lambda: True)
    metrics.watch("connections", lambda: 7)
    metrics.requests.labels("/v1/completions", "200", "batch").inc()
    metrics.tokens.labels("prompt").inc(12)
    told = read(metrics)
    labels = (("route", "/v1/completions"), ("status", "200"), ("request_class", "batch"))
    assert told["firsttoken.gateway.requests", labels] == 1
    assert told["firsttoken.gateway.tokens", (("kind", "prompt"),)] == 12
    assert told["firsttoken.gateway.connections", ()] == 7
    assert {name for name, _ in told} == {metric.name for metric in METRICS}

    calls = 2
    assert read(metrics)["firsttoken.leak.held", (("what", "calls"),)] == 2
    metrics.in_flight.inc()
    assert read(metrics)["firsttoken.leak.held", (("what", "calls"),)] == 0
