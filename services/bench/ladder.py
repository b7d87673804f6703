"""Step by step: what each optimisation gives to a mesh that has those before it. Pure.

Rungs are data. `ladder_virtual` and `ladder_live` measure them, on simulated engines in
virtual time and on the real engine; the same requests come at the same times to each rung.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from services.bench.route import percentile
from services.core.errors import InvalidArgument

# Refusals by a bound, not failures.
REFUSALS = ("QUEUE_FULL", "EXPECTED_WAIT", "WORKER_QUEUE_FULL", "RESOURCE_EXHAUSTED")
COMPARED = ("ttft_mean_ms", "ttft_p95_ms")


class Trait(enum.Enum):
    """What a rung changes beside settings."""

    # Without it nothing is found in a cache: each request has a salt of its own.
    CACHE = "cache"
    # Some of the workers compute prompts for the others.
    SPLIT = "split"
    # Requests that can wait say so. Only then may some be refused.
    CLASSES = "classes"
    # Each node has a KV store.
    STORE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    name: str
    # For people.
    adds: str
    traits: frozenset[Trait] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def on(self, below: Rung) -> Rung:
        """With all that the rungs below have."""
        return Rung(
            name=self.name,
            adds=self.adds,
            traits=below.traits | self.traits,
            settings={**below.settings, **self.settings},
        )


RUNGS = (
    Rung(
        name="baseline",
        adds="round robin, no prefix cache, prefill and decode mixed, unbounded queue",
        settings={
            "router.routing_strategy": "round_robin",
            "router.max_queue": 1_000_000,
            "router.max_wait_interactive_s": 0.0,
            "router.max_wait_batch_s": 0.0,
            "worker.kv_load": "never",
            "worker.kv_write_queue_blocks": 0,
        },
    ),
    Rung(name="cache", adds="prefix cache", traits=frozenset({Trait.CACHE})),
    Rung(
        name="routing",
        adds="prefix routing (kv_aware)",
        settings={"router.routing_strategy": "kv_aware"},
    ),
    Rung(name="split", adds="prefill/decode split", traits=frozenset({Trait.SPLIT})),
    Rung(
        name="queue",
        adds="dynamic queue, interactive before batch",
        traits=frozenset({Trait.CLASSES}),
        settings={"router.max_queue": 1_024, "router.max_wait_interactive_s": 30.0},
    ),
    Rung(
        name="tiers",
        adds="KV tiers (L1 in the node's memory)",
        traits=frozenset({Trait.STORE}),
        settings={"worker.kv_load": "auto", "worker.kv_write_queue_blocks": 256},
    ),
)
NAMES = tuple(rung.name for rung in RUNGS)


class Ladder(NamedTuple):
    """Each rung with all below it. `without_split`: the last one but for the split; None
    where that says nothing."""

    rungs: tuple[Rung, ...]
    without_split: Rung | None


def climb(names: Sequence[str] = NAMES) -> Ladder:
    """The rungs of these names and the baseline, from below. Raises InvalidArgument."""
    for name in names:
        if name not in NAMES:
            raise InvalidArgument.of(
                "--rungs", f"{name[:40]!r} is no rung; there are {', '.join(NAMES)}"
            )
    if not names:
        raise InvalidArgument.of("--rungs", f"must name some of {', '.join(NAMES)}")
    baseline, *others = RUNGS
    chosen = [rung for rung in others if rung.name in names]
    rungs = _pile(baseline, chosen)
    rest = [rung for rung in chosen if Trait.SPLIT not in rung.traits]
    without = _pile(baseline, rest)[-1] if rest and len(rest) < len(chosen) else None
    return Ladder(rungs, without)


def _pile(baseline: Rung, others: Sequence[Rung]) -> tuple[Rung, ...]:
    rungs = [baseline]
    for rung in others:
        rungs.append(rung.on(rungs[-1]))
    return tuple(rungs)


class Result(NamedTuple):
    """What became of a request. Times of one that failed are NaN."""

    ttft_s: float
    # Between two tokens, on average.
    tpot_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    # It can wait, whether the mesh was told so or not.
    batch: bool
    # Empty: it ended well.
    error: str


class Headroom:
    """KV blocks and slots of all workers, as they were seen from time to time."""

    def __init__(self) -> None:
        self._least_free = self._most_held = self._most_running = 0
        self._num_blocks = self._num_slots = 0

    def see(
        self, *, held: int, occupied: int, num_blocks: int, running: int, num_slots: int
    ) -> None:
        """`held`: what running requests have, shared blocks once. `occupied`: that, and
        what is cached beside."""
        free = num_blocks - occupied
        self._least_free = min(self._least_free, free) if self._num_blocks else free
        self._most_held = max(self._most_held, held)
        self._most_running = max(self._most_running, running)
        self._num_blocks, self._num_slots = num_blocks, num_slots

    def figures(self) -> dict[str, int]:
        return {
            "blocks": self._num_blocks,
            "blocks_held_peak": self._most_held,
            "blocks_free_least": self._least_free,
            "slots": self._num_slots,
            "running_peak": self._most_running,
        }


def summarize(
    rung: Rung, results: Sequence[Result], duration_s: float, headroom: Headroom
) -> dict[str, Any]:
    """A rung's figures: of those that completed, None where there are none."""
    served = [each for each in results if not each.error]
    errors = Counter(each.error for each in results if each.error)
    refused = sum(errors[reason] for reason in REFUSALS)
    row: dict[str, Any] = {
        "rung": rung.name,
        "adds": rung.adds,
        "completed": len(served),
        "refused": refused,
        "failed": errors.total() - refused,
        "errors": dict(errors.most_common()),
        **_times("ttft", [each.ttft_s for each in served]),
        **_times("interactive_ttft", [each.ttft_s for each in served if not each.batch]),
        **_times("tpot", [each.tpot_s for each in served if each.output_tokens > 1]),
        "requests_per_s": len(served) / duration_s,
        "output_tokens_per_s": sum(each.output_tokens for each in served) / duration_s,
        "hit_rate": None,
        **headroom.figures(),
    }
    if prompt_tokens := sum(each.prompt_tokens for each in served):
        row["hit_rate"] = sum(each.cached_tokens for each in served) / prompt_tokens
    return row


def _times(name: str, times_s: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(time_s * 1e3 for time_s in times_s)
    return {
        f"{name}_mean_ms": statistics.fmean(ordered) if ordered else None,
        f"{name}_p95_ms": percentile(ordered, 95) if ordered else None,
    }


def compare(rows: Sequence[dict[str, Any]], without_split: dict[str, Any] | None) -> dict[str, Any]:
    """Adds to each row how it differs from the one below it, if there is one; returns the
    whole."""
    first, last = rows[0], rows[-1]
    for below, row in pairwise(rows):
        for figure in COMPARED:
            change = _change(below[figure], row[figure])
            row[f"{figure}_change"] = change
            row[f"{figure}_of_baseline"] = _ratio(change, first[figure])
            row[f"{figure}_share"] = _ratio(change, _change(first[figure], last[figure]))
    everything = [*rows, *([without_split] if without_split else [])]
    return {
        "rungs": list(rows),
        "without_split": without_split,
        "equal_completions": len({row["completed"] for row in everything}) == 1,
        "whole": _fall(first, last),
        "whole_without_split": _fall(first, without_split) if without_split else None,
    }


def _fall(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, float | None]:
    """Shares of the baseline's: -0.77 is 77 % less."""
    return {
        figure: _ratio(_change(first[figure], last[figure]), first[figure]) for figure in COMPARED
    }


def _change(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole and math.isfinite(whole) else None
