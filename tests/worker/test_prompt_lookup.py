"""Drafts from what stands in a prompt, or an answer, already."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.prompt_lookup import FIRST_DRAFT, NGRAM, PromptLookup

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]


def lookup(prompt: list[int] = PROMPT, *, length: int = 4) -> PromptLookup:
    made = PromptLookup(np.array(prompt, np.uint32))
    made.length = length
    return made


def test_it_goes_on_as_it_did_before() -> None:
    assert lookup().draft([], 8) == [4, 5, 6, 7]
    assert lookup().draft([4, 5], 2) == [6, 7]


def test_what_was_said_last_counts() -> None:
    assert lookup([1, 2, 3, 4, 0, 1, 2, 3, 5]).draft([1, 2, 3], 1) == [5]


def test_an_answer_that_repeats_itself_is_found_too() -> None:
    made = lookup([1])
    assert made.draft([7, 8, 9], 8) == []
    assert made.draft([7, 8, 9, 7, 8, 9], 8) == [7, 8, 9]


def test_what_is_new_has_no_draft() -> None:
    assert lookup().draft([10], 8) == []
    assert lookup([1, 2]).draft([], 8) == []
    assert lookup().draft([], 0) == lookup().draft([], -3) == []


def test_drafts_get_longer_while_they_come_true() -> None:
    made = PromptLookup(np.array(PROMPT, np.uint32))
    lengths = [made.length]
    for num_accepted in (2, 4, 8, 5, 0):
        made.learn(made.length, num_accepted, most=12)
        lengths.append(made.length)
    assert lengths == [FIRST_DRAFT, 4, 8, 12, 5, FIRST_DRAFT]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(1, 5), max_size=12))
def test_a_draft_is_what_followed_the_latest_such_place(ids: list[int], cuts: list[int]) -> None:
    """However the answer comes in."""
    made, answer = lookup(ids[: len(ids) // 2]), ids[len(ids) // 2 :]
    end = 0
    for cut in (*cuts, len(answer)):
        end = min(end + cut, len(answer))
        known = ids[: len(ids) // 2] + answer[:end]
        places = [
            start
            for start in range(len(known) - NGRAM)
            if known[start : start + NGRAM] == known[-NGRAM:]
        ]
        follows = known[places[-1] + NGRAM :][:4] if places else []
        assert made.draft(answer[:end], 8) == follows
