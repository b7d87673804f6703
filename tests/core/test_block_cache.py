from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.core.block_cache import Cache


def chain(path: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(bytes(path[: end + 1]) for end in range(len(path)))


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30),
    st.one_of(st.none(), st.integers(1, 12)),
)
def test_a_block_never_outlives_those_before_it(
    paths: list[list[int]], num_blocks: int | None
) -> None:
    cache = Cache(num_blocks)
    for path in paths:
        cache.use(chain(path))
        cache.check_integrity()
        for other in paths:
            keys = chain(other)
            found = [cache.match(keys[: end + 1]) == end + 1 for end in range(len(keys))]
            assert found == sorted(found, reverse=True)
            assert cache.match(keys) == sum(found)
        if num_blocks is None or len(path) <= num_blocks:
            assert cache.match(chain(path)) == len(path)
