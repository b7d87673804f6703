"""From logits to tokens, for all rows of a step.

A row's token depends on its own logits, parameters, prompt and answer, bit for bit:
no state is kept between steps, and no reduction runs across rows.

Candidates are ranked by logit, equal ones by id. top_k, top_p and min_p each keep
the head of that ranking, so the shortest head is what all of them keep. Ranking
the likeliest few is enough for most rows; a row where it is not gets ranked whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from services.core.sampling import Sampling
from services.core.tokens import TokenArray
from worker.engines.contract import Logits
from worker.messages import TokenLogprobs
from worker.philox import uniform

Ids: TypeAlias = npt.NDArray[np.intp]
Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]

# How many are ranked first, seldom too few, and by how much more the next time.
FEW = 256
MORE = 4
# Width of the groups whose sums lead to a token.
GROUP = 64
# Below this, temperature is greedy, and both parameters leave the range of float32.
SMALLEST = 1e-4


class Row(NamedTuple):
    """Whose token is wanted: what the sequence holds so far."""

    sampling: Sampling
    prompt_ids: TokenArray
    answer_ids: Sequence[int]
    # It gets the likeliest, and nothing needs be looked at but the logits.
    is_plain: bool = False

    @classmethod
    def of(cls, sampling: Sampling, prompt_ids: TokenArray, answer_ids: Sequence[int]) -> Row:
        """`answer_ids` may go on growing."""
        is_plain = sampling.temperature <= 0 and sampling.logprobs is None
        return cls(sampling, prompt_ids, answer_ids, is_plain and not _has_penalties(sampling))


class Sampled(NamedTuple):
    token_id: int
    # Of the model's own distribution; None unless asked for.
    logprobs: TokenLogprobs | None


def sample(logits: Logits, rows: Sequence[Row]) -> list[Sampled]:
    """The next token of each row of `logits`, shape (len(rows), width)."""
    likeliest = logits.argmax(axis=1).tolist()
    if all(row.is_plain for row in rows):
        return [Sampled(token_id, None) for token_id in likeliest]
    fractions = _fractions(rows)
    return [
        _sample_row(logits[index], row, likeliest[index], fractions[index])
        for index, row in enumerate(rows)
    ]


def _sample_row(logits: Floats, row: Row, likeliest: int, fraction: float) -> Sampled:
    sampling, token_id, adjusted = row.sampling, likeliest, logits
    if _has_penalties(sampling):
        adjusted = _penalize(logits, row)
        token_id = int(adjusted.argmax())
    if sampling.temperature > 0:
        token_id = _draw(adjusted, sampling, fraction)
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = _logprobs(logits, token_id, sampling.logprobs)
    return Sampled(token_id, logprobs)


def _fractions(rows: Sequence[Row]) -> Doubles:
    """For each row a number in [0, 1), from its seed and the position of its token."""
    if all(row.sampling.temperature == 0 for row in rows):
        return np.zeros(len(rows))
    seeds = [_seed(row.sampling) for row in rows]
    positions = [len(row.prompt_ids) + len(row.answer_ids) for row in rows]
    return uniform(np.array(seeds, np.uint64), np.array(positions, np.uint64))


def _seed(sampling: Sampling) -> int:
    if sampling.temperature == 0:
        return 0
    if sampling.seed is None:
        raise ValueError("a row with a temperature needs a seed")
    return sampling.seed


def _has_penalties(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


def _penalize(logits: Floats, row: Row) -> Floats:
    sampling = row.sampling
    logits = logits.copy()
    answer_ids, counts = np.unique(np.array(row.answer_ids, np.intp), return_counts=True)
    if sampling.repetition_penalty != 1:
        seen = _within(logits, np.concatenate((row.prompt_ids.astype(np.intp), answer_ids)))
        penalty = np.float32(max(sampling.repetition_penalty, SMALLEST))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    counts = counts[answer_ids < logits.size]
    penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
    logits[_within(logits, answer_ids)] -= penalties.astype(np.float32)
    return logits


def _within(logits: Floats, ids: Ids) -> Ids:
    """Those of `ids` that have a logit; the others have probability 0."""
    return ids[ids < logits.size]


def _draw(logits: Floats, sampling: Sampling, fraction: float) -> int:
    """The token at `fraction` of the probability that the parameters keep."""
    peak = logits.max()
    if not np.isfinite(peak):
        return int(logits.argmax())
    temperature = np.float32(max(sampling.temperature, SMALLEST))
    weights = np.exp((logits - peak) / temperature)
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        kept = _keep(logits, weights, sampling)
        return int(kept[_find(weights[kept], fraction)])
    return _find(weights, fraction)


def _keep(logits: Floats, weights: Floats, sampling: Sampling) -> Ids:
    """Ids, ranked, that top_k, top_p and min_p keep."""
    count = max(FEW, sampling.top_k + 1)
    while True:
        ranked = _rank(logits, count)
        num_kept = _num_kept(weights, ranked, sampling)
        # If all that were ranked are kept, perhaps more should be.
        if num_kept < ranked.size or ranked.size == logits.size:
            return ranked[:num_kept]
        count *= MORE


def _num_kept(weights: Floats, ranked: Ids, sampling: Sampling) -> int:
    heads = weights[ranked[: sampling.top_k or None]]
    num_kept = heads.size
    if sampling.top_p < 1:
        running = np.cumsum(heads, dtype=np.float64)
        whole = running[-1] if sampling.top_k else weights.sum(dtype=np.float64)
        num_kept = int(np.searchsorted(running, sampling.top_p * whole)) + 1
    # The likeliest has weight 1.
    return min(num_kept, int(np.count_nonzero(heads >= sampling.min_p)))


def _rank(logits: Floats, count: int) -> Ids:
    """The `count` likeliest ids or more, likeliest first, equal ones by id."""
    ids = np.flatnonzero(logits >= _lower_bound(logits, count))
    return ids[np.argsort(-logits[ids], kind="stable")]


def _lower_bound(logits: Floats, count: int) -> float:
    """A value that at least `count` logits reach, and not many more; cheaper than sorting.

    It is the count-th largest of the maxima of three times as many groups. Groups are
    columns, since numpy takes the maxima of columns faster.
    """
    num_groups = 3 * count
    group = logits.size // num_groups
    if group < 2:
        return -np.inf
    maxima = logits[: group * num_groups].reshape(group, num_groups).max(axis=0)
    return float(np.partition(maxima, num_groups - count)[num_groups - count])


def _find(weights: Floats, fraction: float) -> int:
    """The first index at which the running sum of `weights` exceeds `fraction` of the whole."""
    if weights.size <= GROUP**2:
        running = np.cumsum(weights, dtype=np.float64)
        return _first_above(running, fraction * running[-1])
    # By groups: a running sum of a whole vocabulary would take longer than its exp() did.
    starts = np.arange(0, weights.size, GROUP)
    sums = np.cumsum(np.add.reduceat(weights.astype(np.float64), starts))
    target = fraction * sums[-1]
    group = _first_above(sums, target)
    running = np.cumsum(weights[group * GROUP : (group + 1) * GROUP], dtype=np.float64)
    return group * GROUP + _first_above(running, target - (sums[group - 1] if group else 0.0))


def _first_above(running: Doubles, target: float) -> int:
    # Rounding may leave the last sum a little short of the target.
    return min(int(np.searchsorted(running, target, side="right")), running.size - 1)


def _logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the chosen token and of up to `num_top` likeliest; none of probability 0."""
    peak = logits.max()
    log_whole = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    ranked = _rank(logits, num_top)[:num_top] if num_top else np.empty(0, np.intp)
    top_ids = ranked[logits[ranked] > -np.inf].tolist()
    return TokenLogprobs(
        logprob=float(logits[token_id]) - log_whole,
        top_ids=tuple(top_ids),
        top_logprobs=tuple(float(logits[top_id]) - log_whole for top_id in top_ids),
    )
