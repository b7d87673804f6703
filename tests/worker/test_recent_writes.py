from __future__ import annotations

import pytest

from worker.messages import StoredBlock
from worker.recent_writes import MAX_WRITES, RecentWrites

ROOT = b"root"
KEYS = (ROOT, *(f"key {index}".encode() for index in range(8)))


def blocks(first: int, last: int, name: str = "key") -> list[StoredBlock]:
    return [
        StoredBlock(f"{name} {index}".encode(), b"", index, 0, 0)
        for index in range(first, last + 1)
    ]


def overlap_s(writes: RecentWrites, *, first_index: int = 0) -> float:
    return writes.overlap_s(KEYS, first_index=first_index, since_s=10.0, until_s=20.0)


@pytest.mark.parametrize(
    ("began_s", "ended_s", "found_s"),
    [(11, 13, 2), (8, 11, 1), (19, 25, 1), (5, 30, 10), (7, 9, 0), (21, 22, 0)],
)
def test_what_overlaps_the_time_to_the_first_token_counts(
    began_s: float, ended_s: float, found_s: float
) -> None:
    writes = RecentWrites()
    writes.begin(blocks(0, 3), began_s).ended_s = ended_s

    assert overlap_s(writes) == found_s


def test_a_write_that_goes_on_counts_until_the_first_token() -> None:
    writes = RecentWrites()
    writes.begin(blocks(0, 1), 11).ended_s = 12
    writes.begin(blocks(2, 3), 16)

    assert overlap_s(writes) == 1 + 4


@pytest.mark.parametrize(
    ("written", "found_s"),
    [
        (blocks(0, 1), 0),  # cached, as far as this request is concerned
        (blocks(0, 2), 1),
        (blocks(2, 3), 1),
        (blocks(7, 7), 1),
        (blocks(7, 9), 1),  # an answer that goes on behind it
        (blocks(8, 9), 0),
        (blocks(0, 5, "other"), 0),
    ],
)
def test_only_writes_of_blocks_that_the_prompt_computed_count(
    written: list[StoredBlock], found_s: float
) -> None:
    writes = RecentWrites()
    writes.begin(written, 11).ended_s = 12

    assert overlap_s(writes, first_index=2) == found_s


def test_the_latest_writes_are_kept() -> None:
    writes = RecentWrites()
    for number in range(MAX_WRITES + 50):
        began_s = 10 + number / 100
        writes.begin(blocks(0, 0), began_s).ended_s = began_s + 0.01

    assert overlap_s(writes) == pytest.approx(MAX_WRITES / 100)
