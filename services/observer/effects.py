"""What each change of the configuration did: requests before and after it, and whether the
difference is more than noise. Pure.

Of each generation a bounded sample is kept, drawn evenly from all its requests, so that it
outlives the window. Samples are compared by Mann and Whitney's test: it asks nothing of how
times are distributed.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.observer.model import Generation, Request, Window
from services.observer.statistics import mann_whitney, mean, quantile

MAX_SAMPLE = 1000
MAX_GENERATIONS = 64
# Fewer requests on one side tell nothing.
MIN_REQUESTS = 20
# By chance alone, one comparison in a hundred is called a difference.
SURE = 0.01
# Pairs in which one prompt is longer, from half: from here on the prompts are others.
APART = 0.1
NOT_ENOUGH = "not enough evidence"


@dataclass(slots=True)
class _Kept:
    """Of one generation. Columns of equal length: the sample."""

    number: int
    since_unix_s: float | None = None
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    num_requests: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_sum_s: float = 0.0
    # (TTFT, TPOT or None, share of the prompt found, prompt tokens)
    sample: list[tuple[float, float | None, float, int]] = field(default_factory=list)


class Effects:
    """Add requests in any order, each once."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        # Which requests are kept is chance, and the same each time.
        self._chance = random.Random(0)

    @classmethod
    def of(cls, window: Window) -> Effects:
        effects = cls()
        for generation in window.generations:
            effects.add_generation(generation)
        for request in window.requests:
            effects.add(request)
        return effects

    def add_generation(self, generation: Generation) -> None:
        """What it changed, and since when it holds; again where that is known better now."""
        kept = self._of(generation.number)
        kept.since_unix_s = generation.since_unix_s
        kept.changes = generation.changes

    def add(self, request: Request) -> None:
        # Who was refused before a worker was chosen does not say under which.
        number = request.generation or self._in_force(request.arrived_unix_s)
        if number is None:
            return
        kept = self._of(number)
        kept.num_requests += 1
        if request.ttft_s is None or request.error:
            kept.num_failed += 1
            return
        kept.prompt_tokens += request.prompt_tokens
        kept.cached_tokens += request.cached_tokens
        kept.ttft_sum_s += request.ttft_s
        found = request.cached_tokens / max(1, request.prompt_tokens)
        row = (request.ttft_s, request.tpot_s, found, request.prompt_tokens)
        if len(kept.sample) < MAX_SAMPLE:
            kept.sample.append(row)
        elif (place := self._chance.randrange(kept.num_requests - kept.num_failed)) < MAX_SAMPLE:
            kept.sample[place] = row

    def report(self) -> dict[str, Any]:
        """As JSON: generations, the oldest first, each compared with the one before it that had
        enough requests."""
        rows: list[dict[str, Any]] = []
        before: _Kept | None = None
        for number in sorted(self._kept):
            kept = self._kept[number]
            rows.append(_figures(kept) | {"effect": _effect(before, kept)})
            if len(kept.sample) >= MIN_REQUESTS:
                before = kept
        return {
            "test": f"Mann-Whitney, two-sided, p < {SURE}",
            "min_requests": MIN_REQUESTS,
            "generations": rows,
        }

    def check_integrity(self) -> None:
        assert len(self._kept) <= MAX_GENERATIONS
        for kept in self._kept.values():
            num_answered = kept.num_requests - kept.num_failed
            assert len(kept.sample) == min(num_answered, MAX_SAMPLE)

    def _in_force(self, at_unix_s: float) -> int | None:
        begun = [
            kept.number
            for kept in self._kept.values()
            if kept.since_unix_s is not None and kept.since_unix_s <= at_unix_s
        ]
        return max(begun, default=None)

    def _of(self, number: int) -> _Kept:
        if number not in self._kept:
            self._kept[number] = _Kept(number)
            if len(self._kept) > MAX_GENERATIONS:
                del self._kept[min(self._kept)]
        # The oldest may just have gone again.
        return self._kept.get(number, _Kept(number))


def _figures(kept: _Kept) -> dict[str, Any]:
    ttfts = [row[0] for row in kept.sample]
    tpots = [row[1] for row in kept.sample if row[1] is not None]
    num_answered = kept.num_requests - kept.num_failed
    return {
        "generation": kept.number,
        "since_unix_s": kept.since_unix_s,
        "changes": {key: list(pair) for key, pair in kept.changes.items()},
        "requests": kept.num_requests,
        "failed": kept.num_failed,
        "ttft_mean_ms": _ms(kept.ttft_sum_s / num_answered) if num_answered else None,
        "ttft_p50_ms": _ms(quantile(ttfts, 0.5)) if ttfts else None,
        "ttft_p95_ms": _ms(quantile(ttfts, 0.95)) if ttfts else None,
        "tpot_mean_ms": _ms(mean(tpots)) if tpots else None,
        "hit_rate": round(kept.cached_tokens / kept.prompt_tokens, 4)
        if kept.prompt_tokens
        else None,
    }


def _effect(before: _Kept | None, after: _Kept) -> dict[str, Any] | None:
    """None: nothing came before it."""
    if before is None:
        return None
    effect: dict[str, Any] = {"against": before.number}
    if min(len(before.sample), len(after.sample)) < MIN_REQUESTS:
        return effect | {"verdict": NOT_ENOUGH, "note": f"{MIN_REQUESTS} answers each are needed"}
    figures = {
        "ttft": _compare(before, after, 0),
        "tpot": _compare(before, after, 1),
        "hit_rate": _compare(before, after, 2),
    }
    prompts = mann_whitney(
        [float(row[3]) for row in before.sample], [float(row[3]) for row in after.sample]
    )
    has_other_prompts = prompts.p < SURE and abs(prompts.superiority - 0.5) > APART
    note = "prompts differ in length: they may be why" if has_other_prompts else ""
    return effect | {"verdict": _verdict(figures), "note": note, **figures}


def _compare(before: _Kept, after: _Kept, column: int) -> dict[str, Any] | None:
    first, second = (_column(each, column) for each in (before, after))
    if min(len(first), len(second)) < MIN_REQUESTS:
        return None
    test = mann_whitney(first, second)
    was = mean(first)
    return {
        "change": None if not was else round(mean(second) / was - 1, 4),
        # Of all pairs, those in which the later one is higher.
        "higher": round(test.superiority, 4),
        "p": float(f"{test.p:.3g}"),
        "more_than_noise": test.p < SURE,
    }


def _column(kept: _Kept, column: int) -> Sequence[float]:
    return [float(row[column] or 0.0) for row in kept.sample if row[column] is not None]


def _verdict(figures: Mapping[str, Mapping[str, Any] | None]) -> str:
    """In a few words."""
    words = []
    for name, text in (("ttft", "TTFT"), ("tpot", "TPOT"), ("hit_rate", "hit rate")):
        figure = figures[name]
        if figure is not None and figure["more_than_noise"]:
            words.append(f"{text} {'higher' if figure['higher'] > 0.5 else 'lower'}")
    return ", ".join(words) or "no more than noise"


def _ms(duration_s: float) -> float:
    return round(duration_s * 1e3, 3)
