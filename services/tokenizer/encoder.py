"""From a prompt in any form to token ids and the keys of their prefixes.

Pure, and safe to use from several threads. It takes milliseconds, so never call it
on an event loop.
"""

from __future__ import annotations

import unicodedata
from typing import NamedTuple, TypeAlias

from tokenizers import Tokenizer

from services.core.errors import InvalidArgument
from services.core.keys import extend_keys, root_key
from services.core.settings import TokenizerSettings
from services.core.tokens import pack, unpack
from services.models.vocabulary import Vocabulary
from services.tokenizer.template import ChatPrompt, ChatTemplate

# Text, a chat, or packed token ids.
Prompt: TypeAlias = str | ChatPrompt | bytes


class EncodedPrompt(NamedTuple):
    """Packed ids; the chain's root, then a key per full block."""

    token_ids: bytes
    prefix_keys: list[bytes]


class Encoder:
    """One model's tokenizer, vocabulary and chat template.

    No token is added to what the text or the template says, no beginning of
    sequence either.
    """

    def __init__(
        self,
        *,
        model: str,
        block_tokens: int,
        vocabulary: Vocabulary,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._template = template

    def encode(
        self, prompt: Prompt, *, tenant: str, cache_salt: str, settings: TokenizerSettings
    ) -> EncodedPrompt:
        """Raises InvalidArgument naming `text`, `chat` or `token_ids`."""
        token_ids = self._token_ids(prompt, settings)
        root = root_key(
            model=self.model, block_tokens=self.block_tokens, tenant=tenant, salt=cache_salt
        )
        return EncodedPrompt(token_ids, [root, *extend_keys(root, token_ids, self.block_tokens)])

    def decode(self, token_ids: bytes, *, skip_special_tokens: bool) -> str:
        """Raises InvalidArgument naming `token_ids`."""
        ids = unpack(
            token_ids, field="token_ids", vocabulary_size=self.vocabulary.vocabulary_size
        ).tolist()
        text = self.vocabulary.join(ids, skip_special_tokens=skip_special_tokens)
        return text.decode(errors="replace")

    def _token_ids(self, prompt: Prompt, settings: TokenizerSettings) -> bytes:
        if isinstance(prompt, bytes):
            return self._checked_ids(prompt)
        if isinstance(prompt, str):
            return self._encode_text(prompt, "text", settings)
        return self._encode_text(self._render(prompt, settings), "chat", settings)

    def _checked_ids(self, token_ids: bytes) -> bytes:
        if not token_ids:
            raise InvalidArgument.of("token_ids", "must not be empty")
        unpack(token_ids, field="token_ids", vocabulary_size=self.vocabulary.vocabulary_size)
        return token_ids

    def _render(self, chat: ChatPrompt, settings: TokenizerSettings) -> str:
        if self._template is None:
            raise InvalidArgument.of("chat", f"{self.model} has no chat template; send text")
        return self._template.render(chat, max_characters=settings.max_text_bytes)

    def _encode_text(self, text: str, field: str, settings: TokenizerSettings) -> bytes:
        _check_text(text, field, settings.max_text_bytes)
        if settings.nfc:
            text = unicodedata.normalize("NFC", text)
        # `encode` would hold the GIL, and with it the event loop, until it is done;
        # a batch of one does not.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = encoding.ids
        if not ids:
            raise InvalidArgument.of(field, "has nothing that the model has a token for")
        return pack(ids)


def _check_text(text: str, field: str, max_bytes: int) -> None:
    if not text:
        raise InvalidArgument.of(field, "must not be empty")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        # JSON can spell it, as "\ud800"; UTF-8 cannot.
        raise InvalidArgument.of(field, "has half of a surrogate pair") from error
    if num_bytes > max_bytes:
        raise InvalidArgument.of(field, f"must be at most {max_bytes} bytes; got {num_bytes}")
