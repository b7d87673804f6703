from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.models.catalog import Kind, ModelFiles
from services.models.hugging_face import read_tokenizer, read_vocabulary
from services.models.loading import load_tokenizer, load_vocabulary
from services.models.vocabulary import Vocabulary

SPELLINGS = {"a": 0, "b": 1, "Ġ": 2, "Ċ": 3, "Ã": 4, "©": 5, "ab": 6}


def tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=SPELLINGS, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<call>"), AddedToken("é ©", special=True)])
    tokenizer.add_special_tokens(["<s>", "<end>", "<|endoftext|>"])
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    (tokenizer or tiny_tokenizer()).save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": {}, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text)
    return folder


def vocabulary_in(folder: Path) -> Vocabulary:
    return load_vocabulary(ModelFiles("tiny", folder, Kind.HUGGING_FACE))


def test_bytes_are_what_each_token_adds_to_a_text(tmp_path: Path) -> None:
    vocabulary = vocabulary_in(write(tmp_path))

    assert vocabulary.token_bytes[:7] == (b"a", b"b", b" ", b"\n", b"\xc3", b"\xa9", b"ab")
    # Added tokens are not spelled byte by byte, whatever their characters.
    assert vocabulary.token_bytes[7:9] == (b"<call>", "é ©".encode())


def test_only_special_tokens_are_no_text(tmp_path: Path) -> None:
    vocabulary = vocabulary_in(write(tmp_path))

    assert vocabulary.special_token_ids == {8, 9, 10, 11}
    assert vocabulary.join([0, 7, 8, 9], skip_special_tokens=True) == b"a<call>"


def test_end_tokens_are_those_that_any_of_the_files_names(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<end>"}, "bos_token": "<s>"},
        generation_config={"eos_token_id": [10, 6]},
        config={"eos_token_id": 3},
    )
    vocabulary = vocabulary_in(tmp_path)

    assert vocabulary.eos_token_ids == (10, 6, 3, 11)
    assert vocabulary.bos_token_id == 9
    assert vocabulary.special_tokens == {"eos_token": "<end>", "bos_token": "<s>"}


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({"model_max_length": 4096}, {}, 4096),
        ({"model_max_length": 4096}, {"max_position_embeddings": 2048}, 2048),
        ({}, {"text_config": {"max_position_embeddings": 512}}, 512),
        ({"model_max_length": 10**30}, {}, 0),
        ({"model_max_length": "long"}, {"max_position_embeddings": True, "text_config": 3}, 0),
        ({}, {}, 0),
    ],
)
def test_context_length_is_the_model_s_where_a_file_says_it(
    tmp_path: Path, settings: dict[str, Any], config: dict[str, Any], expected: int
) -> None:
    write(tmp_path, tokenizer_config=settings, config=config)

    assert vocabulary_in(tmp_path).context_length == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 1 }}", "{{ 1 }}"),
        (None, ""),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}, "x", {}], ""),
    ],
)
def test_template_of_the_configuration(tmp_path: Path, template: Any, expected: str) -> None:
    write(tmp_path, tokenizer_config={"chat_template": template})

    assert vocabulary_in(tmp_path).chat_template == expected


def test_template_in_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("{{ 'né' }}\n")

    assert vocabulary_in(tmp_path).chat_template == "{{ 'né' }}\n"


def test_ids_of_no_token_have_no_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 3}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()

    assert vocabulary_in(write(tmp_path, tokenizer)).token_bytes == (b"a", b"", b"", b"b")


def test_nothing_is_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)

    assert len(read_tokenizer(write(tmp_path, tokenizer)).encode("a" * 5).ids) == 5


def test_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    pieces = tiny_tokenizer()
    pieces.decoder = decoders.Metaspace()

    for tokenizer, found in ((words, "model WordLevel"), (pieces, "decoder Metaspace")):
        with pytest.raises(ValueError, match=rf"{found} .*supported: BPE with ByteLevel"):
            load_tokenizer(ModelFiles("tiny", write(tmp_path, tokenizer), Kind.HUGGING_FACE))


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("tokenizer", "{", r"tokenizer\.json: EOF while parsing"),
        ("tokenizer", "[]", r"tokenizer\.json: "),
        ("tokenizer_config", "[]", r"tokenizer_config\.json: is no JSON object"),
        ("tokenizer_config", "{'a': 1}", r"tokenizer_config\.json: Expecting property name"),
        ("tokenizer_config", "[" * 100_000, r"tokenizer_config\.json: maximum recursion"),
        ("tokenizer_config", {"chat_template": 7}, "chat_template is no text"),
        ("generation_config", {"eos_token_id": 999}, r"end tokens \(999, 11\) are not all in"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, file: str, content: Any, complaint: str) -> None:
    write(tmp_path)
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / f"{file}.json").write_text(text)

    with pytest.raises(ValueError, match=complaint):
        vocabulary_in(tmp_path)


def test_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        vocabulary_in(tmp_path)


class Model(NamedTuple):
    vocabulary: Vocabulary
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def model(qwen3: Path) -> Model:
    tokenizer = read_tokenizer(qwen3)
    return Model(read_vocabulary(qwen3, tokenizer), tokenizer)


def test_facts_of_qwen3(model: Model) -> None:
    vocabulary = model.vocabulary

    assert vocabulary.vocabulary_size == 151669
    assert vocabulary.context_length == 131072
    assert vocabulary.bos_token_id is None
    assert list(map(vocabulary.spelling, vocabulary.eos_token_ids)) == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    # <think> and <tool_call> are text.
    assert vocabulary.special_token_ids == set(range(151643, 151657))


def test_bytes_of_every_token_of_qwen3_are_those_of_its_decoder(model: Model) -> None:
    for token, spelled in enumerate(model.vocabulary.token_bytes):
        expected = model.tokenizer.decode([token], skip_special_tokens=False)

        assert spelled.decode(errors="replace") == expected


@given(text=st.text(st.characters(codec="utf-8")))
def test_ids_of_any_text_join_to_its_normal_form(model: Model, text: str) -> None:
    ids = model.tokenizer.encode(text).ids

    joined = model.vocabulary.join(ids, skip_special_tokens=False)
    assert joined == unicodedata.normalize("NFC", text).encode()
