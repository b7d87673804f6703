"""The vocabulary and the tokenizer against those of the engine that runs the model."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.models.catalog import find_model
from services.models.gguf import read_metadata
from services.models.vocabulary import Vocabulary, build_tokenizer
from worker.engines.llamacpp import binding

GGUF_PATH = find_model("smollm2-135m-instruct").gguf_path
METADATA = read_metadata(GGUF_PATH)
MODEL = Vocabulary.from_metadata(METADATA)
TOKENIZER = build_tokenizer(METADATA)

# Scripts, digits, spaces, marks and control tokens, in the mixtures that pre-tokenizers trip over.
FRAGMENTS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "  ", "\n\n", "\t", "\u00a0", "\u200d"),
    *("'ll", "don't", "12345", "3.14", "½٣②", "naïve", "e\u0301", "北京", "🙂", "हिन्दी", "ไทย"),
)
# Not those with a byte that has no token: both drop it, and only one then joins its neighbours.
CHARACTERS = st.characters(
    codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF
) | st.characters(codec="utf-8", min_codepoint=0xC0000)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(CHARACTERS, max_size=5)).map("".join)


class Reference:
    """llama.cpp's own tokenizer."""

    def __init__(self, library: ctypes.CDLL, vocabulary: int) -> None:
        self._library = library
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        encoded = text.encode()
        ids = (ctypes.c_int32 * (len(encoded) + 1))()
        add_special, parse_special = False, True
        count = self._library.llama_tokenize(
            self._vocabulary, encoded, len(encoded), ids, len(ids), add_special, parse_special
        )
        return ids[:count]

    def piece(self, token: int) -> bytes:
        piece = ctypes.create_string_buffer(512)
        special = True
        size = self._library.llama_token_to_piece(
            self._vocabulary, token, piece, len(piece), 0, special
        )
        return piece.raw[:size]

    def is_end(self, token: int) -> bool:
        return bool(self._library.llama_vocab_is_eog(self._vocabulary, token))


def declare(library: ctypes.CDLL) -> None:
    pointer, number, flag, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_char_p
    arguments: dict[str, list[Any]] = {
        "llama_tokenize": [pointer, text, number, ctypes.POINTER(number), number, flag, flag],
        "llama_token_to_piece": [pointer, number, text, number, number, flag],
        "llama_vocab_is_eog": [pointer, number],
    }
    for name, types in arguments.items():
        getattr(library, name).argtypes = types
    library.llama_vocab_is_eog.restype = flag


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    library = binding.load_library(passive_wait=True)
    declare(library)
    params = library.llama_model_default_params()
    params.vocab_only = True
    model = library.llama_model_load_from_file(str(GGUF_PATH).encode(), params)
    yield Reference(library, library.llama_model_get_vocab(model))
    library.llama_model_free(model)


@given(text=TEXTS)
def test_text_has_the_same_ids(reference: Reference, text: str) -> None:
    assert TOKENIZER.encode(text).ids == reference.encode(text)


def test_every_token_has_the_same_bytes(reference: Reference) -> None:
    for token, spelled in enumerate(MODEL.token_bytes):
        assert spelled == reference.piece(token)


def test_end_tokens_end_there_as_well(reference: Reference) -> None:
    assert all(reference.is_end(token) for token in MODEL.eos_token_ids)
