"""A model's vocabulary; and from GGUF metadata to one, and to a tokenizer.

Of GGUF, only byte-level BPE vocabularies whose pre-tokenizer is known here are
served: any other would encode to ids the model was not trained on, without an error.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.models.byte_level import spelled_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer


class TokenType(enum.IntEnum):
    """As in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Never part of a text, as llama.cpp has it. USER_DEFINED tokens, such as
# <tool_call> of some models, are matched whole but are text.
_SPECIAL = (TokenType.UNKNOWN, TokenType.CONTROL)
_WHOLE = (TokenType.CONTROL, TokenType.USER_DEFINED)

# Models end a turn and a text with different tokens, and name only one of them as theirs.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
EOS_SPELLINGS = ("<|im_end|>", "<|endoftext|>")

# Of a GGUF's metadata, what build_tokenizer alone needs, and is half of all strings.
TO_ENCODE = ("tokenizer.ggml.merges",)


def _smollm() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS = {"smollm": _smollm}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a model's tokens mean.

    `token_bytes` holds for each id what it adds to a text, which need not be
    whole UTF-8 characters, and the spelling of control tokens. `chat_template`
    is Jinja2 source, empty when the model has none; `special_tokens` are its
    variables of that kind, such as bos_token. `context_length` is in tokens, 0 when
    the model does not say. The first of `eos_token_ids` is the one the model names.
    """

    token_bytes: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    context_length: int
    chat_template: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Raises ValueError for a vocabulary of another kind."""
        tokens, types = _tokens(metadata)
        architecture = _required(metadata, "general.architecture")
        eos_token_ids = _eos_token_ids(metadata, tokens, types)
        bos_token_id = metadata.get("tokenizer.ggml.bos_token_id")
        return cls(
            token_bytes=tuple(map(_bytes_of, tokens, types)),
            special_token_ids=frozenset(_ids_of(types, _SPECIAL)),
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id,
            context_length=_required(metadata, f"{architecture}.context_length"),
            chat_template=metadata.get("tokenizer.chat_template", ""),
            special_tokens={
                "bos_token": _spelling(tokens, bos_token_id),
                "eos_token": _spelling(tokens, next(iter(eos_token_ids), None)),
            },
        )

    @property
    def vocabulary_size(self) -> int:
        return len(self.token_bytes)

    def spelling(self, token_id: int) -> str:
        return self.token_bytes[token_id].decode(errors="replace")

    def join(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        """The bytes of a run of tokens; cut anywhere, they may end inside a character."""
        skipped = self.special_token_ids if skip_special_tokens else ()
        return b"".join(self.token_bytes[token] for token in token_ids if token not in skipped)


def distinct_ids(token_ids: Sequence[int | None]) -> tuple[int, ...]:
    """In their order, without gaps and repetitions."""
    return tuple(dict.fromkeys(token_id for token_id in token_ids if token_id is not None))


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer that gives the ids the model was trained on, and adds none of its own.

    Raises ValueError for a vocabulary of another kind.
    """
    # Most that know a vocabulary encode nothing: they start without.
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens, types = _tokens(metadata)
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "tokenizer.ggml.merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(
                tokens[token_id], special=types[token_id] == TokenType.CONTROL, normalized=False
            )
            for token_id in _ids_of(types, _WHOLE)
        ]
    )
    return tokenizer


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Spelling and type of each id."""
    kind = _required(metadata, "tokenizer.ggml.model")
    pre_tokenizer = _required(metadata, "tokenizer.ggml.pre")
    if kind != "gpt2" or pre_tokenizer not in _PRE_TOKENIZERS:
        known = ", ".join(f"gpt2/{name}" for name in _PRE_TOKENIZERS)
        raise ValueError(f"tokenizer {kind}/{pre_tokenizer} is not supported; supported: {known}")
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    return tokens, types


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"the model's metadata lacks {key}")
    return metadata[key]


def _ids_of(types: Iterable[int], wanted: tuple[TokenType, ...]) -> list[int]:
    return [token_id for token_id, kind in enumerate(types) if kind in wanted]


def _eos_token_ids(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[int, ...]:
    named: list[int | None] = [metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
    spelled = [
        token_id
        for token_id in _ids_of(types, (TokenType.CONTROL,))
        if tokens[token_id] in EOS_SPELLINGS
    ]
    return distinct_ids([*named, *spelled])


def _spelling(tokens: Sequence[str], token_id: int | None) -> str:
    """Empty for no token."""
    if token_id is None:
        return ""
    if token_id >= len(tokens):
        raise ValueError(f"the model's metadata names token {token_id} of {len(tokens)}")
    return tokens[token_id]


def _bytes_of(token: str, kind: int) -> bytes:
    return token.encode() if kind in _WHOLE else spelled_bytes(token)
