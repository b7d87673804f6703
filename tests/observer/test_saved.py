"""A window as a file: it comes back as it was, and what is wrong with it is said with its place."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import InvalidArgument
from services.core.ledger import Segment
from services.observer.doctor import Clues, VolatileSpan
from services.observer.model import BubbleSum, Generation, Member, Part, Reading, Window
from services.observer.saved import dump, load
from tests.observer.made import a_hop, a_request


def a_window(**changes: Any) -> Window:
    hop = a_hop(parts=(Part(Segment.QUEUE, 0.0, 0.01),), attributes={"firsttoken.generation": 3})
    fields: dict[str, Any] = {
        "begin_unix_s": 1.5,
        "end_unix_s": 61.5,
        "requests": (a_request(hops=(hop,)), a_request(ttft_s=None, error="WORKER_DIED")),
        "readings": (Reading(2.0, "w", "worker", "a.metric", (("quantile", "0.99"),), 0.5),),
        "bubbles": (BubbleSum(3.0, "w", "kv_load", 0.25),),
        "members": (Member("w", "worker", "ready", "h:1", "h", 3, ""),),
        "generations": (Generation(3, 1.0, {"router.max_queue": (1024, 2048)}),),
        "config": {"router.max_queue": 2048, "worker.kv_type": "bf16"},
        "num_dropped": 4,
    }
    return Window(**{**fields, **changes})


CLUES = Clues(
    spans=(VolatileSpan(description="a time stamp", trace_ids=("t",), tokens=64),),
    evicted_tokens={"t": 128},
)


def lines(**changes: Any) -> list[bytes]:
    return list(dump(a_window(**changes), CLUES))


def problem(data: list[bytes]) -> str:
    with pytest.raises(InvalidArgument) as caught:
        load(data, "w.jsonl")
    return caught.value.message


def test_a_window_comes_back_as_it_was() -> None:
    saved = load(lines(), "w.jsonl")
    assert saved.window == a_window()
    assert saved.clues == CLUES
    assert load(dump(a_window()), "w.jsonl").clues == Clues()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.builds(
            a_request,
            ttft_s=st.none() | st.floats(0, 100),
            tpot_s=st.none() | st.floats(0, 100),
            tenant=st.text(max_size=8),
            error=st.text(max_size=8),
            predicted_tokens=st.none() | st.integers(0, 1 << 20),
            hidden_s=st.dictionaries(st.text(max_size=5), st.floats(0, 9), max_size=3),
        ),
        max_size=5,
    )
)
def test_whatever_was_seen_comes_back(requests: list[Any]) -> None:
    window = a_window(requests=tuple(requests))
    assert load(dump(window), "w.jsonl").window == window


def changed(place: int, /, **fields: Any) -> list[bytes]:
    """The line of this number, with other fields; None: without the field."""
    data = lines()
    line = {**json.loads(data[place - 1]), **fields}
    data[place - 1] = json.dumps({k: v for k, v in line.items() if v != "absent"}).encode()
    return data


@pytest.mark.parametrize(
    ("number", "fields", "said"),
    [
        (1, {"program": "other"}, "line 1: kind: give a file"),
        (1, {"format": 2}, "line 1: format: this firsttoken reads format 1; the file has 2"),
        (1, {"end_unix_s": 0.0}, "line 1: end_unix_s: must not be before"),
        (1, {"config": []}, "line 1: config: must be an object; got []"),
        (
            1,
            {"config": {"worker.num_slots": "8"}},
            "line 1: config.worker.num_slots: must be a whole number; got '8'",
        ),
        (3, {"kind": "plan"}, "line 3: kind: must be one of request, reading"),
        (3, {"number": "3"}, "line 3: number: must be a whole number; got '3'"),
        (3, {"changes": {"a": [1]}}, "line 3: changes.a: must have 2 items; got [1]"),
        (4, {"role": 5}, "line 4: role: must be a text; got 5"),
        (4, {"role": "absent"}, "line 4: role: is missing"),
        (6, {"value": True}, "line 6: value: must be a number; got True"),
        (7, {"hops": {}}, "line 7: hops: must be a list; got {}"),
        (7, {"hops": [{}]}, "line 7: hops[0].name: is missing"),
        (7, {"spent_s": {"nap": 1}}, "line 7: spent_s: must be one of queue"),
        (7, {"handed_off": 1}, "line 7: handed_off: must be true or false; got 1"),
    ],
)
def test_what_is_wrong_is_said_with_line_and_field(
    number: int, fields: dict[str, Any], said: str
) -> None:
    assert said in problem(changed(number, **fields))


def test_what_is_no_window_is_refused() -> None:
    assert "is empty" in problem([])
    assert "line 1: is no JSON" in problem([b"hello"])
    assert "line 1: is no JSON object" in problem([b"[]"])
    assert "line 1: kind" in problem([b"{}"])
    assert "line 2: is no JSON" in problem([lines()[0], b'{"kind": "req'])
    deep = b'{"kind": ' + 1000 * b"[" + 1000 * b"]" + b"}"
    assert "line 2: kind: must be one of request" in problem([lines()[0], deep])


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.sampled_from([0, "", [], {}, None, 1e400, "x" * 99]), st.data())
def test_no_value_makes_it_fail_otherwise(number: int, value: Any, data: st.DataObject) -> None:
    line = json.loads(lines()[number - 1])
    field = data.draw(st.sampled_from(sorted(line)))
    changed_lines = lines()
    changed_lines[number - 1] = json.dumps({**line, field: value}).encode()
    with contextlib.suppress(InvalidArgument):
        load(changed_lines, "w.jsonl")
