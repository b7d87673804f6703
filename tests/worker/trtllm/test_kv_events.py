from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.core.keys import extend_keys, root_key
from services.core.tokens import TokenArray, pack
from worker.engines.trtllm.kv_events import KvEvents, Submissions

# Two blocks of the engine are one of the mesh.
SIZE, PER_BLOCK = 4, 2
A = root_key(model="m", block_tokens=SIZE * PER_BLOCK, salt="a")
B = root_key(model="m", block_tokens=SIZE * PER_BLOCK, salt="b")


def ids(name: int, length: int = 16) -> TokenArray:
    return np.random.default_rng(name).integers(0, 1000, length).astype(np.uint32)


def keys(root: bytes, tokens: TokenArray) -> list[bytes]:
    return extend_keys(root, pack(tokens), SIZE * PER_BLOCK)


class Engine:
    """Writes down events as the engine does."""

    def __init__(self) -> None:
        self.submissions = Submissions(tokens_per_block=SIZE)
        self.events = KvEvents(self.submissions, tokens_per_block=SIZE, per_block=PER_BLOCK)
        self.next_id = 0

    def tell(self, data: dict[str, Any], **more: Any) -> tuple[list[bytes], list[bytes]]:
        """The keys stored, and those evicted."""
        event = {"event_id": self.next_id, "data": data, "window_size": 1024, **more}
        self.next_id += 1
        stored, evicted = self.events.apply(event)
        return [block.prefix_key for block in stored], evicted

    def store(
        self, salt: str, tokens: TokenArray, first: int = 0, last: int | None = None, **more: Any
    ) -> tuple[list[bytes], list[bytes]]:
        blocks = [
            {
                "block_hash": name(salt, tokens, index),
                "tokens": [
                    {"token_id": int(each), "token_extra_id": 0}
                    for each in tokens[index * SIZE : (index + 1) * SIZE]
                ],
            }
            for index in range(-(-len(tokens) // SIZE))
        ][first:last]
        parent = name(salt, tokens, first - 1) if first else None
        return self.tell({"type": "stored", "parent_hash": parent, "blocks": blocks}, **more)

    def remove(self, salt: str, tokens: TokenArray, index: int) -> tuple[list[bytes], list[bytes]]:
        return self.tell({"type": "removed", "block_hashes": [name(salt, tokens, index)]})


def name(salt: str, tokens: TokenArray, index: int) -> int:
    return hash((salt, tokens[: (index + 1) * SIZE].tobytes()))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_tokens_of_one_caller_become_its_keys(engine: Engine) -> None:
    engine.submissions.add(A, ids(1))

    assert engine.store("a", ids(1)) == (keys(A, ids(1)), [])
    assert engine.events.num_held(keys(A, ids(1))) == 2
    assert engine.events.num_held(keys(B, ids(1))) == 0


def test_a_block_is_held_only_with_all_its_parts(engine: Engine) -> None:
    engine.submissions.add(A, ids(1))

    assert engine.store("a", ids(1), 0, 3) == (keys(A, ids(1))[:1], [])
    assert engine.store("a", ids(1), 3) == (keys(A, ids(1))[1:], [])
    assert engine.remove("a", ids(1), 2) == ([], keys(A, ids(1))[1:])
    assert engine.remove("a", ids(1), 3) == ([], [])


def test_what_two_callers_sent_is_nobodys(engine: Engine) -> None:
    engine.submissions.add(A, ids(1))
    engine.submissions.add(B, ids(1))

    assert engine.store("a", ids(1)) == ([], [])
    assert engine.events.num_ambiguous == 4


def test_what_follows_tells_whose_the_beginning_is(engine: Engine) -> None:
    """Two callers with one system prompt, and questions of their own."""
    system = ids(1, 8)
    of_a, of_b = (np.concatenate([system, ids(each, 8)]) for each in (2, 3))
    engine.submissions.add(A, of_a)
    engine.submissions.add(B, of_b)

    assert engine.store("a", of_a, 0, 2) == ([], [])
    assert engine.store("a", of_a, 2) == (keys(A, of_a), [])
    assert engine.store("b", of_b) == (keys(B, of_b), [])


def test_an_answer_belongs_to_who_sent_its_prompt(engine: Engine) -> None:
    engine.submissions.add(A, ids(1)[:8])

    assert engine.store("a", ids(1))[0] == keys(A, ids(1))


def test_what_nobody_may_share_is_not_reported(engine: Engine) -> None:
    engine.submissions.add(b"", ids(1))

    assert engine.store("x", ids(1)) == ([], [])


def test_tokens_that_nobody_submitted_are_nobodys(engine: Engine) -> None:
    assert engine.store("a", ids(1)) == ([], [])


def test_a_gap_forgets_all(engine: Engine) -> None:
    engine.submissions.add(A, ids(1))
    engine.submissions.add(A, ids(2))
    engine.store("a", ids(1))
    engine.next_id += 1

    stored, evicted = engine.store("a", ids(2))
    assert sorted(evicted) == sorted(keys(A, ids(1)))
    assert stored == keys(A, ids(2))
    assert engine.events.num_gaps == 1
    # Its parent is not known any more.
    assert engine.store("a", ids(1), 2) == ([], [])


def test_partial_blocks_and_what_is_no_text_are_left_out(engine: Engine) -> None:
    engine.submissions.add(A, ids(1, 18))
    with_image = {
        "block_hash": 1,
        "tokens": [{"token_id": int(each), "token_extra_id": 9} for each in ids(1)[:SIZE]],
    }

    data = {"type": "stored", "parent_hash": None, "blocks": [with_image]}
    assert engine.tell(data) == ([], [])
    assert engine.store("a", ids(1, 18))[0] == keys(A, ids(1, 18))
    assert engine.events.num_keys == 2


def test_only_the_largest_window_counts(engine: Engine) -> None:
    engine.submissions.add(A, ids(1))
    small = engine.store("a", ids(1), window_size=128)
    large = engine.store("a", ids(1), window_size=1024)

    assert small == (keys(A, ids(1)), [])
    assert (large[0], sorted(large[1])) == (keys(A, ids(1)), sorted(keys(A, ids(1))))
    data = {"type": "removed", "block_hashes": [name("a", ids(1), 0)]}
    assert engine.tell(data, window_size=128) == ([], [])


@pytest.mark.parametrize(
    "data",
    [
        {"type": "created", "num_blocks_per_cache_level": [10, 0]},
        {"type": "updated", "block_hash": 1, "cache_level": {"new": 1, "old": 0}},
        {"type": "removed", "block_hashes": [1]},
    ],
)
def test_other_events_change_nothing(engine: Engine, data: dict[str, Any]) -> None:
    assert engine.tell(data) == ([], [])


def test_submissions_are_forgotten_in_time() -> None:
    submissions = Submissions(tokens_per_block=SIZE, most=2)
    for each in (1, 2, 3):
        submissions.add(A, ids(each))
    events = KvEvents(submissions, tokens_per_block=SIZE, per_block=PER_BLOCK)

    assert len(submissions._latest) == 2
    assert len(submissions._roots) == 8
    assert events.num_held(keys(A, ids(1))) == 0
