"""From a prompt in any form to token ids and the keys of their prefixes.

Pure, and safe to use from several threads. It takes milliseconds, so never call it
on an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from services.core.errors import InvalidArgument
from services.core.keys import extend_keys, root_key
from services.core.settings import TokenizerSettings
from services.core.tokens import unpack
from services.encoding.metrics import CacheCounts
from services.encoding.pieces import Draft
from services.encoding.prompts import PromptEncoder
from services.encoding.template import ChatPrompt
from services.models.vocabulary import Vocabulary

# Text, a chat, or packed token ids.
Prompt: TypeAlias = str | ChatPrompt | bytes


class EncodedPrompt(NamedTuple):
    """Packed ids; the chain's root, then a key per full block."""

    token_ids: bytes
    prefix_keys: list[bytes]


class BegunPrompt(NamedTuple):
    """A prompt of which these texts are still to be encoded: what takes the time."""

    # None: that is not known.
    new: Sequence[str] | None
    finish: Callable[[], EncodedPrompt]


class Encoder:
    """One model's vocabulary and its way from prompts to ids.

    No token is added to what the text says or the chat becomes, no beginning of
    sequence either.
    """

    def __init__(
        self,
        *,
        model: str,
        block_tokens: int,
        vocabulary: Vocabulary,
        prompts: PromptEncoder,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.vocabulary = vocabulary
        self._prompts = prompts

    @property
    def counts(self) -> CacheCounts:
        """Of the pieces of prompts whose ids are kept."""
        return self._prompts.counts

    def encode(
        self, prompt: Prompt, *, tenant: str, cache_salt: str, settings: TokenizerSettings
    ) -> EncodedPrompt:
        """Raises InvalidArgument naming `text`, `chat` or `token_ids`."""
        return self.begin(prompt, tenant=tenant, cache_salt=cache_salt, settings=settings).finish()

    def begin(
        self, prompt: Prompt, *, tenant: str, cache_salt: str, settings: TokenizerSettings
    ) -> BegunPrompt:
        """All but what is new of it; the same errors, some of them when it is finished."""
        root = root_key(
            model=self.model, block_tokens=self.block_tokens, tenant=tenant, salt=cache_salt
        )
        if isinstance(prompt, bytes):
            return BegunPrompt((), lambda: self._with_keys(self._checked_ids(prompt), root))
        if isinstance(prompt, str):
            field, draft = "text", self._prompts.begin_text(prompt, root, settings)
        else:
            field, draft = "chat", self._prompts.begin_chat(prompt, root, settings)
        return BegunPrompt(draft.new, lambda: self._with_keys(_some_ids(draft, field), root))

    def decode(self, token_ids: bytes, *, skip_special_tokens: bool) -> str:
        """Raises InvalidArgument naming `token_ids`."""
        ids = unpack(
            token_ids, field="token_ids", vocabulary_size=self.vocabulary.vocabulary_size
        ).tolist()
        text = self.vocabulary.join(ids, skip_special_tokens=skip_special_tokens)
        return text.decode(errors="replace")

    def _with_keys(self, token_ids: bytes, root: bytes) -> EncodedPrompt:
        return EncodedPrompt(token_ids, [root, *extend_keys(root, token_ids, self.block_tokens)])

    def _checked_ids(self, token_ids: bytes) -> bytes:
        if not token_ids:
            raise InvalidArgument.of("token_ids", "must not be empty")
        unpack(token_ids, field="token_ids", vocabulary_size=self.vocabulary.vocabulary_size)
        return token_ids


def _some_ids(draft: Draft, field: str) -> bytes:
    token_ids = draft.finish()
    if not token_ids:
        raise InvalidArgument.of(field, "has nothing that the model has a token for")
    return token_ids
