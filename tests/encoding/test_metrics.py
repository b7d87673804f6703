from __future__ import annotations

import asyncio

import pytest

from services.encoding.metrics import METRICS, CacheCounts, Counts


def values(counts: Counts) -> dict[str, float]:
    return {
        each.name.rpartition(".")[2]: each.value for each in counts.read(CacheCounts(5, 7, 900))
    }


def test_prompts_are_counted_when_they_are_encoded_and_when_they_are_not() -> None:
    counts = Counts()
    with counts.encoding():
        assert values(counts)["running"] == 1
        counts.encoded(12)
    with pytest.raises(ValueError, match="no"), counts.encoding():
        raise ValueError("no")
    with pytest.raises(asyncio.CancelledError), counts.encoding():
        raise asyncio.CancelledError
    assert values(counts) == {
        **{"prompts": 1, "tokens": 12, "failed": 2, "running": 0},
        **{"hit": 5, "miss": 7, "size": 900},
    }
    assert {each.name for each in counts.read(CacheCounts(5, 7, 900))} == {
        metric.name for metric in METRICS
    }
