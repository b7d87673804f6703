"""What `firsttoken bench overhead` measured, in lines and on a page for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from services.cli import plot
from services.cli.kv_tables import table

PACES = ("alone", "closed", "open")
TTFT_HEADER = (
    *("", "TTFT P50", "P99", "added P50", "P99", "of unary P50", "P99"),
    *("req/s", "service us"),
)
# Less is the noise of the idle time that is subtracted.
LEAST_US = 0.5


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
    yield from headline(document)
    for load in document["loads"]:
        for pace in PACES:
            yield ""
            length = f"about {load['prompt_tokens']} tokens"
            yield f"{load['load']} prompts of {length}, {_pace(document, pace)}"
            yield from table([TTFT_HEADER, *map(ttft_cells, load[pace])])
            yield "  CPU us a request, by process:"
            yield from table(cpu_rows(load[pace], "cpu_us_per_request", digits=0))
            yield f"  idle, taken off: {_idle(load[f'{pace}_idle_us_per_s'])}"
    yield ""
    yield from _long_answers(document["long_answers"])
    yield ""
    yield "TTFT in ms. added: beyond the worker's of the same turns; of unary: in round trips of"
    yield "a unary call of grpc.aio with nothing in it. service us: CPU of all processes of ours"
    yield "for a request, without the client's and the engine's."


def headline(document: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{document['engine']} engine that takes as good as no time, the embedded model's"
        f" vocabulary; {document['turns']} turns of each row"
    )
    for name, reason in document["skipped"].items():
        yield f"{name}: not measured, {reason}"


def ttft_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["row"],
        *(_figure(row[f"ttft_{name}_ms"], 2) for name in ("p50", "p99")),
        *(_figure(row.get(f"added_{name}_ms"), 2, sign="+") for name in ("p50", "p99")),
        *(_figure(row.get(f"of_unary_{name}"), 2) for name in ("p50", "p99")),
        _figure(row["requests_per_s"], 0),
        _figure(row["service_cpu_us"], 0),
    )


def cpu_rows(
    rows: Sequence[Mapping[str, Any]], figure: str, *, digits: int, least: float = LEAST_US
) -> list[tuple[str, ...]]:
    """A column for each process that has a part in any of them."""
    names = [name for name in rows[0][figure] if any(row[figure][name] >= least for row in rows)]
    cells = [
        (
            row["row"],
            *(
                _figure(row[figure][name] if row[figure][name] >= least else None, digits)
                for name in names
            ),
        )
        for row in rows
    ]
    return [("", *names), *cells]


def page(document: Mapping[str, Any]) -> str:
    parts = ["<h1>What the service layer costs</h1>"]
    parts += [f"<p>{escape(line)}</p>" for line in headline(document)]
    for load in document["loads"]:
        for pace in PACES:
            title = f"{load['load']} prompts, {_pace(document, pace)}"
            rows = load[pace]
            parts += plot.bars(
                {row["row"]: row["ttft_p50_ms"] for row in rows},
                f"{title}: time to first token, median, ms",
                digits=2,
            )
            parts += plot.bars(
                {row["row"]: row["service_cpu_us"] for row in rows},
                f"{title}: CPU of the service's processes, us a request",
                digits=0,
            )
            parts.append(plot.table(TTFT_HEADER, map(ttft_cells, rows)))
            header, *cells = cpu_rows(rows, "cpu_us_per_request", digits=0)
            parts.append(plot.table(header, cells))
    answers = document["long_answers"]
    parts += plot.bars(
        {row["row"]: row["service_cpu_us"] for row in answers["rows"]},
        f"Answers of {answers['tokens']} tokens, {answers['streams']} at a time: CPU, us a token",
        digits=2,
    )
    parts.append(plot.table(TOKEN_HEADER, map(_token_cells, answers["rows"])))
    return plot.frame("firsttoken bench overhead", parts)


TOKEN_HEADER = (*("", "tok/s", "tok/message", "messages", "service us/token", "us/message"),)


def _long_answers(answers: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"answers of {answers['tokens']} tokens, {answers['streams']} at a time; through the router"
        f" {answers['proxied_messages_per_answer']:.1f} messages each way,"
        f" {answers['proxied_bytes_per_message']:.0f} bytes a message,"
        f" {answers['proxied_bytes_per_token']:.1f} bytes a token"
    )
    yield from table([TOKEN_HEADER, *map(_token_cells, answers["rows"])])
    yield "  CPU us a token, by process:"
    yield from table(cpu_rows(answers["rows"], "cpu_us_per_token", digits=1, least=0.05))
    yield f"  idle, taken off: {_idle(answers['idle_us_per_s'])}"
    if beside := answers["beside_the_floor"]:
        yield (
            f"  the router: {beside['router_us_per_message']:.1f} us a message,"
            f" {beside['router_us_per_further_message']:.1f} without what a request costs anyway;"
            f" a proxy that looks at nothing: {beside['passing_us_per_message']:.1f}"
            f" ({beside['further_of_passing']:.2f} times)"
        )


def _token_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["row"],
        _figure(row["tokens_per_s"], 0),
        _figure(row["tokens_per_message"], 2),
        _figure(row["messages_per_answer"], 1),
        _figure(row["service_cpu_us"], 1),
        _figure(row["service_cpu_us_per_message"], 1),
    )


def _pace(document: Mapping[str, Any], pace: str) -> str:
    return {
        "alone": "one after the other",
        "closed": f"{document['concurrency']} at a time",
        "open": f"{document['rate_per_s']:g} a second, Poisson",
    }[pace]


def _idle(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {us:.0f}" for name, us in rates.items()) + " us a second"


def _figure(value: float | None, digits: int, *, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"
