"""What a shared prefix saves: the second of two prompts against the first."""

from __future__ import annotations

import random
import statistics
from typing import Any, NamedTuple

from firsttoken.client import Answer, MeshClient

# Common words, one token each in most vocabularies.
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
)
QUESTIONS = ("What is this about?", "How many words are there, and which is the last?")


class Pair(NamedTuple):
    """Two prompts with one beginning that nobody asked for before."""

    first: Answer
    second: Answer

    @property
    def ttft_ratio(self) -> float:
        return self.second.ttft_ms / self.first.ttft_ms


async def measure(client: MeshClient, *, shared_tokens: int, num_pairs: int) -> list[Pair]:
    pairs = []
    for index in range(num_pairs):
        words = random.Random(index).choices(WORDS, k=shared_tokens)
        text = " ".join(words)
        # The salt keeps a run from what earlier runs left in the caches.
        salt = f"bench reuse {random.getrandbits(64):x}"
        first, second = [
            await client.complete(f"{text}\n\n{question}", max_tokens=4, cache_salt=salt)
            for question in QUESTIONS
        ]
        pairs.append(Pair(first, second))
    return pairs


def to_document(pairs: list[Pair], *, shared_tokens: int) -> dict[str, Any]:
    """Medians over the pairs; tokens of the last pair."""
    last = pairs[-1].second
    return {
        "benchmark": "reuse",
        "engine": last.engine,
        "pairs": len(pairs),
        "shared_tokens": shared_tokens,
        "first_ttft_ms": statistics.median(pair.first.ttft_ms for pair in pairs),
        "second_ttft_ms": statistics.median(pair.second.ttft_ms for pair in pairs),
        "ttft_ratio": statistics.median(pair.ttft_ratio for pair in pairs),
        "prompt_tokens": last.usage.prompt_tokens,
        "cached_tokens": last.usage.cached_tokens,
        "evaluated_prompt_tokens": last.usage.evaluated_prompt_tokens,
        "first_evaluated_prompt_tokens": pairs[-1].first.usage.evaluated_prompt_tokens,
    }
