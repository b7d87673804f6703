from __future__ import annotations

from services.bench import hops


def test_a_way_is_measured_from_both_ends() -> None:
    way = hops.Way(name="two servers", is_unix=False, num_processes=2, num_channels=2)
    [row] = hops.measure([way], num_calls=40, num_turns=1)

    assert row["way"] == "two servers"
    assert row["p99 us"] >= row["alone p50 us"] > 0
    for number in hops.IN_FLIGHT:
        assert row[f"calls/s at {number}"] > 0
        assert row[f"client us at {number}"] > 0
        assert row[f"server us at {number}"] > 0


def test_rows_become_a_table() -> None:
    rows = [{"way": "a", "x us": 1.4, "y": 20.0}, {"way": "b", "x us": 2.6, "y": 3.0}]
    header, _, *lines = hops.table(rows)
    assert header == "| way | x us | y |"
    assert lines == ["| a | 1 | 20 |", "| b | 3 | 3 |"]
