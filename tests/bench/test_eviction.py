from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import POLICIES
from services.bench.eviction import (
    BELADY,
    BLOCKS_PER_UNIT,
    Chain,
    measure,
    measure_traces,
    read_trace,
    replay,
    replay_belady,
)


def conversations(num_turns: int, num_scans: int) -> list[Chain]:
    """Conversations that go on after each other, and prompts that never come again between."""
    chance = random.Random(1)
    numbers = iter(range(1_000_000))
    talks = [[next(numbers)] for _ in range(6)]
    chains: list[Chain] = []
    for _ in range(num_turns):
        for talk in talks:
            talk.append(next(numbers))
            chains.append(tuple(talk))
        for _ in range(num_scans):
            chains.append(tuple(next(numbers) for _ in range(chance.randint(4, 12))))
    return chains


def test_scans_cost_the_chosen_policy_less_than_the_baseline() -> None:
    [row] = measure(conversations(12, 6), sizes=[0.12])
    rates = row.hit_rates

    assert rates.keys() == {*POLICIES, BELADY}
    assert rates["lru"] + 0.05 < rates["s3fifo"] <= rates[BELADY]


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True), min_size=1),
    st.integers(1, 8),
)
def test_no_policy_beats_one_that_never_forgets(chains: list[list[int]], num_slots: int) -> None:
    # In a chain, a block's number says all that is before it.
    prefixes: dict[tuple[int, ...], int] = {}
    chains = [
        [prefixes.setdefault(tuple(chain[: end + 1]), len(prefixes)) for end in range(len(chain))]
        for chain in chains
    ]
    unlimited = replay_belady(chains, len(prefixes))

    assert replay_belady(chains, num_slots) <= unlimited
    for policy in POLICIES.values():
        assert replay(chains, num_slots, policy) <= unlimited
        assert replay(chains, len(prefixes), policy) == unlimited


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


def test_traces_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    requests = [{"hash_ids": [0, 1]}, {"hash_ids": [0, 1, 2]}]
    size = BLOCKS_PER_UNIT
    sessions = [
        {
            "requests": [
                {"t": 0.0, "blocks": [[0, size - 1]]},
                {"t": 90.0, "blocks": [[0, size - 1], [2 * size, 3 * size + 5]]},
            ]
        },
        {"requests": [{"t": 0.0, "blocks": [[0, size - 1]]}, {"t": 1.0, "blocks": [[0, 3]]}]},
    ]

    assert read_trace(write(tmp_path / "a.jsonl", requests)) == [[0, 1], [0, 1, 2]]
    # Sessions begin a minute after each other, and share nothing.
    assert read_trace(write(tmp_path / "b.jsonl.gz", sessions)) == [[0], [2], [0, 1]]
    with pytest.raises(ValueError, match="no trace"):
        read_trace(write(tmp_path / "c.jsonl", [{"other": 1}]))


def test_the_document_has_a_row_for_each_size(tmp_path: Path) -> None:
    rows = [{"hash_ids": list(chain)} for chain in conversations(4, 2)]
    document = measure_traces([write(tmp_path / "a.jsonl", rows)])
    [trace] = document["traces"]

    assert json.loads(json.dumps(document)) == document
    assert document["policy"] in trace["sizes"][0]["hit_rates"]
    assert trace["trace"] == "a.jsonl"
    assert trace["requests"] == len(rows)
    rates = [row["hit_rates"][BELADY] for row in trace["sizes"]]
    assert rates == sorted(rates)
    assert rates[-1] <= trace["unlimited"]
