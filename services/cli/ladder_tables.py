"""What `firsttoken bench ladder` measured, in lines and on a page for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from services.cli import plot
from services.cli.kv_tables import table

WITHOUT_SPLIT = "without split"
# With fewer, a 95th percentile lies between the two slowest.
FEW = 21
TTFT_HEADER = (
    *("", "mean", "P95", "mean by", "of base", "share", "P95 by", "of base", "share"),
    *("inter. mean", "P95"),
)
REST_HEADER = (
    *("", "TPOT", "P95", "req/s", "tok/s", "hit", "held", "free", "of", "running", "of"),
    *("completed", "refused", "failed"),
)


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
    yield from headline(document)
    for number, row in enumerate(document["rungs"]):
        yield f"  {'+' if number else ' '} {row['rung']}: {row['adds']}"
    yield ""
    rows = _rows(document)
    yield from table([TTFT_HEADER, *map(ttft_cells, rows)])
    yield "Time to first token, ms; by: against the rung before, in ms, of the baseline, and as a"
    yield "share of the whole fall. inter.: of those that cannot wait, in every rung the same."
    yield ""
    yield from table([REST_HEADER, *map(rest_cells, rows)])
    yield "TPOT: ms. hit: share of prompt tokens found in cache. held: most KV blocks that running"
    yield "requests had at once; free: fewest that held nothing, not even what is cached."
    if document["engine"] == "llamacpp":
        yield "This engine has the KV of running requests beside the blocks, in its slots."
    yield ""
    yield from verdict(document)


def headline(document: Mapping[str, Any]) -> Iterator[str]:
    load, mesh = document["load"], document["mesh"]
    clock = {
        "virtual": "virtual time: real routers' and workers' cores, simulated engines",
        "real": f"real processes, {document['engine']}",
    }[document["clock"]]
    yield (
        f"{clock}; {mesh['workers']} workers, of which {mesh['prefill_workers']} only compute"
        f" prompts after the split; {mesh['blocks_per_worker']} KV blocks of"
        f" {load['block_tokens']} tokens each"
    )
    yield (
        f"{document['requests']} requests a rung in {document['seconds']:g} s, Poisson:"
        f" {document['rate_per_s']:.3g} a second, 60 % of the {document['capacity_per_s']:.3g} that"
        " the baseline can do"
    )
    yield (
        f"prompts of {load['prefix_tokens']} tokens that begin like others (one of"
        f" {load['num_prefixes']} beginnings) and {load['suffix_tokens']} of their own, answers of"
        f" {load['output_tokens']}"
    )
    share = f"{document['batch_requests']} of them can wait"
    if load["batch_tokens"] is not None:
        share += (
            f": documents of {load['batch_tokens']} tokens that share nothing,"
            f" {load['batch_burst']} at a time"
        )
    yield share


def verdict(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"From the baseline to the last rung: {_whole(document['whole'])}"
    if document["whole_without_split"] is not None:
        yield f"The same without the split: {_whole(document['whole_without_split'])}"
    rows = _rows(document)
    if document["equal_completions"]:
        yield f"Completed on every rung: {rows[0]['completed']} of {document['requests']}"
    else:
        yield "NOT the same number completed on every rung: its figures compare other requests."
    if document["requests"] < FEW:
        yield "So few requests: P95 is little else than the slowest. More come with --seconds."
    for row in rows:
        for reason, number in row["errors"].items():
            yield f"{row['rung']}: {number} requests not served: {reason}"


def page(document: Mapping[str, Any]) -> str:
    rows = _rows(document)
    parts = [
        f"<h1>Step by step: {escape(document['engine'])}</h1>",
        *(f"<p>{escape(line)}</p>" for line in (*headline(document), *verdict(document))),
    ]
    for figure, title, digits in (
        ("ttft_mean_ms", "Time to first token, mean, ms", 1),
        ("ttft_p95_ms", "Time to first token, 95th percentile, ms", 1),
        ("tpot_mean_ms", "Time per output token, mean, ms", 2),
        ("tpot_p95_ms", "Time per output token, 95th percentile, ms", 2),
        ("hit_rate", "Share of prompt tokens found in cache", 3),
    ):
        parts += plot.bars({row["rung"]: row[figure] for row in rows}, title, digits=digits)
    parts += [
        "<h2>Time to first token, ms, and what each rung changes</h2>",
        plot.table(TTFT_HEADER, map(ttft_cells, rows)),
        "<h2>All else</h2>",
        plot.table(REST_HEADER, map(rest_cells, rows)),
    ]
    return plot.frame("firsttoken bench ladder", parts)


def ttft_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["rung"],
        _figure(row["ttft_mean_ms"], 1),
        _figure(row["ttft_p95_ms"], 1),
        *_changes(row, "ttft_mean_ms"),
        *_changes(row, "ttft_p95_ms"),
        _figure(row["interactive_ttft_mean_ms"], 1),
        _figure(row["interactive_ttft_p95_ms"], 1),
    )


def rest_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["rung"],
        _figure(row["tpot_mean_ms"], 2),
        _figure(row["tpot_p95_ms"], 2),
        _figure(row["requests_per_s"], 2),
        _figure(row["output_tokens_per_s"], 0),
        _figure(row["hit_rate"], 3),
        *(str(row[name]) for name in ("blocks_held_peak", "blocks_free_least", "blocks")),
        *(str(row[name]) for name in ("running_peak", "slots")),
        *(str(row[name]) for name in ("completed", "refused", "failed")),
    )


def _rows(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = [*document["rungs"]]
    if document["without_split"] is not None:
        rows.append({**document["without_split"], "rung": WITHOUT_SPLIT})
    return rows


def _changes(row: Mapping[str, Any], figure: str) -> tuple[str, str, str]:
    """None of them for what is compared with no rung, and for the first."""
    change = row.get(f"{figure}_change")
    if change is None:
        return ("", "", "")
    of_baseline, share = row[f"{figure}_of_baseline"], row[f"{figure}_share"]
    return (f"{change:+.1f}", _percent(of_baseline), _percent(share))


def _whole(whole: Mapping[str, float | None]) -> str:
    mean, p95 = whole["ttft_mean_ms"], whole["ttft_p95_ms"]
    if mean is None or p95 is None:
        return "nothing to compare"
    return f"mean TTFT {mean:+.1%}, P95 {p95:+.1%}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.0%}"
