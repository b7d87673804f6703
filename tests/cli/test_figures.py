from __future__ import annotations

from services.cli.figures import show_figures


def test_names_and_figures_are_lines_and_rows_are_tables() -> None:
    document = {
        "ratio": 0.12345,
        "bytes": 51614850,
        "by_way": {"greedy": 10},
        "rows": [{"way": "a", "rates": {"lru": 0.5}}, {"way": "bcd", "rates": {"lru": 123.4}}],
    }

    lines = list(show_figures(document))

    assert [line.split() for line in lines] == [
        ["ratio", "0.123"],
        ["bytes", "51614850"],
        ["by_way"],
        ["greedy", "10"],
        ["rows"],
        ["way", "rates.lru"],
        ["a", "0.5"],
        ["bcd", "123"],
    ]
    assert len({len(line) for line in lines[-3:]}) == 1
