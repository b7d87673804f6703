"""What `firsttoken bench route` measured, in lines for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.cli.kv_tables import table

HEADER = (
    *("", "hit", "of oracle", "mean", "P50", "P95", "P99", "TPOT"),
    *("req/s", "tok/s", "work max", "min", "predicted", "wrong by", "failed"),
)


def lines_of(document: dict[str, Any]) -> Iterator[str]:
    yield from headline(document)
    yield from table([HEADER, *map(cells, document["strategies"])])
    yield "hit: share of prompt tokens found in cache. mean to P99: time to first token, ms."
    yield "TPOT: ms. work: uncached tokens of the busiest and the idlest worker, in means."
    yield "predicted: hit rate that routers expected; wrong by: of prompt tokens, either way."
    late_ms = max((row.get("late_p99_ms", 0.0) for row in document["strategies"]), default=0.0)
    if late_ms:
        yield f"P99 of how late the client sent a request: {late_ms:.1f} ms."
    for row in document["strategies"]:
        for reason, number in row.get("failures", {}).items():
            yield f"{row['strategy']}: {number} requests failed: {reason}"


def headline(document: dict[str, Any]) -> Iterator[str]:
    load, mesh, ideal = document["workload"], document["mesh"], document["oracle"]
    rate = load["rate_per_s"]
    speed = "all at once" if rate is None else f"{rate:.3g} a second"
    clock = {
        "virtual": "virtual time: real routers and workers' cores, simulated engines",
        "live": "real processes, simulated engines, through the HTTP edge",
    }[document["clock"]]
    yield (
        f"{load['name']}: {load['requests']} requests, {speed}; prompts of"
        f" {load['prompt_tokens']:.0f} tokens on average, answers of {load['output_tokens']:.0f}"
    )
    overlap = "beside prompts" if mesh["decode_overlap"] else "between prompts"
    split = f" ({mesh['prefill_workers']} of them prefill)" if mesh["prefill_workers"] else ""
    yield (
        f"workers: {mesh['workers']}{split}, routers: {mesh['routers']};"
        f" {mesh['blocks_per_worker']} blocks of {mesh['block_tokens']} tokens,"
        f" {mesh['slots_per_worker']} slots, {mesh['prefill_tokens_per_s']:.0f} prompt tokens a"
        f" second, {mesh['decode_step_ms']:g} ms a decode step (+"
        f" {mesh['decode_step_ms_per_seq']:g} ms a sequence), {overlap}"
    )
    yield clock
    yield (
        f"an offline router that knows all such caches hits {ideal['hit_rate']:.3f}, work"
        f" {ideal['work_min']:.3f} to {ideal['work_max']:.3f} of the mean"
    )


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["strategy"],
        _figure(row["hit_rate"], 3),
        _figure(row["of_oracle"], 3),
        *(_figure(row[f"ttft_{name}_ms"], 1) for name in ("mean", "p50", "p95", "p99")),
        _figure(row["tpot_ms"], 2),
        _figure(row["requests_per_s"], 1),
        _figure(row["output_tokens_per_s"], 0),
        _figure(row["work_max"], 3),
        _figure(row["work_min"], 3),
        _figure(row["predicted_hit_rate"], 3),
        _figure(row["mispredicted"], 3),
        str(row["failed"]),
    )


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
