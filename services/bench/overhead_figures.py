"""From turns to figures. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from services.bench.overhead_load import CLIENT, Turn
from services.bench.overhead_rows import PASSED_ON, PROXIED, UNARY, WORKER

ENGINE = "engine"
# Neither is a part of the service layer.
APART = (CLIENT, ENGINE)


def compare(turns: Mapping[str, Sequence[Turn]], idle: Sequence[Turn]) -> list[dict[str, Any]]:
    """A row for each way; TTFT beside the worker's and the unary floor's of the same turns."""
    rates = idle_rates(idle)
    rows = [{"row": name, **summarise(each, rates)} for name, each in turns.items()]
    named = {row["row"]: row for row in rows}
    for row in rows:
        for percentile in ("p50", "p99"):
            figure = f"ttft_{percentile}_ms"
            if WORKER in named:
                row[f"added_{percentile}_ms"] = row[figure] - named[WORKER][figure]
            if UNARY in named:
                row[f"of_unary_{percentile}"] = row[figure] / named[UNARY][figure]
    return rows


def summarise(turns: Sequence[Turn], idle: Mapping[str, float]) -> dict[str, Any]:
    ttfts_s = [heard.ttft_s for turn in turns for heard in turn.heard]
    number, took_s = len(ttfts_s), sum(turn.took_s for turn in turns)
    late_s = [late for turn in turns for late in turn.late_s]
    cpu_us = {name: us / number for name, us in _above_idle_us(turns, idle).items()}
    return {
        "requests": number,
        "requests_per_s": number / took_s,
        "ttft_p50_ms": percentile(ttfts_s, 50) * 1e3,
        "ttft_p99_ms": percentile(ttfts_s, 99) * 1e3,
        "messages": sum(heard.num_messages for turn in turns for heard in turn.heard) / number,
        **({"late_p99_ms": percentile(late_s, 99) * 1e3} if late_s else {}),
        "service_cpu_us": service_us(cpu_us),
        "cpu_us_per_request": cpu_us,
    }


def per_token(
    turns: Mapping[str, Sequence[Turn]], idle: Sequence[Turn], *, answer_tokens: int
) -> list[dict[str, Any]]:
    """Of long answers, all of the same length. The first token's cost is spread over all."""
    rates, rows = idle_rates(idle), []
    for name, each in turns.items():
        heard = [one for turn in each for one in turn.heard]
        num_tokens = len(heard) * answer_tokens
        num_messages = sum(one.num_messages for one in heard)
        cpu_us = _above_idle_us(each, rates)
        rows.append(
            {
                "row": name,
                "answers": len(heard),
                "tokens_per_s": num_tokens / sum(turn.took_s for turn in each),
                "tokens_per_message": num_tokens / num_messages,
                "messages_per_answer": num_messages / len(heard),
                "service_cpu_us": service_us(cpu_us) / num_tokens,
                "service_cpu_us_per_message": service_us(cpu_us) / num_messages,
                "cpu_us_per_answer": {name: us / len(heard) for name, us in cpu_us.items()},
                "cpu_us_per_token": {name: us / num_tokens for name, us in cpu_us.items()},
            }
        )
    return rows


def beside_the_floor(
    answers: Sequence[Mapping[str, Any]], short: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """The router's CPU for a message, beside a proxy's that looks at nothing. `short`: rows of
    answers of one token, to tell apart what a request costs however long its answer is."""
    long, passed = (_row(answers, name) for name in (PROXIED, PASSED_ON))
    least = _row(short, PROXIED)
    if not (long and passed and least):
        return {}
    router_us = long["cpu_us_per_answer"]["router"]
    passing_us = passed["cpu_us_per_answer"]["passing"] / passed["messages_per_answer"]
    more_us = router_us - least["cpu_us_per_request"]["router"]
    more_messages = max(1.0, long["messages_per_answer"] - least["messages"])
    return {
        "router_us_per_message": router_us / long["messages_per_answer"],
        "router_us_per_further_message": more_us / more_messages,
        "passing_us_per_message": passing_us,
        "further_of_passing": more_us / more_messages / passing_us if passing_us > 0 else 0.0,
    }


def _row(rows: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    return next((row for row in rows if row["row"] == name), {})


def idle_rates(idle: Sequence[Turn]) -> dict[str, float]:
    """CPU seconds in a second in which nobody asks, by process."""
    took_s = sum(turn.took_s for turn in idle)
    return {
        name: sum(turn.cpu_s[name] for turn in idle) / took_s for name in _names(idle) if took_s
    }


def service_us(cpu_us: Mapping[str, float]) -> float:
    return sum(us for name, us in cpu_us.items() if name not in APART)


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _above_idle_us(turns: Sequence[Turn], idle: Mapping[str, float]) -> dict[str, float]:
    """May be a little less than nothing, for a process that has no part in it."""
    took_s = sum(turn.took_s for turn in turns)
    return {
        name: (sum(turn.cpu_s[name] for turn in turns) - idle.get(name, 0.0) * took_s) * 1e6
        for name in _names(turns)
    }


def _names(turns: Sequence[Turn]) -> tuple[str, ...]:
    return tuple(turns[0].cpu_s) if turns else ()
