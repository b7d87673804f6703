from __future__ import annotations

import pytest

from services.cli.failures import Failure
from services.cli.plain import plain, quoted


@pytest.mark.parametrize("control", ["\x1b[2J", "\x7f", "\x9b2J", "\u202e", "\u2028", "\r", "\n"])
def test_nothing_in_text_of_others_moves_the_cursor(control: str) -> None:
    for shown in (plain(f"a{control}b"), quoted(f"a{control}b"), str(Failure(f"a{control}b"))):
        assert shown.isprintable()


def test_words_stay_as_they_are() -> None:
    assert plain("größer, 日本 \N{SNOWMAN}") == "größer, 日本 \N{SNOWMAN}"
    assert quoted('a "b"') == '"a \\"b\\""'
