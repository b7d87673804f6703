"""From text or a chat to ids, as a model family has it. Pure, and safe to use from several threads.

Here: the families whose chats a Jinja2 template turns into text. Mistral's are in
`mistral`.
"""

from __future__ import annotations

import unicodedata
from typing import Protocol

from tokenizers import Tokenizer

from services.core.errors import InvalidArgument
from services.core.settings import TokenizerSettings
from services.encoding.metrics import CacheCounts
from services.encoding.pieces import Draft, PieceEncoder
from services.encoding.template import ChatPrompt, ChatTemplate


class PromptEncoder(Protocol):
    """Raises InvalidArgument naming `text` or `chat`, also when a draft is finished.

    `root`: of the prompt's prefix keys. Nothing is kept of a prompt for one with another root.
    """

    @property
    def counts(self) -> CacheCounts: ...

    def begin_text(self, text: str, root: bytes, settings: TokenizerSettings) -> Draft:
        """Nothing is added; control tokens' spelling becomes control tokens."""
        ...

    def begin_chat(self, chat: ChatPrompt, root: bytes, settings: TokenizerSettings) -> Draft: ...


class TemplatedPrompts:
    """A chat is the text that the template makes of it, `None` where the model has none."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._pieces = PieceEncoder(tokenizer)
        self._template = template

    @property
    def counts(self) -> CacheCounts:
        return self._pieces.counts

    def begin_text(self, text: str, root: bytes, settings: TokenizerSettings) -> Draft:
        return self._begin(text, "text", root, settings)

    def begin_chat(self, chat: ChatPrompt, root: bytes, settings: TokenizerSettings) -> Draft:
        if self._template is None:
            raise InvalidArgument.of("chat", "the model has no chat template; send text")
        rendered = self._template.render(chat, max_characters=settings.max_text_bytes)
        return self._begin(rendered, "chat", root, settings)

    def _begin(self, text: str, field: str, root: bytes, settings: TokenizerSettings) -> Draft:
        check_text(text, field, settings.max_text_bytes)
        if settings.nfc:
            text = unicodedata.normalize("NFC", text)
        return self._pieces.begin(text, root, max_bytes=settings.cache_bytes)


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
