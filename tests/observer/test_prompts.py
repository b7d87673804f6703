from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.keys import extend_keys, root_key
from services.core.tokens import BYTES_PER_TOKEN, pack
from services.observer.prompts import MAX_BLOCKS, MAX_TIMES, PromptStore, ToldPrompt
from tests.observer.traffic import Traffic

SIZE = 4


def told(ids: list[int], *, tenant: str = "", first_token: int = 0, **changes: Any) -> ToldPrompt:
    root = root_key(model="m", block_tokens=SIZE, tenant=tenant)
    packed = pack(ids)
    return ToldPrompt(
        trace_id="t",
        span_id="s",
        prefix_keys=[root, *extend_keys(root, packed, SIZE)],
        first_token=first_token,
        token_ids=packed[first_token * BYTES_PER_TOKEN :],
        tenant=tenant,
        block_tokens=SIZE,
    )._replace(**changes)


def test_what_was_told_before_need_not_be_told_again() -> None:
    store = PromptStore()
    store.hear(told([*range(10)]), 1.0)
    store.hear(told([*range(8), 20, 21], first_token=8), 2.0)
    first, second = store.snapshot().kept

    assert first.token_ids.tolist() == [*range(10)]
    assert second.token_ids.tolist() == [*range(8), 20, 21]
    assert first.contents == second.contents
    assert second.is_whole


def test_the_same_tokens_of_another_tenant_have_the_same_content_and_other_keys() -> None:
    store = PromptStore()
    store.hear(told([*range(8)]), 1.0)
    store.hear(told([*range(8)], tenant="b"), 2.0)
    first, second = store.snapshot().kept

    assert first.contents == second.contents
    assert not set(first.prefix_keys) & set(second.prefix_keys)
    assert store.snapshot().kept[0].root != second.root


def test_of_blocks_that_were_never_told_nothing_is_made_up() -> None:
    store = PromptStore()
    store.hear(told([*range(12)], first_token=4), 1.0)
    [prompt] = store.snapshot().kept

    assert not prompt.is_whole
    assert prompt.token_ids.tolist() == []
    store.check_integrity()


def test_a_long_prompt_may_be_told_in_part() -> None:
    store = PromptStore()
    store.hear(told([*range(12)])._replace(token_ids=pack([*range(6)])), 1.0)
    [prompt] = store.snapshot().kept

    assert prompt.token_ids.tolist() == [0, 1, 2, 3]
    assert not prompt.is_whole


def test_an_eviction_is_remembered_with_its_latest_times() -> None:
    store = PromptStore(max_evictions=2)
    for second in range(6):
        store.hear_evictions("w1", [b"a"], second)
    store.hear_evictions("w2", [b"a", b"b"], 9.0)

    evictions = store.snapshot().evictions
    assert ("w1", b"a") not in evictions
    assert evictions["w2", b"b"] == (9.0,)
    store.hear_evictions("w2", [b"b"], 10.0)
    for second in range(MAX_TIMES):
        store.hear_evictions("w2", [b"b"], 11.0 + second)
    assert store.snapshot().evictions["w2", b"b"] == (11.0, 12.0, 13.0, 14.0)
    store.check_integrity()


def test_a_kv_store_that_is_cleared_does_not_push_out_what_workers_told() -> None:
    store = PromptStore(max_evictions=2)
    store.hear_evictions("w1", [b"a"], 1.0)
    store.hear_evictions("kv", [b"a", b"b", b"c"], 2.0, of_store=True)

    assert store.snapshot().evictions == {("w1", b"a"): (1.0,)}
    assert store.snapshot().store_evictions.keys() == {("kv", b"b"), ("kv", b"c")}
    store.check_integrity()


def test_of_a_very_long_prompt_the_head_is_kept() -> None:
    store = PromptStore()
    store.hear(told([*range(SIZE * (MAX_BLOCKS + 2) + 1)]), 1.0)
    [prompt] = store.snapshot().kept

    assert len(prompt.prefix_keys) == MAX_BLOCKS
    assert not prompt.is_whole
    store.check_integrity()


@pytest.mark.parametrize(
    "changes",
    [
        {"first_token": 3},
        {"first_token": 8},
        {"token_ids": b"abc"},
        {"prefix_keys": []},
        {"block_tokens": 0},
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any]) -> None:
    store = PromptStore()
    with pytest.raises(ValueError, match=r"prompt needs|first of a block|behind the blocks"):
        store.hear(told([1, 2, 3], **changes), 1.0)
    store.check_integrity()


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=30),
    st.integers(1, 6),
    st.integers(1_000, 6_000),
)
def test_the_newest_stay_within_bounds(
    prompts: list[list[int]], max_prompts: int, max_bytes: int
) -> None:
    store = PromptStore(max_prompts=max_prompts, max_bytes=max_bytes)
    for number, ids in enumerate(prompts):
        store.hear(told(ids), float(number))
        store.check_integrity()
    kept = store.snapshot().kept
    assert [each.token_ids.tolist() for each in kept] == prompts[len(prompts) - len(kept) :]
    assert store.snapshot().has_forgotten == (len(kept) < len(prompts))


def test_a_router_tells_each_block_once() -> None:
    traffic = Traffic(block_tokens=4)
    for number in range(5):
        traffic.ask([*range(40), 100 + number, 7])

    assert all(each.is_whole for each in traffic.prompts.kept)
    assert [each.token_ids.tolist()[40] for each in traffic.prompts.kept] == [*range(100, 105)]
