from __future__ import annotations

import json

from services.bench import decisions


def test_decisions_are_counted_by_workers_and_by_blocks() -> None:
    told: list[str] = []
    document = decisions.measure(workers=(2, 4, 8), blocks=(200, 1_000), tell=told.append)
    rows = document["rows"]

    assert json.loads(json.dumps(document)) == document
    assert len(told) == len(rows) == 4
    # Blocks at one number of workers, workers at the most blocks.
    assert [(row["workers"], row["blocks"]) for row in rows] == [
        (2, 1_000),
        (4, 200),
        (4, 1_000),
        (8, 1_000),
    ]
    for row in rows:
        assert 0 < row["choose_us"] < row["whole_us"]
        assert row["decisions_per_s"] == 1e6 / row["whole_us"]
