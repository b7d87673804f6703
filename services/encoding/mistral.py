"""Mistral's models: chats go to ids through mistral-common, which is how they were trained.

There is no text in between: control tokens stand for what the chat's fields say, and
their spelling inside of a message is text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from pydantic import ValidationError

from services.core.errors import InvalidArgument
from services.core.settings import TokenizerSettings
from services.core.tokens import pack
from services.encoding.metrics import CacheCounts
from services.encoding.pieces import Draft
from services.encoding.prompts import check_text
from services.encoding.template import ChatPrompt
from services.models.vocabulary import Vocabulary

# What some of the versions take beside the chat; the others refuse it themselves.
_ARGUMENTS = ("reasoning_effort",)
# All that a control token may be spelled like; none can begin inside of another.
_CANDIDATE = re.compile(r"<[^<>\[\]\s]+>|\[[^<>\[\]\s]+\]")


class MistralPrompts:
    """A PromptEncoder. Raises OSError or ValueError for what is no tekken file."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        try:
            self._mistral = MistralTokenizer.from_file(path)
        except (AssertionError, LookupError, TypeError) as error:
            raise ValueError(f"{path.name} is no tekken file: {error!r}") from error
        self._control_ids = {
            vocabulary.spelling(token_id): token_id for token_id in vocabulary.special_token_ids
        }

    @property
    def counts(self) -> CacheCounts:
        """It keeps nothing."""
        return CacheCounts()

    def begin_text(self, text: str, root: bytes, settings: TokenizerSettings) -> Draft:
        return Draft([text], lambda: pack(self.encode_text(text, settings)))

    def begin_chat(self, chat: ChatPrompt, root: bytes, settings: TokenizerSettings) -> Draft:
        # What it becomes is not known before it is checked, which is not quick.
        return Draft(None, lambda: pack(self.encode_chat(chat, settings)))

    def encode_text(self, text: str, settings: TokenizerSettings) -> list[int]:
        check_text(text, "text", settings.max_text_bytes)
        if settings.nfc:
            text = unicodedata.normalize("NFC", text)
        ids: list[int] = []
        start = 0
        for match in _CANDIDATE.finditer(text):
            control_id = self._control_ids.get(match[0])
            if control_id is not None:
                ids += self._encode_piece(text[start : match.start()])
                ids.append(control_id)
                start = match.end()
        return ids + self._encode_piece(text[start:])

    def encode_chat(self, chat: ChatPrompt, settings: TokenizerSettings) -> list[int]:
        for name in chat.template_args:
            if name not in _ARGUMENTS:
                rule = f"must not set {name}: the model's chats follow no template"
                raise InvalidArgument.of("chat.template_args_json", rule)
        messages, tools = chat.messages, chat.tools
        try:
            text = json.dumps([messages, tools], ensure_ascii=False)
            check_text(text, "chat", settings.max_text_bytes)
            if settings.nfc:
                messages, tools = _composed(messages), _composed(tools)
            request = ChatCompletionRequest.from_openai(messages, tools, **chat.template_args)
            ids: list[int] = self._mistral.encode_chat_completion(request).tokens
        except InvalidArgument:
            raise
        except Exception as error:  # it raises its own, pydantic's and several of Python's
            raise InvalidArgument.of(
                "chat", f"the model's encoder refuses it: {_reason(error)}"
            ) from error
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        tokenizer = self._mistral.instruct_tokenizer.tokenizer
        try:
            return tokenizer.encode(text, bos=False, eos=False)
        except ValueError as error:
            # Its regular expression gives up on runs of several 100,000 spaces.
            raise InvalidArgument.of("text", f"cannot be encoded: {error}") from error


def _composed(value: Any) -> Any:
    """With all texts in it in normal form C."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, list):
        return [_composed(item) for item in value]
    if isinstance(value, dict):
        return {_composed(key): _composed(item) for key, item in value.items()}
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error) or type(error).__name__
