"""Pieces' ids, joined, against the ids of the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from services.encoding.borders import Borders, read_borders
from services.models.catalog import find_model
from services.models.hugging_face import read_tokenizer
from services.models.loading import load_tokenizer

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WITH_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
END, MARK = "<|end|>", "<|end_of_mark|>"

# Of these, merges go across every border that a cut might be wrong about.
CORPUS = (
    "the cat's mats aren't there \n\n the  \t end. It is, 1234 42 <tag> caf\u00e9 e\u0301 \n",
    "\u5317\u4eac\u3002\u5927\u5b66\uff0c\u5317\u4eac \U0001f642\U0001f642 a b  c   d\r\n\r\n e",
    "the end.\n\n Cat!\r\n is \n there?\n (the) \n\t. cat <tool_call> is, mats.\n",
    "x = 10; y_1 = [x, 'll', \"it's\"]\n\tz\u00e9 \u0301 na\u00efve ",
)

FRAGMENTS = st.sampled_from(
    (
        *(END, MARK, "<|im_start|>", "<|im_end|>", "<tool_call>", "<call me>", "</think>"),
        *("<|end", "|>", "<|im_", "<", "<|end|", "<|endof", "<call", " me>"),
        *("the cat", "the end.\n\n", "Cat!\r\n", "cat <tool_call> is", "is, mats", "there?\n"),
        *("the", "cat", "'s", "'", "'LL", "Mats", "x", "e\u0301", "\u0301", "\u00e9", "A\u030a"),
        *("\u5317\u4eac", "\u3002", "\uff0c", "\u3001", "\u3042\u3099", "\uac00", "\u11a8"),
        *(" ", "  ", "   ", "\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u200d", "\x85"),
        *("1", "12", "345", ".", ",", "!?", "\U0001f642", "\U0001f469\u200d\U0001f4bb", "_", "/"),
    )
)
TEXTS = st.lists(FRAGMENTS | st.text(st.characters(codec="utf-8"), max_size=4), max_size=30).map(
    "".join
)


def trained(
    pre_tokenizer: Any,
    *,
    normalizer: Any = None,
    added: Sequence[AddedToken] = (),
    post_processor: Any = None,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([END, MARK])
    tokenizer.add_tokens(list(added))
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


def embedded() -> Tokenizer:
    return load_tokenizer(find_model("smollm2-135m-instruct"))[1]


def called(**flags: bool) -> AddedToken:
    return AddedToken("<tool_call>", normalized=False, **flags)


INSIDE: dict[str, Callable[[], Tokenizer]] = {
    "embedded": embedded,
    "gpt2": lambda: trained(WITH_REGEX, post_processor=processors.ByteLevel(trim_offsets=False)),
    "qwen": lambda: trained(split(QWEN), normalizer=normalizers.NFC(), added=[called()]),
    "llama": lambda: trained(
        split(LLAMA),
        added=[AddedToken("<tool_call>")],  # looked for after normalizing
        post_processor=processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)]),
    ),
    "cased": lambda: trained(split(CASED)),
}
# Only around added tokens.
OUTSIDE: dict[str, Callable[[], Tokenizer]] = {
    "prefix space": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no regex": lambda: trained(BYTES),
    "unknown regex": lambda: trained(split(r"\w+ \w+|\s+|.")),
    "removed spaces": lambda: trained(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES])
    ),
    "replacing": lambda: trained(WITH_REGEX, normalizer=normalizers.Replace("the cat", "dog")),
    "space in a normalized token": lambda: trained(WITH_REGEX, added=[AddedToken("the cat")]),
    "normalized token that strips": lambda: trained(
        WITH_REGEX, added=[AddedToken("cat", rstrip=True)]
    ),
}
WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "token that takes spaces before it": lambda: trained(WITH_REGEX, added=[called(lstrip=True)]),
    "token that takes spaces behind it": lambda: trained(WITH_REGEX, added=[called(rstrip=True)]),
    "token that is a word": lambda: trained(WITH_REGEX, added=[called(single_word=True)]),
    "first word marked": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "unknown normalizer": lambda: trained(WITH_REGEX, normalizer=normalizers.Prepend("_")),
    "unknown model": lambda: Tokenizer(models.Unigram()),
}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def check(tokenizer: Tokenizer, borders: Borders, text: str) -> None:
    pieces = borders.pieces(text)

    assert "".join(pieces) == text
    assert all(pieces)
    assert [i for piece in pieces for i in ids_of(tokenizer, piece)] == ids_of(tokenizer, text)


@pytest.mark.parametrize("shape", [*INSIDE, *OUTSIDE])
def test_pieces_have_the_ids_of_the_whole(shape: str) -> None:
    tokenizer = {**INSIDE, **OUTSIDE}[shape]()
    known = read_borders(tokenizer)
    assert known is not None
    assert known.inside == (shape in INSIDE)
    # At every border there is.
    borders = Borders(known.added_ids, inside=known.inside, piece_characters=1)

    @settings(max_examples=120 if shape in INSIDE else 40, deadline=None)
    @given(text=TEXTS)
    def holds(text: str) -> None:
        check(tokenizer, borders, text)

    holds()


@pytest.mark.parametrize("shape", WHOLE)
def test_where_a_border_may_change_ids_the_text_stays_whole(shape: str) -> None:
    assert read_borders(WHOLE[shape]()) is None


def test_qwen3_is_taken_apart_inside(qwen3: Path) -> None:
    borders = read_borders(read_tokenizer(qwen3))

    assert borders is not None
    assert borders.inside
    assert {"<|im_start|>", "<think>", "</tool_call>"} <= borders.added_ids.keys()


def test_long_text_is_cut_at_the_first_border_behind_a_length_so_what_is_before_stays() -> None:
    borders = Borders({}, inside=True, piece_characters=8)
    text = "one two three four five six"

    assert borders.pieces(text) == ["one two three", " four five", " six"]
    assert borders.pieces(text + "ty seven") == ["one two three", " four five", " sixty seven"]
    assert borders.pieces("1 2 3 4 5 6 7 8 9 10") == ["1 2 3 4 5 6 7 8 9 10"]


def test_every_added_token_of_very_many_is_found() -> None:
    borders = Borders({END: b"1234"}, inside=True)

    assert borders.pieces(END * 20_000 + "x") == [*[END] * 20_000, "x"]
    assert borders.pieces(f"a{END}b" * 8192) == ["a", *[END, "ba"] * 8191, END, "b"]
