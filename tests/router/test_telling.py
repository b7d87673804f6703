from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firsttoken.observer.v1 import observer_pb2
from router.prompt import Prompt
from router.telling import GENERATION_S, MAX_TOKENS, Telling
from services.core.keys import extend_keys, join_keys, root_key
from services.core.tokens import pack, unpack

SIZE = 8


def prompt(ids: list[int], *, tenant: str = "") -> Prompt:
    root = root_key(model="m", block_tokens=SIZE, tenant=tenant)
    packed = pack(ids)
    return Prompt(packed, join_keys([root, *extend_keys(root, packed, SIZE)]), SIZE)


def tell(telling: Telling, given: Prompt, now_s: float = 0.0) -> observer_pb2.Prompt:
    return telling.message(given, trace_id="ab" * 16, span_id="cd" * 8, tenant="ada", now_s=now_s)


def told_ids(message: observer_pb2.Prompt) -> list[int]:
    ids: list[int] = unpack(message.token_ids, field="token_ids").tolist()
    return ids


def test_blocks_are_told_once_and_what_is_behind_the_last_each_time() -> None:
    telling = Telling()
    first = tell(telling, prompt([*range(20)]))
    again = tell(telling, prompt([*range(16), 90, 91]))

    assert (first.first_token, told_ids(first)) == (0, [*range(20)])
    assert (again.first_token, told_ids(again)) == (16, [90, 91])
    assert (again.trace_id.hex(), again.span_id.hex(), again.tenant) == (
        "ab" * 16,
        "cd" * 8,
        "ada",
    )
    assert again.prefix_keys == prompt([*range(16)]).prefix_keys


def test_a_new_observer_is_told_everything() -> None:
    telling = Telling()
    telling.update_observers(["one"])
    tell(telling, prompt([*range(20)]))
    telling.update_observers(["one"])
    assert tell(telling, prompt([*range(20)])).first_token == 16
    telling.update_observers(["two"])
    assert tell(telling, prompt([*range(20)])).first_token == 0


def test_what_was_told_long_ago_is_told_again() -> None:
    telling = Telling()
    tell(telling, prompt([*range(20)]), 1.0)
    now_s = 2.0 + GENERATION_S
    assert tell(telling, prompt([*range(20)]), now_s).first_token == 16
    now_s += 1.0 + GENERATION_S
    assert tell(telling, prompt([*range(20)]), now_s).first_token == 0


def test_a_very_long_prompt_is_told_in_part_and_its_rest_the_next_time() -> None:
    telling = Telling()
    long = prompt([*range(MAX_TOKENS + 3 * SIZE)])
    assert len(told_ids(tell(telling, long))) == MAX_TOKENS
    assert told_ids(tell(telling, long)) == [*range(MAX_TOKENS, MAX_TOKENS + 3 * SIZE)]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=30))
def test_all_that_is_left_out_was_told(prompts: list[list[int]]) -> None:
    telling = Telling(max_keys=5)
    known: set[bytes] = set()
    for number, ids in enumerate(prompts):
        given = prompt(ids)
        message = tell(telling, given, float(number))
        telling.check_integrity()
        keys = [given.prefix_keys[at : at + 32] for at in range(32, len(given.prefix_keys), 32)]
        assert message.first_token % SIZE == 0
        assert set(keys[: message.first_token // SIZE]) <= known
        assert told_ids(message) == ids[message.first_token :]
        known |= set(keys)
