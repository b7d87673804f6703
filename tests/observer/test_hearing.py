from __future__ import annotations

from typing import Any

import orjson
import pytest

from firsttoken.observer.v1 import observer_pb2
from services.core.errors import InvalidArgument
from services.observer.hearing import Teller, read_eviction, read_hops, read_prompt

TELLER = Teller("router-1", "router", "h", 7)


def told(attributes: dict[str, Any]) -> bytes:
    """A hop with these."""
    row = ["router.generate", "1" * 32, "2" * 16, "", "", True, 0, 0.5, None, [], [], [], ""]
    return orjson.dumps([[list(attributes)], [[*row, 0, list(attributes.values())]]])


@pytest.mark.parametrize("value", [{"a": {"b": [1] * 99}}, [[1]], None, 2**64 - 1, [2**63]])
def test_attributes_that_are_neither_values_nor_lists_of_them_are_left_out(value: Any) -> None:
    [hop] = read_hops(told({"odd": value, "list": ["a", 1], "text": "b"}), TELLER)

    assert hop.attributes == {"list": ["a", 1], "text": "b"}


def test_names_that_a_process_tells_beside_blocks_are_bounded() -> None:
    with pytest.raises(InvalidArgument, match="holder_id"):
        read_eviction(observer_pb2.Eviction(holder_id="w" * 100_000, prefix_keys=bytes(16)))
    assert len(read_prompt(observer_pb2.Prompt(tenant="t" * 100_000)).tenant) <= 200
