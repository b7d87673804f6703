from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from services.models.catalog import Kind, ModelFiles
from services.models.loading import load_vocabulary
from services.models.vocabulary import Vocabulary


def piece(rank: int, content: bytes) -> dict[str, Any]:
    return {"rank": rank, "token_bytes": base64.b64encode(content).decode(), "token_str": None}


def tiny(**changes: Any) -> dict[str, Any]:
    return {
        "config": {"default_vocab_size": 23, "default_num_special_tokens": 21},
        "vocab": [piece(0, b"\xff"), piece(1, b" a"), piece(2, b"beyond the model")],
    } | changes


def special(rank: Any, spelling: Any) -> dict[str, Any]:
    return {"rank": rank, "token_str": spelling, "is_control": True}


def read(path: Path, content: Any) -> Vocabulary:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_vocabulary(ModelFiles("tiny", path, Kind.TEKKEN))


def test_special_tokens_come_first_and_what_is_beyond_the_vocabulary_is_left_out(
    tmp_path: Path,
) -> None:
    vocabulary = read(tmp_path / "tekken.json", tiny())

    assert vocabulary.token_bytes[:4] == (b"<unk>", b"<s>", b"</s>", b"[INST]")
    assert vocabulary.token_bytes[20:] == (b"<SPECIAL_20>", b"\xff", b" a")
    assert vocabulary.special_token_ids == set(range(21))
    assert (vocabulary.bos_token_id, vocabulary.eos_token_ids) == (1, (2,))
    assert (vocabulary.chat_template, vocabulary.context_length) == ("", 0)


def test_special_tokens_may_be_named_and_others_have_a_number(tmp_path: Path) -> None:
    named = [special(0, "</s>"), special(2, "[THINK]")]
    vocabulary = read(tmp_path / "tekken.json", tiny(special_tokens=named))

    assert vocabulary.token_bytes[:4] == (b"</s>", b"<SPECIAL_1>", b"[THINK]", b"<SPECIAL_3>")
    assert (vocabulary.bos_token_id, vocabulary.eos_token_ids) == (None, (0,))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"config": 3}',
        tiny(vocab=[]),
        tiny(vocab=[{}, {}]),
        tiny(vocab=[piece(1, b"a"), piece(0, b"b")]),
        tiny(vocab=[{"rank": 0, "token_bytes": "a"}, piece(1, b"b")]),
        tiny(special_tokens=[special(21, "<s>")]),
        tiny(special_tokens=[special(-1, "<s>")]),
        tiny(special_tokens=[special(0, None)]),
        tiny(config={"default_vocab_size": 3, "default_num_special_tokens": 4}),
        tiny(config={"default_vocab_size": None, "default_num_special_tokens": 4}),
        "[" * 100_000,
    ],
)
def test_what_is_no_tekken_file_is_refused_by_name(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ValueError, match=r"tekken\.json is no tekken file: "):
        read(tmp_path / "tekken.json", content)


def test_every_token_has_the_bytes_of_the_reference(tekken: Path) -> None:
    vocabulary = load_vocabulary(ModelFiles("tekken", tekken, Kind.TEKKEN))
    reference = Tekkenizer.from_file(tekken)

    assert vocabulary.vocabulary_size == reference.n_words
    assert vocabulary.bos_token_id == reference.bos_id
    assert vocabulary.eos_token_ids == (reference.eos_id,)
    for token in range(vocabulary.vocabulary_size):
        expected = reference.id_to_byte_piece(token, SpecialTokenPolicy.KEEP)

        assert vocabulary.token_bytes[token] == expected
        assert (token in vocabulary.special_token_ids) == reference.is_special(token)
