from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.sampling import Sampling
from worker.engines.contract import Logits
from worker.philox import philox4x32, uniform
from worker.sampling import Row, sample

NO_IDS = np.empty(0, np.uint32)


def logits_of(seed: int, num_rows: int, width: int, *, spread: float = 3.0) -> Logits:
    """Rounded, so that equal logits are common."""
    values = np.random.default_rng(seed).normal(scale=spread, size=(num_rows, width))
    return values.round(1).astype(np.float32)


def row_of(prompt: int = 0, answer: tuple[int, ...] = (), **sampling: Any) -> Row:
    return Row(Sampling(**sampling), np.arange(prompt, dtype=np.uint32), answer)


def reference_kept(logits: Logits, sampling: Sampling) -> dict[int, float]:
    """Ids that may be drawn and their weights, likeliest first, straight from the definitions."""
    scaled = (logits - logits.max()) / np.float32(sampling.temperature)
    weights = dict(enumerate(np.exp(scaled).tolist()))
    ranked = sorted(weights, key=lambda token_id: (-logits[token_id], token_id))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    enough = sampling.top_p * math.fsum(weights[token_id] for token_id in ranked)
    kept: dict[int, float] = {}
    mass = 0.0
    for token_id in ranked:
        if mass >= enough and sampling.top_p < 1:
            break
        mass += weights[token_id]
        if weights[token_id] >= np.float32(sampling.min_p):
            kept[token_id] = weights[token_id]
    return kept


def reference_token(logits: Logits, sampling: Sampling, fraction: float) -> int:
    kept = reference_kept(logits, sampling)
    # Without truncation nothing is ranked: the order is that of the ids.
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        kept = dict(sorted(kept.items()))
    target = fraction * math.fsum(kept.values())
    running = accumulate(kept.values())
    return next(token_id for token_id, mass in zip(kept, running, strict=True) if mass > target)


def extreme_seeds() -> tuple[int, int]:
    """Of many seeds, those that draw nearest to 0 and to 1 for a first token."""
    seeds = np.arange(1 << 18, dtype=np.uint64)
    fractions = uniform(seeds, np.zeros_like(seeds))
    return int(fractions.argmin()), int(fractions.argmax())


LIKELIEST, LEAST_LIKELY = extreme_seeds()

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 300]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.sampled_from([LIKELIEST, LEAST_LIKELY]) | st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logprobs=st.sampled_from([None, 0, 4]),
)
rows = st.builds(
    Row.of,
    samplings,
    st.lists(st.integers(0, 6000), max_size=8).map(lambda ids: np.array(ids, np.uint32)),
    st.lists(st.integers(0, 6000), max_size=8),
)


# --- random numbers


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Of the authors' own known-answer tests (Random123, kat_vectors).
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    def column(words: str) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        return np.array([[int(word, 16)] for word in words.split()], np.uint64)

    assert (philox4x32(column(counter), column(key)) == column(expected)).all()


def test_uniform_numbers_use_all_of_seed_and_position() -> None:
    bits = [1 << bit for bit in range(64)]
    seeds = np.array([0, *bits, *[0] * 64], np.uint64)
    positions = np.array([0, *[0] * 64, *bits], np.uint64)
    numbers = uniform(seeds, positions)

    assert len(set(numbers.tolist())) == 129
    assert ((numbers >= 0) & (numbers < 1)).all()


# --- one row


@given(st.integers(0, 10**6), st.sampled_from([1, 7, 200, 1000, 5000]), samplings)
def test_a_draw_is_the_reference_draw(seed: int, width: int, sampling: Sampling) -> None:
    sampling = sampling._replace(
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )
    logits = logits_of(seed, 1, width)
    (sampled,) = sample(logits, [Row(sampling, NO_IDS, ())])
    if sampling.temperature == 0:
        assert sampled.token_id == int(logits[0].argmax())
        return
    (fraction,) = uniform(np.array([sampling.seed], np.uint64), np.zeros(1, np.uint64))

    assert sampled.token_id == reference_token(logits[0], sampling, fraction)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=5.0, top_p=0.5),
        Sampling(temperature=5.0, top_p=0.99),
        Sampling(temperature=5.0, min_p=0.05),
        Sampling(temperature=5.0, top_k=400),
        Sampling(temperature=5.0, top_k=3000),
        Sampling(temperature=5.0, top_k=3000, top_p=0.999, min_p=0.01),
    ],
)
def test_many_candidates_are_kept_as_exactly_as_few(sampling: Sampling) -> None:
    logits = logits_of(5, 1, 5000)
    kept = list(reference_kept(logits[0], sampling))
    first, last = (
        sample(logits, [Row(sampling._replace(seed=seed), NO_IDS, ())])[0].token_id
        for seed in (LIKELIEST, LEAST_LIKELY)
    )

    assert len(kept) > 300
    assert (first, last) == (kept[0], kept[-1])


@pytest.mark.parametrize("width", [4096, 4097, 4160, 9999])
def test_all_of_a_wide_vocabulary_can_be_drawn(width: int) -> None:
    logits = logits_of(3, 1, width, spread=0.5)
    seeds = [LIKELIEST, LEAST_LIKELY, *range(20)]
    for seed in seeds:
        sampling = Sampling(temperature=1.0, seed=seed)
        (fraction,) = uniform(np.array([seed], np.uint64), np.zeros(1, np.uint64))
        (sampled,) = sample(logits, [Row(sampling, NO_IDS, ())])
        assert sampled.token_id == reference_token(logits[0], sampling, fraction)


def test_draws_follow_the_distribution() -> None:
    logits = logits_of(1, 1, 12, spread=1.0)
    num_draws = 20_000
    rows = [Row(Sampling(temperature=0.8, seed=99), NO_IDS, range(n)) for n in range(num_draws)]
    drawn = sample(np.repeat(logits, num_draws, axis=0), rows)
    counts = np.bincount([sampled.token_id for sampled in drawn], minlength=12)
    weights = np.exp(logits[0].astype(np.float64) / 0.8)
    expected = num_draws * weights / weights.sum()
    chi_square = (((counts - expected) ** 2) / expected).sum()

    # 11 degrees of freedom: 1 in 1000 lies above.
    assert chi_square < 31.26


def test_equal_logits_rank_by_id() -> None:
    logits = np.zeros((1, 3000), np.float32)
    drawn = {
        sample(logits, [row_of(temperature=1.0, top_k=3, seed=seed)])[0].token_id
        for seed in range(60)
    }

    assert drawn == {0, 1, 2}


def test_ids_of_probability_0_are_never_drawn() -> None:
    logits = np.full((1, 1000), -np.inf, np.float32)
    logits[0, [3, 998]] = 1.0
    rows = [
        row_of(temperature=100.0, seed=seed, **truncation)
        for seed in range(40)
        for truncation in ({}, {"top_k": 5}, {"top_p": 0.99})
    ]
    drawn = {sampled.token_id for sampled in sample(np.repeat(logits, len(rows), axis=0), rows)}

    assert drawn == {3, 998}


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = np.array([[1.0, -np.inf, 3.0, 2.999]], np.float32)

    assert sample(logits, [row_of(temperature=temperature, seed=1)])[0].token_id == 2


def test_a_temperature_asks_for_a_seed() -> None:
    with pytest.raises(ValueError, match="seed"):
        sample(np.zeros((1, 4), np.float32), [row_of(temperature=1.0)])


# --- independence


@given(
    st.integers(0, 10**6), st.sampled_from([64, 512, 5000]), st.lists(rows, min_size=1, max_size=6)
)
def test_a_row_does_not_depend_on_the_others(seed: int, width: int, rows: list[Row]) -> None:
    logits = logits_of(seed, len(rows), width)
    together = sample(logits, rows)
    alone = [sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    backwards = sample(logits[::-1].copy(), rows[::-1])[::-1]

    assert together == alone == backwards


@given(st.integers(0, 10**6), rows)
def test_an_answer_goes_on_the_same_as_a_longer_prompt(seed: int, row: Row) -> None:
    """Without answer penalties, prompt and answer are one sequence: a move changes nothing."""
    sampling = row.sampling._replace(presence_penalty=0.0, frequency_penalty=0.0)
    logits = logits_of(seed, 1, 512)
    joined = np.concatenate((row.prompt_ids, np.array(row.answer_ids, np.uint32)))

    assert sample(logits, [Row(sampling, row.prompt_ids, row.answer_ids)]) == sample(
        logits, [Row(sampling, joined, ())]
    )


@given(st.integers(0, 10**6), st.lists(rows, max_size=4))
def test_the_logits_are_not_written_to(seed: int, rows: list[Row]) -> None:
    logits = logits_of(seed, len(rows), 512)
    logits.flags.writeable = False

    assert len(sample(logits, rows)) == len(rows)


# --- penalties


@pytest.mark.parametrize(
    ("row", "token_id"),
    [
        (row_of(), 0),
        # 4.0 / 2 falls below 3.0; a seen negative logit falls as well, by multiplying.
        (row_of(prompt=1, repetition_penalty=2.0), 1),
        (row_of(answer=(0,), repetition_penalty=2.0), 1),
        (row_of(answer=(0, 0, 1), repetition_penalty=2.0), 2),
        (row_of(prompt=1, presence_penalty=2.0), 0),
        (row_of(answer=(0, 0, 0), presence_penalty=0.9), 0),
        (row_of(answer=(0,), presence_penalty=1.1), 1),
        (row_of(answer=(0,), frequency_penalty=0.6), 0),
        (row_of(answer=(0, 0), frequency_penalty=0.6), 1),
        (row_of(answer=(3,) * 9, frequency_penalty=-2.0), 3),
        # Ids beyond the width have no logit to change.
        (row_of(prompt=1, answer=(9, 9), repetition_penalty=2.0, frequency_penalty=2.0), 1),
    ],
)
def test_penalties_shift_the_choice(row: Row, token_id: int) -> None:
    logits = np.array([[4.0, 3.0, 2.5, -1.0]], np.float32)

    assert sample(logits, [row])[0].token_id == token_id


def test_a_repetition_penalty_lowers_negative_logits() -> None:
    logits = np.array([[-1.0, -1.5]], np.float32)

    assert sample(logits, [row_of(prompt=1, repetition_penalty=2.0)])[0].token_id == 1


@pytest.mark.parametrize("penalty", [1e-300, 1e-40])
def test_a_tiny_repetition_penalty_overflows_nothing(penalty: float) -> None:
    logits = np.array([[4.0, 3.0, 5.0]], np.float32)

    assert sample(logits, [row_of(prompt=2, repetition_penalty=penalty)])[0].token_id == 0


# --- log-probabilities


def test_logprobs_are_those_of_the_model_itself() -> None:
    logits = logits_of(2, 1, 400)
    exact = logits[0].astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    row = row_of(prompt=50, temperature=3.0, seed=4, top_k=9, repetition_penalty=1.5, logprobs=20)
    token_id, logprobs = sample(logits, [row])[0]

    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(exact[token_id], abs=1e-5)
    best = sorted(range(400), key=lambda i: (-logits[0, i], i))[:20]
    assert list(logprobs.top_ids) == best
    assert logprobs.top_logprobs == pytest.approx(exact[best], abs=1e-5)


@pytest.mark.parametrize(("num_top", "top_ids"), [(None, None), (0, ()), (1, (2,)), (9, (2, 0))])
def test_as_many_alternatives_as_asked_for_and_possible(
    num_top: int | None, top_ids: tuple[int, ...] | None
) -> None:
    logits = np.array([[1.0, -np.inf, 2.0, -np.inf]], np.float32)
    (sampled,) = sample(logits, [row_of(logprobs=num_top)])

    assert (sampled.logprobs and sampled.logprobs.top_ids) == top_ids
