"""What encoding costs, with and without the ids of what was seen before. No mesh, no call.

Each prompt is encoded twice, by turns: as a whole, and with ids kept. CPU time is that of all
threads.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from services.bench.reuse import WORDS
from services.core.keys import extend_keys, root_key
from services.core.settings import MeshSettings, TokenizerSettings
from services.core.tokens import BYTES_PER_TOKEN
from services.encoding.encoder import Encoder, Prompt
from services.encoding.loading import load_encoder
from services.encoding.template import ChatPrompt, ChatTemplate

NUM_ROUNDS = 40
# WORDS are one token each, and a message has some beside.
SHARED_WORDS, NEW_WORDS, TURN_WORDS = 4_000, 90, 95
_EMPTY = ChatPrompt([], None, True, {})
WHOLE, KEPT = TokenizerSettings(cache_bytes=0), TokenizerSettings()


class Row(NamedTuple):
    """Of one prompt, medians. `_cpu_us`: CPU time; `_us`: until its ids and keys are there."""

    prompt: str
    tokens: int
    whole_cpu_us: float
    kept_cpu_us: float
    cpu_ratio: float
    whole_us: float
    kept_us: float


class Spent(NamedTuple):
    cpu_us: float
    wall_us: float


def measure(*, model: str = "", num_rounds: int = NUM_ROUNDS) -> dict[str, Any]:
    """`model`: a name, a file or a folder; empty for the embedded one.

    Raises InvalidArgument or StartupError when there is no such model.
    """
    mesh = MeshSettings(model=model) if model else MeshSettings()
    # One of its own for each way: to keep nothing is to forget what was kept.
    encoder, whole_encoder = load_encoder(mesh), load_encoder(mesh)
    chance = random.Random(1)
    return {
        "benchmark": "tokenize",
        "model": encoder.model,
        "rounds": num_rounds,
        "rows": [
            _row(encoder, whole_encoder, name, make_prompt, num_rounds)._asdict()
            for name, make_prompt in _prompts(chance).items()
        ],
        "parts_cpu_us": _parts(encoder, _chat(chance), num_rounds),
    }


def make_chats(chance: random.Random) -> Mapping[str, Callable[[], ChatPrompt]]:
    """Each makes another one at each call."""
    chat = _chat(chance)
    return {
        "a chat of 100 tokens, all new": lambda: _asking(chance, _EMPTY),
        "a chat seen before, 100 tokens new": lambda: _asking(chance, chat),
        "a chat of 4,000 tokens, all new": lambda: _chat(chance),
    }


def _prompts(chance: random.Random) -> Mapping[str, Callable[[], Prompt]]:
    text = _words(chance, SHARED_WORDS)
    return {
        **make_chats(chance),
        "a text seen before, 100 tokens new": lambda: f"{text} {_words(chance, NEW_WORDS)}",
        "a text of 4,000 tokens, all new": lambda: _words(chance, SHARED_WORDS),
    }


def _asking(chance: random.Random, chat: ChatPrompt) -> ChatPrompt:
    asked = {"role": "user", "content": _words(chance, NEW_WORDS)}
    return chat._replace(messages=[*chat.messages, asked])


def _chat(chance: random.Random) -> ChatPrompt:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": _words(chance, SHARED_WORDS // 4)}]
    messages += [
        {"role": roles[turn % 2], "content": _words(chance, TURN_WORDS)}
        for turn in range(SHARED_WORDS * 3 // 4 // 100)
    ]
    return _EMPTY._replace(messages=messages)


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def _row(
    encoder: Encoder,
    whole_encoder: Encoder,
    name: str,
    make_prompt: Callable[[], Prompt],
    num_rounds: int,
) -> Row:
    ids = _encode(encoder, make_prompt(), KEPT)
    kept, whole = [], []
    for _ in range(num_rounds):
        prompt = make_prompt()
        kept.append(_spent(partial(_encode, encoder, prompt, KEPT)))
        whole.append(_spent(partial(_encode, whole_encoder, prompt, WHOLE)))
    whole_spent, kept_spent = _median(whole), _median(kept)
    return Row(
        prompt=name,
        tokens=len(ids) // BYTES_PER_TOKEN,
        whole_cpu_us=whole_spent.cpu_us,
        kept_cpu_us=kept_spent.cpu_us,
        cpu_ratio=kept_spent.cpu_us / whole_spent.cpu_us,
        whole_us=whole_spent.wall_us,
        kept_us=kept_spent.wall_us,
    )


def _encode(encoder: Encoder, prompt: Prompt, settings: TokenizerSettings) -> bytes:
    return encoder.encode(prompt, tenant="", cache_salt="", settings=settings).token_ids


def _parts(encoder: Encoder, chat: ChatPrompt, num_rounds: int) -> dict[str, float]:
    """Of a chat seen before: what is spent at each request, however much is kept."""
    vocabulary = encoder.vocabulary
    template = ChatTemplate(vocabulary.chat_template, special_tokens=vocabulary.special_tokens)
    root = root_key(model=encoder.model, block_tokens=encoder.block_tokens)
    ids = _encode(encoder, chat, KEPT)
    parts: dict[str, Callable[[], object]] = {
        "template": lambda: template.render(chat, max_characters=1 << 20),
        "prefix_keys": lambda: extend_keys(root, ids, encoder.block_tokens),
        "all": lambda: _encode(encoder, chat, KEPT),
    }
    return {
        name: _median([_spent(part) for _ in range(num_rounds)]).cpu_us
        for name, part in parts.items()
    }


def _spent(work: Callable[[], object]) -> Spent:
    gc.disable()
    try:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        work()
        return Spent((time.process_time() - cpu_s) * 1e6, (time.perf_counter() - wall_s) * 1e6)
    finally:
        gc.enable()


def _median(spent: list[Spent]) -> Spent:
    return Spent(
        statistics.median(each.cpu_us for each in spent),
        statistics.median(each.wall_us for each in spent),
    )
