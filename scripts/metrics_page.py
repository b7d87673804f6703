"""Make the tables of docs/metrics.md of the metrics that the code describes.

With --check nothing is written: exit status 1 says that the page is not what it should be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvstore import metrics as kvstore
from router import operators as router
from services.core.metrics import Metric
from services.encoding import metrics as tokenizer
from services.gateway import metrics as gateway
from services.observer.exposition import series_names
from services.observer.metrics import OWN_METRICS
from services.observer.request_metrics import RequestMetrics
from services.observer.series import Kind
from services.runtime import lag
from worker import metrics as worker

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


class Section(NamedTuple):
    title: str
    metrics: tuple[tuple[Metric, Kind], ...]


def sections() -> Iterator[Section]:
    requests = ((family.metric, family.kind) for family in RequestMetrics().families())
    yield Section("Requests", tuple(requests))
    yield _of_samples("Every process", lag.METRICS)
    yield _of_samples("Gateways", gateway.METRICS)
    yield _of_samples("Routers", router.METRICS)
    yield _of_samples("Tokenizers", tokenizer.METRICS)
    yield _of_samples("Workers", worker.METRICS)
    yield _of_samples("KV stores", kvstore.METRICS)
    yield _of_samples("The observer", OWN_METRICS)


def make(page: str) -> str:
    """`page`: as it is; what stands before its first table stays."""
    parts = [page.partition("\n## ")[0]]
    for title, metrics in sections():
        rows = [_row(metric, kind) for metric, kind in metrics]
        parts += [f"\n## {title}\n\n| name | in PromQL | |\n|---|---|---|\n", *rows]
    return "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    page = PAGE.read_text()
    if not parser.parse_args().check:
        PAGE.write_text(make(page))
    elif make(page) != page:
        print(f"{PAGE.name} is not what the code says: run python scripts/metrics_page.py")
        return 1
    return 0


def _of_samples(title: str, metrics: Iterable[Metric]) -> Section:
    kinds = {True: Kind.COUNTER, False: Kind.GAUGE}
    return Section(title, tuple((metric, kinds[metric.counts]) for metric in metrics))


def _row(metric: Metric, kind: Kind) -> str:
    first, *more = series_names(metric, kind)
    shown = f"`{first}`" + (", `_count`, `_sum`" if more else "")
    return f"| `{metric.name}` | {shown} | {metric.text} |\n"


if __name__ == "__main__":
    sys.exit(main())
