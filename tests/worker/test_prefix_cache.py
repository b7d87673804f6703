from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.keys import extend_keys
from services.core.sampling import Sampling
from services.core.tokens import pack
from tests.worker.steps import BLOCK_TOKENS, INFO, ROOT, Steps, prompt
from worker.messages import Compute, Source, Submit
from worker.prefix_cache import TokenNames
from worker.sequence import Sequence

BOTH_KINDS = pytest.mark.parametrize("paged", [True, False])


def steps_of(*, paged: bool, **more: int) -> Steps:
    return Steps(INFO._replace(kv_in_pool=paged), **more)


def after(shared: int, name: int, length: int = 10) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """A prompt of `length` tokens behind `shared` that others have too."""
    return np.concatenate([prompt(1, shared), prompt(name, length)])


def test_running_requests_hold_a_shared_prefix_once() -> None:
    steps = steps_of(paged=True)
    steps.add(0, prompt(1, 80))
    steps.run()

    for request_id in (1, 2, 3):
        steps.add(request_id, after(80, 10 + request_id), most=30)
    for _ in range(6):
        steps.step()

    # 80 + 10 + 30 tokens each, of which 80 are the same.
    assert steps.pool.num_pinned + steps.pool.num_reserved == 10 + 3 * 5
    assert all(steps.evaluated[request_id] == 10 for request_id in (1, 2, 3))


def test_the_room_for_a_block_becomes_the_block() -> None:
    steps = steps_of(paged=True)
    steps.add(1, prompt(1, 40), most=24)
    held = []
    while not steps.scheduler.idle:
        steps.step()
        held.append(steps.pool.num_pinned + steps.pool.num_reserved)

    assert set(held[:-1]) == {8}
    assert held[-1] == 0
    # The last token has no KV.
    assert steps.pool.num_cached == 7


def test_a_block_can_be_hit_as_soon_as_it_is_complete() -> None:
    steps = steps_of(paged=True)
    steps.add(1, prompt(1, 80))
    steps.step()

    assert steps.pool.num_cached == 2


@BOTH_KINDS
def test_a_prompt_that_is_being_computed_is_not_computed_twice(paged: bool) -> None:
    steps = steps_of(paged=paged)
    steps.add(1, after(80, 2))
    steps.add(2, after(80, 3))
    steps.add(3, after(80, 4))
    steps.run()

    assert steps.evaluated == {1: 90, 2: 10, 3: 10}


@BOTH_KINDS
def test_others_go_past_one_that_waits_for_blocks(paged: bool) -> None:
    steps = steps_of(paged=paged)
    steps.add(1, after(80, 2))
    steps.step()
    steps.add(2, after(80, 3))
    steps.add(3, prompt(9, 8))

    assert sorted(steps.step()) == [1, 3]
    steps.run()
    assert steps.evaluated == {1: 90, 2: 10, 3: 8}


@BOTH_KINDS
def test_when_the_first_is_cancelled_the_second_goes_on_by_itself(paged: bool) -> None:
    steps = steps_of(paged=paged)
    steps.add(1, after(80, 2))
    steps.add(2, after(80, 3))
    steps.add(3, after(80, 4))
    steps.step()
    steps.end(1)
    steps.run()

    computed = 16 if paged else 0  # before that, and cached
    assert steps.evaluated == {1: 16, 2: 90 - computed, 3: 10}


def test_a_part_that_is_waited_for_is_kept_before_the_prompt_is_done() -> None:
    steps = steps_of(paged=False)
    steps.add(1, after(40, 2, 400))
    steps.step()
    steps.add(2, after(40, 3))
    steps.run()

    assert steps.evaluated == {1: 440, 2: 10}
    assert steps.first_s[2] < steps.first_s[1]


@BOTH_KINDS
def test_what_is_computed_for_another_worker_is_shared_too(paged: bool) -> None:
    steps = steps_of(paged=paged)
    steps.add(1, after(80, 2), export_from=0)
    steps.add(2, after(80, 3))
    steps.run()

    assert steps.evaluated == {1: 90, 2: 10}


@BOTH_KINDS
def test_one_that_was_held_for_a_load_waits_as_well(paged: bool) -> None:
    steps = steps_of(paged=paged)
    steps.add(2, after(80, 3), source=Source.HOLD)
    steps.step()
    steps.add(1, after(80, 2))
    steps.step()
    held = steps.scheduler.find(2)
    assert held is not None
    assert held.started
    held.advise(Compute(2))
    steps.run()

    assert steps.evaluated == {1: 90, 2: 10}


def test_one_that_is_held_keeps_nobody_waiting() -> None:
    steps = steps_of(paged=True)
    steps.add(1, after(80, 2), source=Source.HOLD)
    steps.step()
    steps.add(2, after(80, 3))

    assert steps.step() == [2]


def test_whoever_is_waited_for_is_as_urgent_as_who_waits() -> None:
    steps = steps_of(paged=True)
    steps.add(1, after(80, 2), batch_class=True)
    steps.step()
    steps.add(2, prompt(9, 200))
    steps.step()
    steps.add(3, after(80, 3))

    assert steps.step() == [1]
    steps.run()
    assert steps.first_s[3] < steps.first_s[2]


@BOTH_KINDS
def test_what_is_still_to_be_computed_counts_once(paged: bool) -> None:
    steps = steps_of(paged=paged)
    steps.add(1, after(80, 2))
    steps.step()
    steps.add(2, after(80, 3))
    steps.add(3, prompt(9, 20))

    assert steps.scheduler.num_queued_tokens == (90 - 16) + 10 + 20
    steps.run()
    assert steps.scheduler.num_queued_tokens == 0
    steps.add(4, after(80, 4))
    assert steps.scheduler.num_queued_tokens == 10


def test_blocks_of_prompt_and_answer_are_named_as_one_chain() -> None:
    tokens = np.arange(45, dtype=np.uint32)
    keys = (ROOT, *extend_keys(ROOT, pack(tokens), BLOCK_TOKENS))
    expected = keys[1:]
    # The tokenizer names the prompt's blocks; those of the answer follow.
    sequence = Sequence.of(
        Submit(1, tokens[:20], keys[:3], Sampling(max_tokens=50), False, 0.0, (20, 21))
    )
    sequence.answer += range(22, 45)
    name = TokenNames(INFO)
    name(sequence, 3)
    name(sequence, 5)

    assert [block.prefix_key for block in sequence.chain] == list(expected)


def test_a_request_without_keys_shares_nothing() -> None:
    steps = steps_of(paged=True)
    sampling = Sampling(max_tokens=4)
    steps.scheduler.add(Submit(1, prompt(1, 40), (), sampling, False, 0.0))
    steps.step()
    steps.scheduler.add(Submit(2, prompt(1, 40), (), sampling, False, 0.0))
    steps.run()

    assert steps.evaluated == {1: 40, 2: 40}
    assert steps.pool.num_cached == 0


arrivals = st.tuples(
    st.integers(0, 3),  # steps before it
    st.integers(1, 3),  # which prefix
    st.integers(0, 5),  # how many blocks of it
    st.integers(1, 20),  # own tokens
    st.integers(1, 20),  # answer
    st.sampled_from([None, None, 0, 2]),  # cancelled after so many steps
    st.sampled_from([Source.COMPUTE, Source.COMPUTE, Source.HOLD]),
)


@given(st.lists(arrivals, max_size=12), st.booleans(), st.integers(10, 30))
def test_every_request_ends_whoever_waits_for_whom(
    requests: list[tuple[int, int, int, int, int, int | None, Source]],
    paged: bool,
    num_blocks: int,
) -> None:
    info = INFO._replace(kv_in_pool=paged, num_blocks=num_blocks, num_slots=3)
    steps = Steps(info._replace(max_context_tokens=num_blocks * BLOCK_TOKENS))
    cancels: dict[int, int] = {}
    number = 0
    for request_id, (wait, prefix, blocks, own, most, cancel, source) in enumerate(requests):
        for _ in range(wait):
            _step(steps, cancels, number)
            number += 1
        tokens = np.concatenate(
            [prompt(prefix, blocks * BLOCK_TOKENS), prompt(100 + request_id, own)]
        )
        steps.add(request_id, tokens, most=most, source=source)
        if cancel is not None:
            cancels[request_id] = number + cancel
    for _ in range(1000):
        if steps.scheduler.idle:
            break
        _step(steps, cancels, number)
        number += 1

    assert steps.ended_s.keys() == set(range(len(requests)))
    assert steps.pool.num_pinned == steps.pool.num_reserved == 0


def _step(steps: Steps, cancels: dict[int, int], number: int) -> None:
    for request_id, at in list(cancels.items()):
        if at == number:
            steps.end(request_id)
            del cancels[request_id]
    for sequence in steps.scheduler.running():
        sequence.advise(Compute(sequence.request_id))
    steps.step()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 8), st.integers(0, 2)), max_size=10))
def test_with_room_for_all_no_block_is_ever_computed_twice(
    requests: list[tuple[int, int, int]],
) -> None:
    steps = Steps(INFO._replace(num_blocks=500))
    for request_id, (prefix, blocks, wait) in enumerate(requests):
        shared = prompt(prefix, blocks * BLOCK_TOKENS)
        steps.add(request_id, np.concatenate([shared, prompt(100 + request_id, 11)]))
        for _ in range(wait):
            steps.step()
    steps.run()

    assert set(steps.times_computed.values()) <= {1}
