"""Chats as the served model's tokenizer and template make them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from services.core.settings import TokenizerSettings
from services.core.tokens import unpack
from services.encoding.pieces import Draft
from services.encoding.prompts import TemplatedPrompts
from services.encoding.template import ChatPrompt, ChatTemplate
from services.models.catalog import find_model
from services.models.loading import load_tokenizer
from services.observer.spelling import Spelling

MODEL = "smollm2-135m-instruct"
_WORDS = (
    "answer always state order refund parcel polite short list price never customer invoice",
    "return shop policy check date ask agent lookup table reply form reason total status",
)


@functools.cache
def _model() -> tuple[Spelling, TemplatedPrompts]:
    vocabulary, tokenizer = load_tokenizer(find_model(MODEL))
    template = ChatTemplate(vocabulary.chat_template, special_tokens=vocabulary.special_tokens)
    return Spelling(vocabulary), TemplatedPrompts(tokenizer, template)


def spelling() -> Spelling:
    return _model()[0]


def chat(system: str, *turns: str) -> Sequence[int]:
    """Ids of a chat: user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}]
    messages += [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
    prompt = ChatPrompt(messages, None, True, {})
    return _ids(_model()[1].begin_chat(prompt, b"", TokenizerSettings()))


def text(content: str) -> Sequence[int]:
    return _ids(_model()[1].begin_text(content, b"", TokenizerSettings()))


def _ids(draft: Draft) -> Sequence[int]:
    ids: list[int] = unpack(draft.finish(), field="token_ids").tolist()
    return ids


def prose(seed: int, num_words: int) -> str:
    chance = random.Random(seed)
    words = chance.choices(" ".join(_WORDS).split(), k=num_words)
    return " ".join(f"{word}." if n % 12 == 11 else word for n, word in enumerate(words))
