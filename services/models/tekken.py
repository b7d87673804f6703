"""A tekken file, the vocabulary of Mistral's models: special tokens first, then bytes by rank."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.models.vocabulary import Vocabulary

# Of files that do not name them, which all are of version 3.
_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_BOS, _EOS = "<s>", "</s>"


def read_vocabulary(path: Path) -> Vocabulary:
    """Its chats follow no template: they are for Mistral's own encoder.

    Raises OSError when the file cannot be read, ValueError when it is no tekken file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        num_special = int(content["config"]["default_num_special_tokens"])
        vocabulary_size = int(content["config"]["default_vocab_size"])
        special = _special_spellings(content.get("special_tokens"), num_special)
        pieces = _pieces(content["vocab"], vocabulary_size - num_special)
    except (KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise ValueError(f"{path.name} is no tekken file: {error!r}") from error
    bos_token_id, eos_token_id = (_id_of(spelling, special) for spelling in (_BOS, _EOS))
    return Vocabulary(
        token_bytes=(*(spelling.encode() for spelling in special), *pieces),
        special_token_ids=frozenset(range(num_special)),
        eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        bos_token_id=bos_token_id,
        context_length=0,
        chat_template="",
        special_tokens={"bos_token": _BOS, "eos_token": _EOS},
    )


def _special_spellings(named: Sequence[Any] | None, count: int) -> list[str]:
    spellings = [f"<SPECIAL_{token_id}>" for token_id in range(count)]
    found = (
        enumerate(_SPECIAL_TOKENS)
        if named is None
        else [(item["rank"], item["token_str"]) for item in named]
    )
    for token_id, spelling in found:
        if not (0 <= token_id < count and isinstance(spelling, str)):
            raise TypeError(f"special token {token_id} of {count} is {spelling!r}")
        spellings[token_id] = spelling
    return spellings


def _pieces(tokens: Sequence[Any], count: int) -> list[bytes]:
    """The first `count` ranks; a file may hold more than the model knows."""
    if not 0 < count <= len(tokens):
        raise TypeError(f"{len(tokens)} tokens, of which {count} are wanted")
    pieces = [base64.b64decode(token["token_bytes"]) for token in tokens[:count]]
    if any(token["rank"] != rank for rank, token in enumerate(tokens[:count])):
        raise TypeError("tokens are not in the order of their ranks")
    return pieces


def _id_of(spelling: str, special: Sequence[str]) -> int | None:
    return special.index(spelling) if spelling in special else None
