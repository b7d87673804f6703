"""Prompts of which none was asked before: English that every Python has with it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics

# As the embedded model's vocabulary has it: measured in this text.
TOKENS_PER_WORD = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Prompts whose first tokens are always the same, and whose last ones never are."""

    name: str
    shared_tokens: int = 0
    own_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + self.own_tokens


LOADS = (
    Load(name="short", own_tokens=100),
    Load(name="long, shared", shared_tokens=4000, own_tokens=100),
    Load(name="long, cold", own_tokens=4100),
)


def texts(load: Load, seed: int = 0) -> Iterator[str]:
    """Without end. Lengths are about right: markup has more tokens a word than prose."""
    words = _words()
    chance = random.Random(f"{seed} {load.name}")

    def run(num_tokens: int) -> str:
        length = round(num_tokens / TOKENS_PER_WORD)
        start = chance.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    shared = f"{run(load.shared_tokens)}\n\n" if load.shared_tokens else ""
    for number in itertools.count():
        yield f"{shared}{seed}-{number}: {run(load.own_tokens)}"


@cache
def _words() -> tuple[str, ...]:
    return tuple(" ".join(topics[name] for name in sorted(topics)).split())
