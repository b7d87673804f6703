from __future__ import annotations

from typing import Any

import orjson
import pytest

from services.observer.hearing import Teller, read_hops

TELLER = Teller("router-1", "router", "h", 7)


def told(attributes: dict[str, Any]) -> bytes:
    """A hop with these."""
    row = ["router.generate", "1" * 32, "2" * 16, "", "", True, 0, 0.5, None, [], [], [], ""]
    return orjson.dumps([[list(attributes)], [[*row, 0, list(attributes.values())]]])


@pytest.mark.parametrize("value", [{"a": {"b": [1] * 99}}, [[1]], None])
def test_attributes_that_are_neither_values_nor_lists_of_them_are_left_out(value: Any) -> None:
    [hop] = read_hops(told({"odd": value, "list": ["a", 1], "text": "b"}), TELLER)

    assert hop.attributes == {"list": ["a", 1], "text": "b"}
