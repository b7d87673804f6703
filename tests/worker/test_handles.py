from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.contract import DisaggregatedParams
from worker.handles import params_from_proto, params_to_proto

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
IDS = st.integers(0, (1 << 64) - 1)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | INTEGERS
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(KEYS, values, max_size=3),
    max_leaves=6,
)
HANDLES = st.dictionaries(KEYS, VALUES, max_size=3)
FIELDS = {
    "request_type": st.text(),
    "first_gen_tokens": st.lists(INTEGERS),
    "ctx_request_id": IDS,
    "opaque_state": st.binary(),
    "draft_tokens": st.lists(INTEGERS),
    "multimodal_embedding_handles": st.lists(HANDLES, max_size=2),
    "multimodal_hashes": st.lists(st.lists(INTEGERS, max_size=8), max_size=3),
    "mrope_position_ids_handle": HANDLES,
    "mrope_position_deltas_handle": HANDLES,
    "disagg_request_id": IDS,
    "first_gen_log_probs": st.lists(VALUES, max_size=2),
    "first_gen_logits": st.lists(VALUES, max_size=2),
    "ctx_dp_rank": INTEGERS,
    "ctx_info_endpoint": st.text(),
    "schedule_style": INTEGERS,
    "ctx_usage": HANDLES,
}
# Of TensorRT-LLM 1.2.1, whose class has exactly these.
FIRST_FIELDS = list(FIELDS)[:9]


@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_every_field_arrives_as_it_was(fields: dict[str, Any]) -> None:
    params = DisaggregatedParams(**fields)
    message = params_to_proto(params)
    arrived = params_from_proto(type(message).FromString(message.SerializeToString()))

    assert arrived == params


@pytest.mark.parametrize("name", FIELDS)
def test_an_empty_value_is_not_an_absent_one(name: str) -> None:
    empty: dict[str, Any] = {"request_type": "", "ctx_info_endpoint": "", "opaque_state": b""}
    empty |= dict.fromkeys(("ctx_request_id", "disagg_request_id", "ctx_dp_rank"), 0)
    empty |= {"schedule_style": 0}
    value: Any = empty.get(name, {} if name.endswith(("handle", "usage")) else [])
    arrived = params_from_proto(params_to_proto(DisaggregatedParams(**{name: value})))

    assert getattr(arrived, name) == value
    assert getattr(params_from_proto(params_to_proto(DisaggregatedParams())), name) is None


def test_the_fields_are_those_of_the_engine() -> None:
    names = [field.name for field in dataclasses.fields(DisaggregatedParams)]

    assert names == list(FIELDS)
    assert FIRST_FIELDS[-1] == "mrope_position_deltas_handle"


def test_a_cuda_handle_arrives_whole() -> None:
    """As TensorRT-LLM makes them of a tensor that another process is to open."""
    handle = {
        "method_key": 1,
        "tensor_size": [1, 4096],
        "dtype": "torch.bfloat16",
        "storage_device": 0,
        "storage_handle": "AbCd==",
        "storage_size_bytes": 1 << 40,
        "requires_grad": False,
        "event_handle": bytes(64),
        "event_sync_required": True,
    }
    params = DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=[17],
        ctx_request_id=(1 << 64) - 1,
        opaque_state=bytes(range(256)),
        multimodal_embedding_handles=[handle],
        multimodal_hashes=[[-(1 << 31), *range(7)]],
        mrope_position_ids_handle=handle,
    )

    assert params_from_proto(params_to_proto(params)) == params


def test_what_has_no_place_in_a_message_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no place"):
        params_to_proto(DisaggregatedParams(ctx_usage={"a": object()}))
