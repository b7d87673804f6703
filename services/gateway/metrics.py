"""What the gateway counts, for Prometheus and the observer. Each label has few values, whatever
is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from services.core.metrics import LEAK, Metric, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds: from a cached prompt's first token to a long answer's last.
_TTFT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_DURATION_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

_REQUESTS = Metric(
    "firsttoken.gateway.requests",
    "{request}",
    "Requests answered; 499: the client left before.",
    True,
)
_IN_FLIGHT = Metric(
    "firsttoken.gateway.requests.in_flight", "{request}", "Requests being answered.", False
)
_TOKENS = Metric(
    "firsttoken.gateway.tokens",
    "{token}",
    "Tokens: of prompts, those of them whose KV was reused, and of answers.",
    True,
)
# Read when somebody looks: what each is called in Metrics.watch.
_WATCHED = {
    "mesh_calls_in_flight": Metric(
        "firsttoken.gateway.mesh_calls.in_flight", "{call}", "Calls open at routers.", False
    ),
    "ready": Metric(
        "firsttoken.gateway.ready", "{gateway}", "1: there is a router, and a worker.", False
    ),
    "connections": Metric(
        "firsttoken.gateway.connections", "{connection}", "Connections of clients.", False
    ),
}
METRICS = (_REQUESTS, _IN_FLIGHT, _TOKENS, *_WATCHED.values(), LEAK)


class Metrics:
    """A registry of its own, so that several gateways can be in one process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._watched: dict[str, Callable[[], float]] = {}
        self.requests = Counter(
            _name("requests"),
            _REQUESTS.text,
            ["route", "status", "request_class"],
            registry=self._registry,
        )
        self.in_flight = Gauge(
            _name("requests_in_flight"), _IN_FLIGHT.text, registry=self._registry
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
            _TOKENS.text,
            ["kind"],
            registry=self._registry,
        )
        for kind in ("prompt", "cached", "completion"):
            self.tokens.labels(kind)
        # By their labels, for each request: `labels` takes a lock and makes texts each time.
        self.requests_of = cache(self.requests.labels)
        self.ttft_of = cache(self.ttft.labels)
        self.duration_of = cache(self.duration.labels)
        self.tokens_of = cache(self.tokens.labels)

    def watch(self, what: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody looks."""
        gauge = Gauge(_name(what), _WATCHED[what].text, registry=self._registry)
        gauge.set_function(read)
        self._watched[what] = read

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def read(self) -> Iterator[Sample]:
        """For the observer. Histograms it has of its own."""
        told = ((_REQUESTS, self.requests), (_IN_FLIGHT, self.in_flight), (_TOKENS, self.tokens))
        for metric, collector in told:
            for family in collector.collect():
                for sample in family.samples:
                    yield Sample(metric.name, sample.value, tuple(sample.labels.items()))
        for what, read in self._watched.items():
            yield Sample(_WATCHED[what].name, read())
        held = 0.0 if self._num_in_flight else self._watched["mesh_calls_in_flight"]()
        yield Sample(LEAK.name, held, (("what", "calls"),))

    @property
    def _num_in_flight(self) -> float:
        [family] = self.in_flight.collect()
        return family.samples[0].value


def _name(what: str) -> str:
    return f"firsttoken_gateway_{what}"
