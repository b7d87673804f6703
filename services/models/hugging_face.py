"""A folder as on the Hugging Face hub: to a vocabulary, and to a tokenizer.

Only byte-level BPE is served: of others, a token's bytes depend on its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from services.models.byte_level import spelled_bytes
from services.models.vocabulary import EOS_SPELLINGS, Vocabulary, distinct_ids

# The names under which templates know special tokens.
_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
# Tokenizers without a limit say a number of 30 digits.
_MAX_CONTEXT_LENGTH = 1 << 31


def read_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer that adds nothing and cuts nothing.

    Raises OSError when the file cannot be read, ValueError when it is no tokenizer,
    or one of another kind.
    """
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"tokenizer.json: {error}") from error
    if not isinstance(tokenizer.model, models.BPE) or not isinstance(
        tokenizer.decoder, decoders.ByteLevel
    ):
        model, decoder = (type(part).__name__ for part in (tokenizer.model, tokenizer.decoder))
        raise ValueError(
            f"tokenizer.json: model {model} with decoder {decoder} is not supported;"
            " supported: BPE with ByteLevel"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_vocabulary(folder: Path, tokenizer: Tokenizer) -> Vocabulary:
    """Raises OSError when a file cannot be read, ValueError when it is not what it should be."""
    settings = _read_object(folder / "tokenizer_config.json")
    model = _read_object(folder / "config.json", may_miss=True)
    generation = _read_object(folder / "generation_config.json", may_miss=True)
    special_tokens = _special_tokens(settings)
    eos_token_ids = distinct_ids(
        [
            _id_of(tokenizer, special_tokens.get("eos_token")),
            *_ids_in(generation.get("eos_token_id")),
            *_ids_in(model.get("eos_token_id")),
            *(_id_of(tokenizer, spelling) for spelling in EOS_SPELLINGS),
        ]
    )
    bytes_of_tokens = _token_bytes(tokenizer)
    if any(token_id >= len(bytes_of_tokens) for token_id in eos_token_ids):
        raise ValueError(f"end tokens {eos_token_ids} are not all in the vocabulary")
    added = tokenizer.get_added_tokens_decoder()
    return Vocabulary(
        token_bytes=bytes_of_tokens,
        special_token_ids=frozenset(id_ for id_, token in added.items() if token.special),
        eos_token_ids=eos_token_ids,
        bos_token_id=_id_of(tokenizer, special_tokens.get("bos_token")),
        context_length=_context_length(model, settings),
        chat_template=_chat_template(folder, settings),
        special_tokens=special_tokens,
    )


def _read_object(path: Path, *, may_miss: bool = False) -> dict[str, Any]:
    if may_miss and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: is no JSON object")
    return value


def _token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """By id. Ids of no token have no bytes."""
    spellings = tokenizer.get_vocab(with_added_tokens=True)
    found = dict.fromkeys(range(max(spellings.values(), default=-1) + 1), b"")
    found.update((token_id, spelled_bytes(spelling)) for spelling, token_id in spellings.items())
    # Those are not spelled byte by byte.
    added = tokenizer.get_added_tokens_decoder()
    found.update((token_id, token.content.encode()) for token_id, token in added.items())
    return tuple(found.values())


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_TOKENS:
        value = settings.get(name)
        # Either the spelling, or an object that describes the token.
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _id_of(tokenizer: Tokenizer, spelling: str | None) -> int | None:
    return None if spelling is None else tokenizer.token_to_id(spelling)


def _ids_in(value: Any) -> Sequence[int]:
    """Of a key that holds one id or several."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and item >= 0]


def _context_length(model: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    text_model = model.get("text_config")
    for source, key in (
        (model, "max_position_embeddings"),
        (text_model if isinstance(text_model, dict) else {}, "max_position_embeddings"),
        (settings, "model_max_length"),
    ):
        value = source.get(key)
        if type(value) is int and 0 < value < _MAX_CONTEXT_LENGTH:
            return value
    return 0


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        named = {item["name"]: item["template"] for item in template if _names_a_template(item)}
        template = named.get("default", "")
    if not isinstance(template, str):
        raise ValueError("tokenizer_config.json: chat_template is no text")
    return template


def _names_a_template(item: Any) -> bool:
    return isinstance(item, dict) and {"name", "template"} <= item.keys()
