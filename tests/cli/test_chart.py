from __future__ import annotations

from services.cli.chart import ASCII_BLOCKS, BLOCKS, bar, blocks_for, render


def test_every_segment_has_a_line_in_the_ledgers_order_then_residual_and_total() -> None:
    lines = render({"queue": 1.0, "prefill": 8.0}, residual_ms=1.0, total_ms=10.0)

    assert [line.split()[:2] for line in lines] == [
        ["queue", "1.00"],
        ["prefill", "8.00"],
        ["residual", "1.00"],
        ["total", "10.00"],
    ]


def test_bars_are_shares_of_the_total() -> None:
    lines = render({"prefill": 5.0, "transfer": 2.5}, residual_ms=2.5, total_ms=10.0, width=8)

    assert [line.count("█") for line in lines] == [4, 2, 2, 0]


def test_something_shows_a_sliver_and_nothing_shows_nothing() -> None:
    assert bar(0.0001, 40) == "▏"
    assert bar(0.0, 40) == ""


def test_a_share_outside_of_the_whole_stays_within_the_width() -> None:
    assert bar(3.0, 10) == "█" * 10
    assert bar(-0.5, 10) == ""


def test_an_answer_without_a_first_token_has_a_chart_without_bars() -> None:
    assert render({"queue": 0.0}, residual_ms=0.0, total_ms=0.0)[0].endswith("ms")


def test_a_terminal_without_the_blocks_gets_ascii() -> None:
    assert blocks_for("utf-8") == BLOCKS
    assert blocks_for("ascii") == ASCII_BLOCKS
    assert blocks_for(None) == ASCII_BLOCKS
    assert bar(0.5, 10, ASCII_BLOCKS) == "#####"
