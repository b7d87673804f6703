"""From text or a chat to ids, as a model family has it. Pure, and safe to use from several threads.

Here: the families whose chats a Jinja2 template turns into text. Mistral's are in
`mistral`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from services.core.errors import InvalidArgument
from services.core.settings import TokenizerSettings
from services.tokenizer.template import ChatPrompt, ChatTemplate


class PromptEncoder(Protocol):
    """Raises InvalidArgument naming `text` or `chat`."""

    def encode_text(self, text: str, settings: TokenizerSettings) -> Sequence[int]:
        """Nothing is added; control tokens' spelling becomes control tokens."""
        ...

    def encode_chat(self, chat: ChatPrompt, settings: TokenizerSettings) -> Sequence[int]: ...


class TemplatedPrompts:
    """A chat is the text that the template makes of it, `None` where the model has none."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def encode_text(self, text: str, settings: TokenizerSettings) -> Sequence[int]:
        return self._encode(text, "text", settings)

    def encode_chat(self, chat: ChatPrompt, settings: TokenizerSettings) -> Sequence[int]:
        if self._template is None:
            raise InvalidArgument.of("chat", "the model has no chat template; send text")
        rendered = self._template.render(chat, max_characters=settings.max_text_bytes)
        return self._encode(rendered, "chat", settings)

    def _encode(self, text: str, field: str, settings: TokenizerSettings) -> Sequence[int]:
        check_text(text, field, settings.max_text_bytes)
        if settings.nfc:
            text = unicodedata.normalize("NFC", text)
        # `encode` would hold the GIL, and with it the event loop, until it is done;
        # a batch of one does not.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids


def check_text(text: str, field: str, max_bytes: int) -> None:
    """Raises InvalidArgument when it is empty, too long or no Unicode text."""
    if not text:
        raise InvalidArgument.of(field, "must not be empty")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        # JSON can spell it, as "\ud800"; UTF-8 cannot.
        raise InvalidArgument.of(field, "has half of a surrogate pair") from error
    if num_bytes > max_bytes:
        raise InvalidArgument.of(field, f"must be at most {max_bytes} bytes; got {num_bytes}")
