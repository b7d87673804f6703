from __future__ import annotations

import time
import uuid

import pytest

from services.observer.kinds import Kind, Sight, name_form

NOW_S = 1_800_000_000.0


def sights(before: str, after: str, *values: str) -> list[Sight]:
    """What is alike at both ends of the values is text around them, as comparing finds it."""
    return [Sight(before, value, after, NOW_S + number) for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("kind", "given", "whole"),
    [
        (
            Kind.TIME_STAMP,
            sights("Now: 2026-11-30T11:", "Z. You are", "38:28", "38:29", "40:02"),
            "2026-11-30T11:38:28Z",
        ),
        (Kind.TIME_STAMP, sights("It is ", " PM, Monday", "3:04", "3:05", "4:10"), "3:04 PM"),
        (Kind.TIME_STAMP, sights("Today: November ", ", 2026.", "3", "4"), "November 3, 2026"),
        (Kind.TIME_STAMP, sights("ts=18000", " ", "00003", "00007", "00011"), "1800000003"),
        (Kind.TIME_STAMP, sights("", " go", "Current time: 11:38:28.", ""), "11:38:28"),
        (Kind.COUNTER, sights("turn ", ". ", "7", "8", "11"), "7"),
        (Kind.COUNTER, sights("request 10", "\n", "1", "2", "5"), "101"),
        (
            Kind.UUID,
            sights("id 6fa459ea-ee8a-3ca4-894e-", "\n", "db77e160355e", "0016d3ff9a2b"),
            "6fa459ea-ee8a-3ca4-894e-db77e160355e",
        ),
        (Kind.NONCE, sights("req-", " ok", "8f3a99c1", "0b7c1d2e", "77e4fa10"), "req-8f3a99c1"),
        (Kind.NONCE, sights("key ", " ok", "83920174", "10293847", "55512934"), "83920174"),
        (Kind.TEXT, sights("ask ", " now", "the sky", "a tree", "why"), "the sky"),
        (Kind.TEXT, sights("ask ", " now", "for 3 of the best", "for 9 ripe plums"), None),
        (Kind.TEXT, sights("room ", " is", "12", "7", "31"), "12"),
    ],
)
def test_the_form_of_what_changes_gives_it_a_name(
    kind: Kind, given: list[Sight], whole: str | None
) -> None:
    form = name_form(given)
    assert form.kind is kind
    if whole is not None:
        first = given[0]
        text = first.before + first.text + first.after
        assert text[slice(*form.locate(first))] == whole


def test_random_uuids_have_their_name_wherever_they_begin_to_differ() -> None:
    values = [
        str(uuid.UUID(int=seed * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**128))
        for seed in range(1, 9)
    ]
    assert name_form(sights("id: ", "\n", *values)).kind is Kind.UUID


def test_no_text_takes_long() -> None:
    runs = [f"{number}" + 60_000 * "-" for number in range(3)]
    began_s = time.monotonic()

    assert name_form(sights("a ", " b", *runs)).kind is Kind.TEXT
    assert time.monotonic() - began_s < 5
