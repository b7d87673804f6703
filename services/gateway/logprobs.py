"""Log-probabilities in the forms of both APIs. Pure.

A token that is no whole text is spelled by its bytes, as OpenAI does; `bytes` are always
exactly those that it adds to the answer.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable
from typing import Any

from firsttoken.common.v1 import common_pb2
from services.models.vocabulary import Vocabulary

# JSON has no infinity; OpenAI says so where a token is as good as impossible.
LEAST = -9999.0


class ChatLogprobs:
    """Of /v1/chat/completions: an object for each token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def entries(self, positions: Iterable[common_pb2.PositionLogprobs]) -> list[dict[str, Any]]:
        return [
            {**self._entry(each.chosen), "top_logprobs": [self._entry(top) for top in each.top]}
            for each in positions
        ]

    def _entry(self, token: common_pb2.TokenLogprob) -> dict[str, Any]:
        spelled = _bytes_of(self._vocabulary, token.token_id)
        return {
            "token": _text(spelled, ""),
            "logprob": _finite(token.logprob),
            "bytes": list(spelled),
        }


class CompletionLogprobs:
    """Of one answer of /v1/completions: parallel lists. `offset`: characters before it."""

    def __init__(self, vocabulary: Vocabulary, offset: int = 0) -> None:
        self._vocabulary = vocabulary
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def lists(self, positions: Iterable[common_pb2.PositionLogprobs]) -> dict[str, list[Any]]:
        told: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for each in positions:
            spelled = _bytes_of(self._vocabulary, each.chosen.token_id)
            told["tokens"].append(_text(spelled, "bytes:"))
            told["token_logprobs"].append(_finite(each.chosen.logprob))
            told["top_logprobs"].append(
                {
                    _text(_bytes_of(self._vocabulary, top.token_id), "bytes:"): _finite(top.logprob)
                    for top in each.top
                }
            )
            told["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(spelled))
        return told


def _bytes_of(vocabulary: Vocabulary, token_id: int) -> bytes:
    """Models have more logits than tokens, now and then."""
    return vocabulary.token_bytes[token_id] if token_id < vocabulary.vocabulary_size else b""


def _text(spelled: bytes, prefix: str) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
