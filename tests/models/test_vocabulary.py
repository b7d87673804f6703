from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.models.catalog import find_model
from services.models.gguf import read_metadata
from services.models.vocabulary import TokenType, Vocabulary, build_tokenizer

METADATA = read_metadata(find_model("smollm2-135m-instruct").gguf_path)
MODEL = Vocabulary.from_metadata(METADATA)
TOKENIZER = build_tokenizer(METADATA)


def tiny(*tokens: tuple[str, TokenType], **changes: Any) -> dict[str, Any]:
    """The metadata of a vocabulary with these tokens."""
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [spelling for spelling, _ in tokens],
        "tokenizer.ggml.token_type": [int(kind) for _, kind in tokens],
        "tokenizer.ggml.merges": [],
    } | changes


def test_facts_of_the_embedded_model() -> None:
    assert MODEL.vocabulary_size == 49152
    assert MODEL.context_length == 8192
    assert MODEL.special_token_ids == set(range(17))
    assert MODEL.bos_token_id == 1
    assert MODEL.chat_template.startswith("{% for message in messages %}")


def test_end_of_turn_comes_before_end_of_text() -> None:
    assert [MODEL.spelling(token) for token in MODEL.eos_token_ids] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]


def test_bytes_of_every_token_are_those_of_the_reference_decoder() -> None:
    for token in range(MODEL.vocabulary_size):
        expected = TOKENIZER.decode([token], skip_special_tokens=False)

        assert MODEL.token_bytes[token].decode(errors="replace") == expected


# This model has no token for some control characters, nor for planes of Unicode in which
# nothing is assigned. Its tokenizer drops them, in llama.cpp as here.
UNSPEAKABLE = [*map(chr, (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D))]
speakable = st.text(
    st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters=UNSPEAKABLE)
)


@given(text=speakable)
def test_ids_of_any_text_join_to_the_text_with_nothing_added(text: str) -> None:
    ids = TOKENIZER.encode(text).ids

    assert MODEL.join(ids, skip_special_tokens=False).decode() == text


def test_characters_that_the_model_cannot_spell_are_dropped() -> None:
    ids = TOKENIZER.encode("a".join(UNSPEAKABLE)).ids

    assert MODEL.join(ids, skip_special_tokens=False) == b"aaaaa"


def test_control_tokens_are_matched_whole_and_can_be_left_out() -> None:
    ids = TOKENIZER.encode("<|im_start|>user\nHi<|im_end|>").ids

    assert ids[0] == 1
    assert ids[-1] == 2
    assert MODEL.join(ids, skip_special_tokens=True) == b"user\nHi"


def test_user_defined_tokens_are_matched_whole_and_are_text() -> None:
    metadata = tiny(
        ("a", TokenType.NORMAL), ("<call>", TokenType.USER_DEFINED), ("<end>", TokenType.CONTROL)
    )
    vocabulary = Vocabulary.from_metadata(metadata)
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode("a<call><end>").ids

    assert ids == [0, 1, 2]
    assert vocabulary.join(ids, skip_special_tokens=True) == b"a<call>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<call>"


def test_token_that_is_not_spelled_in_bytes_stands_for_itself() -> None:
    vocabulary = Vocabulary.from_metadata(
        tiny(("Ġa", TokenType.NORMAL), ("a b", TokenType.NORMAL), ("北", TokenType.NORMAL))
    )

    assert vocabulary.token_bytes == (b" a", b"a b", "北".encode())


def test_end_tokens_are_those_named_then_those_known_by_their_spelling() -> None:
    metadata = tiny(
        ("<|endoftext|>", TokenType.CONTROL),
        ("<|im_end|>", TokenType.NORMAL),
        ("<stop>", TokenType.CONTROL),
        **{"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 0},
    )

    assert Vocabulary.from_metadata(metadata).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer llama/smollm is not supported"),
        ({"tokenizer.ggml.pre": "qwen2"}, "supported: gpt2/smollm"),
        ({"general.architecture": "qwen3"}, r"lacks qwen3\.context_length"),
    ],
)
def test_vocabulary_of_another_kind_is_refused(change: dict[str, Any], complaint: str) -> None:
    metadata = tiny(("a", TokenType.NORMAL)) | change

    with pytest.raises(ValueError, match=complaint):
        Vocabulary.from_metadata(metadata)


def test_metadata_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks tokenizer\.ggml\.model"):
        build_tokenizer({})
