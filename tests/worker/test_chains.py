from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.chains import Chain, Chains


def keys(name: str, length: int) -> list[bytes]:
    return [f"{name}{place}".encode() for place in range(length)]


def test_a_chain_is_found_from_any_of_its_blocks() -> None:
    chains = Chains(10)
    chains.add(keys("a", 3), "tenant")

    assert chains.find(b"a2") == Chain(keys("a", 3), "tenant")
    assert chains.find(b"a0") == Chain([b"a0"], "tenant")


def test_the_blocks_of_an_answer_belong_to_the_tenant_of_the_prompt() -> None:
    chains = Chains(10)
    chains.add(keys("a", 2), "tenant")
    chains.append(b"a2", b"a1")

    assert chains.find(b"a2") == Chain(keys("a", 3), "tenant")


def test_a_block_that_follows_an_unknown_one_is_not_known() -> None:
    chains = Chains(10)
    chains.append(b"a2", b"a1")

    assert chains.find(b"a2") is None
    assert len(chains) == 0


def test_the_chain_heard_of_longest_ago_is_forgotten_from_its_tail() -> None:
    chains = Chains(4)
    chains.add(keys("old", 3), "")
    chains.add(keys("new", 2), "")

    assert chains.find(b"old1") == Chain(keys("old", 2), "")
    assert chains.find(b"old2") is None
    assert chains.find(b"new1") == Chain(keys("new", 2), "")


def test_a_longer_chain_than_there_is_room_for_keeps_its_head() -> None:
    chains = Chains(4)
    chains.add(keys("a", 9), "")

    assert chains.find(b"a3") == Chain(keys("a", 4), "")
    assert chains.find(b"a4") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 8)), max_size=20))
def test_what_is_found_is_whole_and_bounded(added: list[tuple[str, int]]) -> None:
    chains = Chains(6)
    for name, length in added:
        chains.add(keys(name, length), name)

        assert len(chains) <= 6
        for tenant in "abc":
            for place, key in enumerate(keys(tenant, 8)):
                found = chains.find(key)
                assert found is None or found == Chain(keys(tenant, place + 1), tenant)
