from __future__ import annotations

import pytest

from services.bench.lan import Machine, figures_of, lengths_of, optimal_makespan_s


def test_the_optimum_puts_the_longest_on_the_fastest() -> None:
    fast, slow = Machine(1.0, 0.1), Machine(2.0, 0.2)
    works = [[machine.call_s(length) for machine in (fast, slow)] for length in (40, 20)]
    assert works == [[3.0, 6.0], [1.0, 2.0]]
    assert optimal_makespan_s(works) == 3.0


def test_the_optimum_leaves_out_a_machine_that_is_too_slow() -> None:
    assert optimal_makespan_s([[1.0, 100.0], [1.0, 100.0], [1.0, 100.0]]) == 3.0


def test_what_was_measured_is_set_against_the_optimum_and_the_fastest_alone() -> None:
    machines = [Machine(1.0, 0.1), Machine(2.0, 0.2)]
    figures = figures_of(machines, [((40, 20), 4.0), ((40, 20), 6.0)])
    assert [row["of_optimum"] for row in figures["rounds"]] == [0.75, 0.5]
    assert figures["worst_of_optimum"] == 0.5
    assert figures["mean_of_optimum"] == pytest.approx(0.625)
    assert [row["against_fastest_alone"] for row in figures["rounds"]] == [1.0, 4 / 6]


def test_a_seed_always_gives_the_same_lengths() -> None:
    assert lengths_of(3) == lengths_of(3)
    assert lengths_of(3) != lengths_of(4)
