"""What `/api/state` answers."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import orjson
import pytest

from services.core.ledger import Segment
from services.observer.history import SHARES, History
from services.observer.model import BubbleSum, Generation, Member, Part, Reading, Window
from services.observer.rows import describe, describe_trace
from services.observer.state import MAX_STATE_BYTES, make_state
from services.observer.state_fields import State
from tests.observer.made import a_hop, a_request
from tests.observer.scenes import FINDING, NOW_UNIX_S, request, scene

EMPTY = Window(
    begin_unix_s=NOW_UNIX_S - 900,
    end_unix_s=NOW_UNIX_S,
    requests=(),
    readings=(),
    bubbles=(),
    members=(),
    generations=(),
)


def check_type(value: Any, kind: Any, path: str = "state") -> None:
    """As the TypedDicts say, field by field."""
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        assert value.keys() == hints.keys(), path
        for key, inner in hints.items():
            check_type(value[key], inner, f"{path}.{key}")
    elif get_origin(kind) is list:
        for at, each in enumerate(value):
            check_type(each, get_args(kind)[0], f"{path}[{at}]")
    elif get_origin(kind) is tuple:
        for each, inner in zip(value, get_args(kind), strict=True):
            check_type(each, inner, path)
    elif get_origin(kind) is dict:
        for key, each in value.items():
            check_type(key, get_args(kind)[0], path)
            check_type(each, get_args(kind)[1], f"{path}.{key}")
    elif get_args(kind):
        if value is not None:
            check_type(value, get_args(kind)[0], path)
    else:
        assert isinstance(value, (int, float) if kind is float else kind), path
        assert not isinstance(value, float) or math.isfinite(value), path


@pytest.mark.parametrize("num_requests", [0, 1, 500])
def test_it_is_as_its_fields_say(num_requests: int) -> None:
    window = scene(num_requests, slow_since_s=250) if num_requests else EMPTY
    check_type(make_state(window, [FINDING] if num_requests else []), State)


def test_without_requests_it_waits_for_them() -> None:
    state = make_state(EMPTY, [])
    assert state["headline"] == {"level": "idle", "text": "No request has come yet."}
    assert state["now"] is None
    assert state["before"] is None
    assert state["last_request_unix_s"] is None


def test_the_headline_is_the_first_finding() -> None:
    other = {**FINDING, "cause": "loop_lag", "severity": "warning", "summary": "Late loops."}
    state = make_state(scene(50), [FINDING, other])
    assert state["headline"] == {"level": "critical", "text": FINDING["summary"]}
    assert [finding["cause"] for finding in state["findings"]] == [FINDING["cause"], "loop_lag"]
    assert make_state(scene(50), [])["headline"]["level"] == "healthy"


def test_few_requests_are_not_called_healthy() -> None:
    assert make_state(scene(1), [])["headline"] == {
        "level": "idle",
        "text": "1 request so far: too few to judge.",
    }


def test_without_a_finding_the_figures_speak() -> None:
    slow = make_state(scene(1000, slow_since_s=250), [])["headline"]
    assert slow["level"] == "warning"
    assert re.fullmatch(
        r"The (median|P95) first token comes \d\.\d times as late as 60 minutes ago\. Most of that"
        r" is prefill, \d+ to \d+ ms; no rule says why\.",
        slow["text"],
    )


def test_failures_without_a_finding_are_said() -> None:
    requests = scene(100, over_s=280).requests
    errors = ["the queue is full, 64 wait", "the queue is full, 65 wait", "no worker"] * 10
    failed = [
        dataclasses.replace(each, error=error, ttft_s=None)
        for each, error in zip(requests, errors, strict=False)
    ]
    state = make_state(scene(1, requests=(*failed, *requests[30:])), [])
    assert state["headline"] == {
        "level": "warning",
        "text": "30 % of the requests of the last minutes failed, most often:"
        " the queue is full, 64 wait",
    }


def test_now_is_compared_with_an_hour_before() -> None:
    state = make_state(scene(1000, slow_since_s=250), [])
    now, before = state["now"], state["before"]
    assert now is not None
    assert before is not None
    assert now["begin_unix_s"] - before["begin_unix_s"] == pytest.approx(3600)
    assert now["p50_s"] > 2 * before["p50_s"]  # type: ignore[operator]
    grown = {share: now["mean_s"][share] - before["mean_s"][share] for share in SHARES}  # type: ignore[index]
    assert max(grown, key=lambda share: grown[share]) == "prefill"


def test_a_young_mesh_is_compared_with_its_beginning_or_with_nothing() -> None:
    young = make_state(scene(200, over_s=900), [])["before"]
    assert young is not None
    assert NOW_UNIX_S - 900 - 60 <= young["begin_unix_s"] < young["end_unix_s"] <= NOW_UNIX_S - 300
    assert make_state(scene(200, over_s=500), [])["before"] is None


def test_the_history_outlives_the_window() -> None:
    everything = scene(600)
    history = History.of(everything.requests, NOW_UNIX_S)
    window = dataclasses.replace(everything, requests=everything.requests[-5:])
    state = make_state(window, [], history)
    assert state["num_requests"] == 5
    assert sum(state["timelines"][1]["num_requests"]) == 600
    assert state["before"] is not None


def test_the_slowest_come_first_and_add_up() -> None:
    slow = make_state(scene(900, slow_since_s=250), [])["slow"]
    ttfts_s = [row["ttft_s"] for row in slow]
    assert ttfts_s == sorted(ttfts_s, reverse=True)  # type: ignore[type-var]
    for row in slow:
        assert sum(row["spent_s"].values()) == pytest.approx(row["ttft_s"], abs=1e-5)
        assert [hop["depth"] for hop in row["hops"]] == [0, 1, 2, 2]
        assert row["arrived_unix_s"] > NOW_UNIX_S - 300


def test_what_failed_without_a_token_is_shown_after_them() -> None:
    failed = a_request(
        arrived_unix_s=NOW_UNIX_S - 5, ttft_s=None, error="QUEUE_FULL", spent_s={}, residual_s=0.0
    )
    state = make_state(dataclasses.replace(EMPTY, requests=(failed, a_request())), [])
    assert state["num_failed"] == 1
    assert [row["error"] for row in state["slow"]] == ["", "QUEUE_FULL"]


def test_tiers_are_as_workers_count_them() -> None:
    cache = make_state(scene(300), [])["cache"]
    shares = {row["tier"]: row["share"] * 7250 for row in cache["tiers"]}
    tokens = {"worker": 4000, "node memory": 600, "Redis": 150, "computed": 2500}
    assert shares == pytest.approx(tokens, abs=1)
    told = make_state(scene(300, readings=()), [])["cache"]
    assert {row["tier"] for row in told["tiers"]} == {"a cache", "computed"}
    assert told["predicted"]["over_tokens"] > 0 == told["predicted"]["under_tokens"]


def test_members_carry_their_load_and_odd_ones_come_first() -> None:
    members = make_state(scene(10), [])["members"]
    assert (members[0]["id"], members[0]["state"]) == ("worker-3", "draining")
    load = {row["name"]: row["value"] for row in members[-1]["load"]}
    assert load["busy"] == pytest.approx(0.45)
    assert load["running"] == 4
    assert load["of its KV"] == pytest.approx(360 / 512, abs=1e-6)


def test_queues_are_told_by_class() -> None:
    queues = {row["request_class"]: row for row in make_state(scene(700), [])["queues"]}
    assert queues["interactive"]["num_requests"] > queues["batch"]["num_requests"] > 0
    assert (queues["batch"]["num_waiting"], queues["interactive"]["num_waiting"]) == (2, None)
    assert queues["interactive"]["longest"] == 6
    quiet = make_state(scene(1, requests=()), [])["queues"]
    assert [(row["request_class"], row["num_waiting"], row["p50_s"]) for row in quiet] == [
        ("batch", 2, None)
    ]


def test_a_counter_that_began_anew_does_not_go_back() -> None:
    name, labels = "firsttoken.worker.engine.busy", ()
    values = ((-50.0, 900.0), (-10.0, 5.0))
    readings = tuple(
        Reading(NOW_UNIX_S + at_s, "worker-2", "worker", name, labels, value)
        for at_s, value in values
    )
    members = make_state(scene(10, readings=readings), [])["members"]
    load = next(row["load"] for row in members if row["id"] == "worker-2")
    assert load == [{"name": "busy", "unit": "share", "value": 0.125}]


def test_secrets_of_settings_are_not_shown() -> None:
    changes = {
        "kvstore.redis_url": ("", "redis://ada:hunter2@redis:6379/0"),
        "tenants.acme.key_hashes": ((), ("deadbeef",)),
    }
    window = dataclasses.replace(EMPTY, generations=(Generation(2, NOW_UNIX_S, changes),))
    shown = json.dumps(make_state(window, []))
    assert "hunter2" not in shown
    assert "deadbeef" not in shown


def crowded() -> Window:
    """As much of everything as can be, with names as long as anyone likes."""
    rng = random.Random(5)
    long = "<script>alert(1)</script>" + "\N{SNOWMAN}\"'&" * 900
    usual = request(0, NOW_UNIX_S - 100, rng)
    parts = tuple(
        Part(rng.choice([*Segment]), rng.uniform(0, 50), rng.uniform(50, 60)) for _ in range(80)
    )
    requests = [usual] * 9_980
    for index in range(20):
        hops = tuple(
            a_hop(
                name=long,
                service=long,
                member_id=long,
                error=long,
                span_id=f"{index:08x}{at:08x}",
                parent_span_id=f"{index:08x}{at - 1:08x}" if at else "",
                parts=parts,
                hidden_s={f"{at}{long}": 1.0 for at in range(50)},
            )
            for at in range(30)
        )
        huge: dict[str, Any] = dict.fromkeys(("tenant", "model", "error", "worker_id"), long)
        huge |= {
            "hops": hops,
            "request_class": f"{index}{long}",
            "ttft_s": 60.0 if index % 2 else None,
        }
        requests.append(dataclasses.replace(usual, **huge))
    return Window(
        begin_unix_s=NOW_UNIX_S - 300,
        end_unix_s=NOW_UNIX_S,
        requests=tuple(requests),
        readings=tuple(
            Reading(NOW_UNIX_S, f"{long}{at}", "worker", "firsttoken.worker.kv.cached", (), 1e18)
            for at in range(500)
        ),
        bubbles=tuple(BubbleSum(NOW_UNIX_S, long, f"{at}{long}", 1.0) for at in range(500)),
        members=tuple(
            Member(f"{at}{long}", "worker", long, long, long, 1, long) for at in range(500)
        ),
        generations=tuple(
            Generation(at, NOW_UNIX_S, {f"{key}{long}": (long, long) for key in range(40)})
            for at in range(100)
        ),
        num_dropped=2**60,
    )


def test_it_stays_small_whatever_comes() -> None:
    window = crowded()
    finding = {
        **FINDING,
        "summary": "\N{SNOWMAN}" * 9000,
        "evidence": [{"name": "e" * 900, "value": "v" * 900, "threshold": "t" * 900}] * 90,
        "trace_ids": ["f" * 32] * 900,
    }
    state = make_state(window, [{**finding, "cause": f"c{at}"} for at in range(90)])
    assert len(orjson.dumps(state)) < MAX_STATE_BYTES
    assert state["num_members_left_out"] == 440
    check_type(state, State)


def test_what_is_not_finite_is_no_json() -> None:
    odd = a_request(
        arrived_unix_s=NOW_UNIX_S - 1, spent_s={Segment.QUEUE: math.inf}, residual_s=math.nan
    )
    json.dumps(describe(odd), allow_nan=False)


def test_a_trace_has_all_of_its_hops_and_attributes() -> None:
    trace = describe_trace(request(3, NOW_UNIX_S, random.Random(3)))
    assert trace["hops"][0]["name"] == "gateway.request"
    assert trace["hops"][-1]["attributes"]["gen_ai.request.model"] == "smollm2"
    orjson.dumps(trace)
