from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.models.catalog import find_model
from services.models.gguf import read_metadata
from services.models.vocabulary import Vocabulary, build_tokenizer
from worker.detokenizer import Detokenizer

_metadata = read_metadata(find_model("smollm2-135m-instruct").gguf_path)
MODEL = Vocabulary.from_metadata(_metadata)
TOKENIZER: Tokenizer = build_tokenizer(_metadata)

# Few characters, so that stop strings are met, nearly met and overlap.
PIECES = [b"a", b"b", b"ab", b"aab", b"\xc3", b"\xa9", "é".encode(), "🙂".encode()[:2], b""]
SMALL = Vocabulary(
    token_bytes=(*PIECES, b"<end>"),
    special_token_ids=frozenset({len(PIECES)}),
    eos_token_ids=(len(PIECES),),
    bos_token_id=None,
    context_length=64,
    chat_template="",
)
small_ids = st.lists(st.integers(0, SMALL.vocabulary_size - 1), max_size=40)
small_stops = st.lists(st.text("abé\ufffd", min_size=1, max_size=5), max_size=4)
model_ids = st.lists(
    st.integers(0, MODEL.vocabulary_size - 1)
    | st.sampled_from(TOKENIZER.encode("naïve 北京 🙂🚀 Ωμέγα हिन्दी<|im_end|>").ids),
    max_size=40,
)


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """The runs between cuts; equal cuts give empty runs."""
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(borders)]


def answer(detokenizer: Detokenizer, runs: Sequence[Sequence[int]]) -> tuple[str, str | None]:
    pushed = [detokenizer.push(run) for run in runs]
    text = "".join(part.text for part in pushed) + detokenizer.flush()
    return text, pushed[-1].stop_string if pushed else None


def decode(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    return vocabulary.join(ids, skip_special_tokens=True).decode(errors="replace")


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """By the definition: the first end, and the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ended = [string for string in stop if text[:end].endswith(string)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(ids=model_ids, cuts=st.lists(st.integers(0, 100), max_size=10))
def test_any_split_gives_what_the_reference_decoder_gives_at_once(
    ids: list[int], cuts: list[int]
) -> None:
    text, stop_string = answer(Detokenizer(MODEL), split(ids, cuts))

    assert text == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert stop_string is None


@given(ids=model_ids)
def test_control_tokens_are_spelled_out_on_request(ids: list[int]) -> None:
    text, _ = answer(Detokenizer(MODEL, skip_special_tokens=False), [[token] for token in ids])

    assert text == TOKENIZER.decode(ids, skip_special_tokens=False)


@given(ids=small_ids, stop=small_stops, cuts=st.lists(st.integers(0, 100), max_size=40))
def test_text_ends_before_the_first_stop_string_at_any_split(
    ids: list[int], stop: list[str], cuts: list[int]
) -> None:
    text, _ = answer(Detokenizer(SMALL, stop), split(ids, cuts))

    assert text == cut_at_stop(decode(SMALL, ids), stop)[0]


@given(ids=small_ids, stop=small_stops)
def test_only_what_may_begin_a_stop_string_or_a_character_is_held_back(
    ids: list[int], stop: list[str]
) -> None:
    detokenizer = Detokenizer(SMALL, stop)
    given_text = ""
    for count, token in enumerate(ids, start=1):
        part = detokenizer.push([token])
        given_text += part.text
        complete = SMALL.join(ids[:count], skip_special_tokens=True)
        # Without final=True an unfinished character at the end is left out.
        known, _ = codecs.utf_8_decode(complete, "replace", False)
        expected, stop_string = cut_at_stop(known, stop)
        beginnings = [
            size
            for string in stop
            for size in range(1, len(string))
            if expected.endswith(string[:size])
        ]
        held = 0 if stop_string else max(beginnings, default=0)

        assert given_text == expected[: len(expected) - held]
        assert part.stop_string == stop_string


def test_character_spread_over_tokens_comes_whole() -> None:
    ids = TOKENIZER.encode("🙂").ids
    detokenizer = Detokenizer(MODEL)
    texts = [detokenizer.push([token]).text for token in ids]

    assert len(ids) > 1
    assert texts == [""] * (len(ids) - 1) + ["🙂"]


def test_unfinished_character_at_the_end_becomes_a_replacement_character() -> None:
    detokenizer = Detokenizer(MODEL)
    detokenizer.push(TOKENIZER.encode("🙂").ids[:-1])

    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("border", range(1, len("STOP")))
def test_stop_string_is_met_over_every_token_border(border: int) -> None:
    halves = "STOP"[:border], "STOP"[border:]
    detokenizer = Detokenizer(MODEL, ["STOP"])
    first = detokenizer.push(TOKENIZER.encode("go " + halves[0]).ids)
    second = detokenizer.push(TOKENIZER.encode(halves[1] + " on").ids)

    assert first == ("go ", None)
    assert second == ("", "STOP")
    assert detokenizer.flush() == ""


def test_held_text_is_given_once_it_cannot_become_a_stop_string() -> None:
    detokenizer = Detokenizer(MODEL, ["STOP"])
    texts = [detokenizer.push(TOKENIZER.encode(text).ids).text for text in ("a STO", "VE ", "S")]

    assert texts == ["a ", "STOVE ", ""]
    assert detokenizer.flush() == "S"


def test_stop_string_that_is_complete_first_wins_over_one_that_began_first() -> None:
    detokenizer = Detokenizer(MODEL, ["a long stop", "long"])

    assert detokenizer.push(TOKENIZER.encode("a long stop").ids) == ("a ", "long")


def test_longest_of_stop_strings_with_the_same_end_wins() -> None:
    detokenizer = Detokenizer(MODEL, ["\n", "x\n"])

    assert detokenizer.push(TOKENIZER.encode("x\n").ids) == ("", "x\n")


def test_ids_after_a_stop_string_give_no_text() -> None:
    detokenizer = Detokenizer(MODEL, ["."])
    detokenizer.push(TOKENIZER.encode("One. Two").ids)

    assert detokenizer.push(TOKENIZER.encode(" Three").ids) == ("", ".")
    assert detokenizer.flush() == ""


def test_text_across_a_control_token_is_joined() -> None:
    detokenizer = Detokenizer(MODEL, ["STOP"])
    ids = [*TOKENIZER.encode("ST").ids, MODEL.eos_token_ids[0], *TOKENIZER.encode("OP").ids]

    assert detokenizer.push(ids) == ("", "STOP")
