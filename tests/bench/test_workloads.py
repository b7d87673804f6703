from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.workload_traces import read_trace
from services.bench.workloads import (
    MADE_IDS,
    Chats,
    SharedPrefix,
    change,
    make,
    rate_of,
    token_ids,
)


def test_shared_prefixes_are_asked_for_by_zipf_at_poisson_times() -> None:
    load = SharedPrefix(num_requests=4_000, rate_per_s=50.0)
    arrivals = list(make(load).arrivals)
    counts = Counter(arrival.chain[:62] for arrival in arrivals).most_common()
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(arrivals)]
    mean_s = sum(gaps) / len(gaps)

    assert {len(arrival.chain) for arrival in arrivals} == {64}
    assert {(each.prompt_tokens, each.output_tokens) for each in arrivals} == {(4_128, 32)}
    assert len({arrival.chain for arrival in arrivals}) == 4_000
    harmonic = sum(1 / rank for rank in range(1, 65))
    assert counts[0][1] == pytest.approx(4_000 / harmonic, rel=0.1)
    assert len(counts) == 64
    assert mean_s == pytest.approx(1 / 50, rel=0.05)
    # Of exponential gaps, the mean and the spread are equal.
    assert sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps) == pytest.approx(
        mean_s**2, rel=0.15
    )


def test_chats_share_nothing() -> None:
    arrivals = list(make(Chats(num_requests=300)).arrivals)
    keys = [key for arrival in arrivals for key in arrival.chain]

    assert len(keys) == len(set(keys)) > 300
    assert {50 <= arrival.prompt_tokens <= 300 for arrival in arrivals} == {True}


def test_the_same_seed_makes_the_same_load() -> None:
    for load in (SharedPrefix(num_requests=50), Chats(num_requests=50)):
        workload = make(load)
        assert list(workload.arrivals) == list(workload.arrivals)
    other = make(SharedPrefix(num_requests=50, seed=1))
    assert list(other.arrivals) != list(make(SharedPrefix(num_requests=50)).arrivals)


def test_a_trace_is_cut_and_brought_to_a_rate() -> None:
    trace = read_trace("mooncake")
    changed = change(trace, num_requests=100, rate_per_s=10.0)
    arrivals = list(changed.arrivals)

    assert changed.num_requests == len(arrivals) == 100
    assert rate_of(changed) == pytest.approx(10.0)
    assert [each.chain for each in arrivals] == [
        each.chain for each in itertools.islice(trace.arrivals, 100)
    ]
    assert change(trace, num_requests=10**9).num_requests == trace.num_requests


@given(st.integers(1, 64), st.integers(0, 15))
def test_ids_of_a_prompt_agree_exactly_as_far_as_the_chains_do(num_blocks: int, rest: int) -> None:
    [first, second, *_] = make(SharedPrefix(num_requests=2, num_prefixes=1)).arrivals
    arrivals = [
        each._replace(chain=each.chain[:num_blocks], prompt_tokens=num_blocks * 16 + rest)
        for each in (first, second)
    ]
    ids = [token_ids(each, number, 16) for number, each in enumerate(arrivals)]

    assert [len(each) for each in ids] == [arrivals[0].prompt_tokens] * 2
    assert all(token in MADE_IDS for each in ids for token in each)
    same = sum(a == b for a, b in zip(arrivals[0].chain, arrivals[1].chain, strict=True))
    assert ids[0][: same * 16] == ids[1][: same * 16]
    assert (ids[0] == ids[1]) == (same == num_blocks and not rest)
