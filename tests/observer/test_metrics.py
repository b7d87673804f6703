from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from services.core.ledger import Segment
from services.core.metrics import Labels, Metric
from services.observer.exposition import prometheus_name, render
from services.observer.metrics import MAX_SAMPLES, STALE_S, Metrics, Sender
from services.observer.model import BubbleSum, Member, Reading
from services.observer.request_metrics import MAX_TENANTS, TTFT_BOUNDS_S
from services.observer.series import MAX_SERIES, Counter, Histogram, Point
from tests.observer.made import SPENT_S, a_failure, a_hop, a_request

NOW_S = 1_800_000_000.0
BUSY = Metric("firsttoken.worker.engine.busy", "s", "Time inside the engine.", True)

# https://prometheus.io/docs/instrumenting/exposition_formats/
SAMPLE = r"[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_][a-zA-Z0-9_]*=\"([^\"\\]|\\.)*\",?)*\})? \S+$"

Set = frozenset[tuple[str, str]]


class Scraped:
    """What Prometheus reads."""

    def __init__(self, metrics: Metrics, *, now_s: float = NOW_S) -> None:
        self.text = render(metrics.families(now_s)).body.decode()
        self.values: dict[str, dict[Set, float]] = {}
        for family in parse(self.text):
            for sample in family.samples:
                labels = frozenset(sample.labels.items())
                self.values.setdefault(sample.name, {})[labels] = sample.value

    def of(self, name: str, **labels: str) -> float:
        """The sum over all series that have these labels."""
        series = self.values[name].items()
        return sum(value for have, value in series if labels.items() <= set(have))


def scrape(requests: Iterable[object] = (), *, block_tokens: int = 64) -> Scraped:
    metrics = Metrics()
    metrics.configure(slo_ttft_s=0.5, block_tokens=block_tokens)
    for request in requests:
        metrics.add(request)  # type: ignore[arg-type]
    return Scraped(metrics)


def reading(value: float, *, member_id: str = "worker-1", at_s: float = NOW_S) -> Reading:
    return Reading(at_s, member_id, "worker", BUSY.name, (), value)


def member(member_id: str, role: str = "worker") -> Member:
    return Member(member_id, role, "ready", "127.0.0.1:1", "host-1", 1, "")


def test_the_conventions_histograms_have_its_names_buckets_and_attributes() -> None:
    scraped = scrape([a_request(ttft_s=0.068, tpot_s=0.048, duration_s=0.5)])
    convention = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "firsttoken",
        "gen_ai_request_model": "model-1",
    }
    ttft = "gen_ai_server_time_to_first_token_seconds"
    assert scraped.of(f"{ttft}_bucket", le="0.06", **convention) == 0
    assert scraped.of(f"{ttft}_bucket", le="0.08", **convention) == 1
    assert scraped.of(f"{ttft}_sum", tenant="ada", request_class="interactive") == 0.068
    assert scraped.of("gen_ai_server_time_per_output_token_seconds_bucket", le="0.05") == 1
    assert scraped.of("gen_ai_server_request_duration_seconds_bucket", le="81.92") == 1
    assert scraped.of("gen_ai_server_request_duration_seconds_bucket", le="0.32") == 0


def test_segments_and_residual_stack_up_to_the_time_to_the_first_token() -> None:
    scraped = scrape([a_request(), a_request(ttft_s=0.018, spent_s={Segment.PREFILL: 0.018})])
    segments = scraped.of("firsttoken_ttft_segment_seconds_sum")
    residual = scraped.of("firsttoken_ttft_residual_seconds_sum")
    total = scraped.of("gen_ai_server_time_to_first_token_seconds_sum")
    assert segments + residual == pytest.approx(total + 0.001)
    for segment in Segment:
        assert scraped.of("firsttoken_ttft_segment_seconds_count", segment=segment) == 2
    queue = scraped.of("firsttoken_ttft_segment_seconds_sum", segment="queue")
    assert queue == SPENT_S[Segment.QUEUE]


def test_ledgers_that_do_not_balance_are_counted() -> None:
    slow = a_request(ttft_s=2.0, residual_s=0.019)
    scraped = scrape([a_request(residual_s=0.0009), slow, a_request(residual_s=-0.0011)])
    assert scraped.of("firsttoken_ttft_unbalanced_total") == 1


def test_an_answer_that_breaks_off_is_no_ledger_that_does_not_balance() -> None:
    left = a_request(spent_s={Segment.QUEUE: 0.010}, residual_s=0.058, error="the client is gone")
    scraped = scrape([a_request(), left])
    assert scraped.of("firsttoken_ttft_unbalanced_total") == 0
    assert scraped.of("firsttoken_ttft_residual_seconds_count") == 1
    assert scraped.of("firsttoken_ttft_segment_seconds_count", segment="queue") == 1
    assert scraped.of("gen_ai_server_time_to_first_token_seconds_count") == 2


def test_prompt_tokens_are_told_apart_by_where_they_came_from() -> None:
    loaded = a_request(prompt_tokens=300, cached_tokens=256, loaded_blocks=3, load_s=0.01)
    scraped = scrape([loaded])
    name = "firsttoken_prompt_tokens_total"
    found = {source: scraped.of(name, source=source) for source in ("computed", "worker", "store")}
    assert found == {"computed": 44, "worker": 64, "store": 192}
    assert scraped.of("firsttoken_kv_load_seconds_count") == 1


def test_speculation_gives_what_the_mean_length_is_made_of() -> None:
    scraped = scrape([a_request(output_tokens=10, drafted_tokens=12, accepted_tokens=6)])
    accepted = scraped.of("firsttoken_speculation_accepted_total")
    assert accepted / scraped.of("firsttoken_speculation_drafted_total") == 0.5
    assert 1 + accepted / scraped.of("firsttoken_speculation_steps_total") == 2.5


def test_every_outcome_is_there_from_the_first_request_on() -> None:
    values = scrape([a_request(ttft_s=0.501)]).values["firsttoken_slo_requests_total"]
    counts = {dict(labels)["outcome"]: value for labels, value in values.items()}
    assert counts == {"good": 0, "slow": 1, "failed": 0}


def test_failures_have_a_type_and_no_time_to_a_token() -> None:
    scraped = scrape([a_failure("NO_WORKER")])
    duration = "gen_ai_server_request_duration_seconds_count"
    assert scraped.of(duration, error_type="NO_WORKER") == 1
    assert "gen_ai_server_time_to_first_token_seconds_count" not in scraped.values


def test_ten_thousand_tenants_are_as_many_series_as_fifty() -> None:
    def tenants(count: int) -> Scraped:
        return scrape(a_request(tenant=f"tenant-{i}") for i in range(count))

    few, many = tenants(MAX_TENANTS + 1), tenants(10_000)
    assert {name: len(series) for name, series in many.values.items()} == {
        name: len(series) for name, series in few.values.items()
    }
    ttft = "gen_ai_server_time_to_first_token_seconds_count"
    assert many.of(ttft, tenant="other") == 10_000 - MAX_TENANTS
    assert many.of(ttft) == 10_000


def test_whatever_errors_and_hidden_work_are_called_there_are_few_series() -> None:
    requests = itertools.chain(
        (a_failure(f"error {i}", request_class=f"class {i}") for i in range(200)),
        (a_request(hidden_s={f"work {i}": 0.001}, model=f"model {i}") for i in range(200)),
    )
    scraped = scrape(requests)
    # Classes, models, errors and work are each told apart up to a bound.
    assert all(len(series) <= 20 * 40 for series in scraped.values.values())
    assert scraped.of("firsttoken_requests_total") == 400
    assert scraped.of("firsttoken_ttft_hidden_seconds_total") == pytest.approx(0.2)


def test_no_metric_has_more_series_than_it_may() -> None:
    counter = Counter("firsttoken.test", "{x}", "")
    for number in range(MAX_SERIES + 100):
        counter.add(1, {"a": str(number), "b": "b"})
    points = counter.family().points
    assert len(points) == MAX_SERIES + 1
    assert points[-1] == Point((("a", "other"), ("b", "other")), 100)


@given(st.lists(st.floats(0, 100), min_size=1))
def test_every_bucket_holds_what_is_not_above_its_bound(values: list[float]) -> None:
    histogram = Histogram("firsttoken.test", "s", "", TTFT_BOUNDS_S)
    for value in values:
        histogram.observe(value)
    [point] = histogram.family().points
    for bound, count in zip(TTFT_BOUNDS_S, itertools.accumulate(point.counts), strict=False):
        assert count == sum(value <= bound for value in values)
    assert sum(point.counts) == len(values)
    assert point.value == pytest.approx(sum(values))


def test_a_process_is_known_by_its_service_and_instance() -> None:
    metrics = Metrics()
    metrics.describe(BUSY)
    metrics.hear(reading(1.0))
    metrics.hear(reading(2.5))
    metrics.hear(reading(7.0, member_id="worker-2"))
    scraped = Scraped(metrics)
    name = "firsttoken_worker_engine_busy_seconds_total"
    assert scraped.of(name, service="worker", instance="worker-1") == 2.5
    assert scraped.of(name, service="worker", instance="worker-2") == 7.0
    assert f"# TYPE {name} counter" in scraped.text


def test_whoever_has_left_or_fell_silent_is_gone() -> None:
    metrics = Metrics()
    metrics.describe(BUSY)
    for number in range(1, 4):
        metrics.hear(reading(1.0, member_id=f"worker-{number}"))
        metrics.add_bubble(BubbleSum(NOW_S, f"worker-{number}", "queue", 0.1))
        metrics.set_dropped(Sender("worker", f"worker-{number}"), 1)
    metrics.set_members([member("worker-1"), member("worker-2")], generation=4)
    metrics.hear(reading(1.0, at_s=NOW_S + STALE_S + 1))
    scraped = Scraped(metrics, now_s=NOW_S + STALE_S + 1)
    assert len(scraped.values["firsttoken_worker_engine_busy_seconds_total"]) == 1
    for name in ("worker_engine_bubble_seconds", "observer_dropped"):
        instances = {
            dict(labels)["instance"] for labels in scraped.values[f"firsttoken_{name}_total"]
        }
        assert instances == {"worker-1", "worker-2"}
    assert scraped.of("firsttoken_members", role="worker", state="ready") == 2
    assert scraped.of("firsttoken_config_generation") == 4


def test_a_process_that_tells_too_much_costs_the_others_nothing() -> None:
    metrics = Metrics()
    metrics.describe(BUSY)
    for number in range(MAX_SAMPLES + 10):
        labels = (("n", str(number)),)
        metrics.hear(Reading(NOW_S, "worker-1", "worker", BUSY.name, labels, 1.0))
    metrics.hear(reading(3.0, member_id="worker-2"))
    scraped = Scraped(metrics)
    name = "firsttoken_worker_engine_busy_seconds_total"
    assert len(scraped.values[name]) == MAX_SAMPLES + 1
    assert scraped.of(name, instance="worker-2") == 3.0
    assert scraped.of("firsttoken_observer_refused_total") == 10


def test_what_nobody_described_is_a_level() -> None:
    metrics = Metrics()
    metrics.hear(reading(2.0))
    assert Scraped(metrics).of("firsttoken_worker_engine_busy") == 2.0


def test_quantiles_are_a_summary() -> None:
    metrics = Metrics()
    for quantile in ("0.5", "0.99"):
        labels = (("quantile", quantile),)
        metrics.hear(Reading(NOW_S, "worker-1", "worker", "firsttoken.lag", labels, 0.001))
    scraped = Scraped(metrics)
    assert "# TYPE firsttoken_lag summary" in scraped.text
    assert scraped.of("firsttoken_lag", quantile="0.99", instance="worker-1") == 0.001


def test_bubbles_add_up_by_stage_and_worker() -> None:
    metrics = Metrics()
    for duration_s in (0.25, 0.5):
        metrics.add_bubble(BubbleSum(NOW_S, "worker-1", "kv_load", duration_s))
    bubbles = Scraped(metrics).values["firsttoken_worker_engine_bubble_seconds_total"]
    labels = {"stage": "kv_load", "service": "worker", "instance": "worker-1"}
    assert bubbles == {frozenset(labels.items()): 0.75}


def test_text_from_outside_cannot_break_the_format() -> None:
    evil = 'a"b\\c\nd{e="f"} 1'
    metrics = Metrics()
    metrics.describe(Metric("firsttoken.of\n{others}", "{x}", "help\n# TYPE x counter", False))
    metrics.hear(Reading(NOW_S, "id\n", "worker", "firsttoken.of\n{others}", ((evil, evil),), 1.0))
    metrics.add(a_request(tenant=evil, model=evil))
    for accept in ("", "application/openmetrics-text; version=1.0.0"):
        rendered = render(metrics.families(NOW_S), accept)
        read: Any = parse_open if accept else parse  # untyped
        families = list(read(rendered.body.decode()))
        labels = [sample.labels for family in families for sample in family.samples]
        assert any(each.get("tenant") == evil for each in labels)
        assert any(evil in each.values() and each.get("instance") == "id\n" for each in labels)


NAMES = st.text(max_size=8) | st.sampled_from(
    ["", "1", "a.b", "a_b", "a.b.total", "le", "service", "__name__", "firsttoken.requests"]
)
LABELS = st.dictionaries(NAMES, st.text(max_size=8), max_size=3).map(
    lambda labels: tuple(sorted(labels.items()))
)


@settings(max_examples=25)
@given(
    described=st.lists(
        st.builds(
            Metric, NAMES, st.sampled_from(["", "s", "By/s", "{x}/s", "\n"]), NAMES, st.booleans()
        )
    ),
    told=st.lists(st.tuples(NAMES, NAMES, LABELS, st.floats())),
)
def test_whatever_processes_tell_the_rest_can_be_read(
    described: list[Metric], told: list[tuple[str, str, Labels, float]]
) -> None:
    metrics = Metrics()
    metrics.add(a_request())
    for metric in described:
        metrics.describe(metric)
    for service, name, labels, value in told:
        metrics.hear(Reading(NOW_S, service, service, name, labels, value))
    scraped = Scraped(metrics)
    assert scraped.of("firsttoken_requests_total") == 1
    text = scraped.text
    for line in text.rstrip("\n").split("\n"):
        assert line.startswith("# ") or re.match(SAMPLE, line), line
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))


def test_openmetrics_is_for_those_who_ask_for_it() -> None:
    metrics = Metrics()
    metrics.add(a_request())
    rendered = render(metrics.families(NOW_S), "application/openmetrics-text; version=1.0.0")
    assert rendered.content_type.startswith("application/openmetrics-text")
    assert rendered.body.endswith(b"# EOF\n")
    read: Any = parse_open  # untyped
    names = {family.name for family in read(rendered.body.decode())}
    assert "gen_ai_server_time_to_first_token_seconds" in names
    plain = render(metrics.families(NOW_S))
    assert plain.content_type.startswith("text/plain")


def test_a_bucket_names_the_trace_that_fell_into_it_last() -> None:
    metrics = Metrics()
    traces = [f"{number:032x}" for number in range(1, 4)]
    metrics.add(a_request(ttft_s=0.07, trace_id=traces[0]))
    metrics.add(a_request(ttft_s=0.075, trace_id=traces[1]))
    metrics.add(a_request(ttft_s=3.0, trace_id=traces[2], hops=(a_hop(sampled=False),)))
    rendered = render(metrics.families(NOW_S), "application/openmetrics-text; version=1.0.0")
    read: Any = parse_open  # untyped
    exemplars = {
        sample.labels["le"]: sample.exemplar.labels["trace_id"]
        for family in read(rendered.body.decode())
        for sample in family.samples
        if sample.exemplar
    }
    assert exemplars == {"0.08": traces[1]}


@pytest.mark.parametrize(
    ("name", "unit", "expected"),
    [
        ("gen_ai.server.request.duration", "s", "gen_ai_server_request_duration_seconds"),
        ("firsttoken.kvstore.read", "By", "firsttoken_kvstore_read_bytes"),
        ("firsttoken.kv.bandwidth", "By/s", "firsttoken_kv_bandwidth_bytes_per_second"),
        ("firsttoken.prefill.rate", "{token}/s", "firsttoken_prefill_rate_per_second"),
        ("firsttoken.requests", "{request}", "firsttoken_requests"),
        ("firsttoken.hit.ratio", "1", "firsttoken_hit_ratio"),
    ],
)
def test_names_are_those_that_a_collector_would_make(name: str, unit: str, expected: str) -> None:
    assert prometheus_name(Metric(name, unit, "", False)) == expected


def test_values_that_are_no_numbers_do_not_stop_the_others() -> None:
    metrics = Metrics()
    metrics.hear(reading(math.nan))
    metrics.add(a_request())
    assert Scraped(metrics).of("firsttoken_requests_total") == 1
