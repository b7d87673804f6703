from __future__ import annotations

import math
from typing import Any

import pytest

from services.core.sampling import Sampling


def broken_fields(**fields: Any) -> list[str]:
    violations = Sampling(**fields).violations(max_context_tokens=100)
    return [violation.field for violation in violations]


def test_the_defaults_break_no_rule() -> None:
    assert broken_fields() == []


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("max_tokens", 1, 100),
        ("temperature", 0, 100),
        ("min_p", 0, 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("logprobs", 0, 20),
    ],
)
def test_bounds_are_inclusive(field: str, low: int, high: int) -> None:
    assert broken_fields(**{field: low}) == []
    assert broken_fields(**{field: high}) == []
    assert broken_fields(**{field: high + 1}) == [f"sampling.{field}"]
    if field != "logprobs":  # unsigned on the wire
        assert broken_fields(**{field: low - 1}) == [f"sampling.{field}"]


@pytest.mark.parametrize(("field", "high"), [("top_p", 1), ("repetition_penalty", 10)])
def test_zero_is_out_where_the_range_is_open(field: str, high: float) -> None:
    assert broken_fields(**{field: 0}) == [f"sampling.{field}"]
    assert broken_fields(**{field: 0.001}) == []
    assert broken_fields(**{field: high}) == []
    assert broken_fields(**{field: high * 1.01}) == [f"sampling.{field}"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ],
)
def test_no_field_takes_what_is_no_number(field: str, value: float) -> None:
    assert broken_fields(**{field: value}) == [f"sampling.{field}"]


def test_stop_strings_are_bounded_in_number_and_length() -> None:
    assert broken_fields(stop=("x",) * 16) == []
    assert broken_fields(stop=("x",) * 17) == ["sampling.stop"]
    assert broken_fields(stop=("x", "")) == ["sampling.stop[1]"]
    assert broken_fields(stop=("x" * 257, "x" * 256)) == ["sampling.stop[0]"]
    assert len(broken_fields(stop=("",) * 1_000_000)) == 1 + 16


def test_stop_token_ids_are_bounded_in_number() -> None:
    assert broken_fields(stop_token_ids=tuple(range(64))) == []
    assert broken_fields(stop_token_ids=tuple(range(65))) == ["sampling.stop_token_ids"]


def test_stop_token_ids_are_of_the_vocabulary_where_it_is_known() -> None:
    sampling = Sampling(stop_token_ids=(9, 10, 2**32 - 1))

    assert sampling.violations(max_context_tokens=100) == []
    assert sampling.violations(max_context_tokens=100, vocabulary_size=10) == [
        ("sampling.stop_token_ids[1]", "must be below 10; got 10"),
        ("sampling.stop_token_ids[2]", "must be below 10; got 4294967295"),
    ]


def test_a_violation_says_the_bound_and_the_value() -> None:
    violations = Sampling(max_tokens=0).violations(max_context_tokens=100, prefix="")

    assert violations == [("max_tokens", "must be in [1, 100]; got 0")]


def test_everything_wrong_is_named_at_once() -> None:
    assert broken_fields(temperature=math.nan, top_p=2, max_tokens=0) == [
        "sampling.max_tokens",
        "sampling.temperature",
        "sampling.top_p",
    ]
