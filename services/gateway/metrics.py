"""What the gateway counts, for Prometheus. Each label has few values, whatever is asked."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds: from a cached prompt's first token to a long answer's last.
_TTFT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_DURATION_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """A registry of its own, so that several gateways can be in one process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.requests = Counter(
            _name("requests"),
            "Requests answered; 499: the client left before.",
            ["route", "status", "request_class"],
            registry=self._registry,
        )
        self.in_flight = Gauge(
            _name("requests_in_flight"), "Requests being answered.", registry=self._registry
        )
        self.ttft = Histogram(
            _name("ttft_seconds"),
            "From a request's arrival to its first token.",
            ["route", "request_class"],
            buckets=_TTFT_S,
            registry=self._registry,
        )
        self.duration = Histogram(
            _name("request_duration_seconds"),
            "From a request's arrival to the end of its answer.",
            ["route"],
            buckets=_DURATION_S,
            registry=self._registry,
        )
        self.tokens = Counter(
            _name("tokens"),
            "Tokens: of prompts, those of them whose KV was reused, and of answers.",
            ["kind"],
            registry=self._registry,
        )
        for kind in ("prompt", "cached", "completion"):
            self.tokens.labels(kind)

    def watch(self, what: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody looks."""
        gauge = Gauge(_name(what), text, registry=self._registry)
        gauge.set_function(read)

    def render(self) -> bytes:
        return generate_latest(self._registry)


def _name(what: str) -> str:
    return f"firsttoken_gateway_{what}"
