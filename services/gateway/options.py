"""How to choose the tokens of an answer, and which queue it waits in."""

from __future__ import annotations

from typing import Any

from firsttoken.common.v1 import common_pb2
from services.core.errors import Violation
from services.core.sampling import Sampling
from services.gateway.fields import MAX_UINT32, Fields, kind_of, to_token_id

_LEAST_FLOAT32 = 2.0**-149
_WAITING_TIERS = ("flex", "batch")
_TIERS = ("auto", "default", "priority", "scale", *_WAITING_TIERS)


def read_sampling(
    body: Fields,
    *,
    given: dict[str, Any],
    names: dict[str, str],
    default_temperature: float,
    max_context_tokens: int,
    vocabulary_size: int,
) -> common_pb2.SamplingParams:
    """`given`: what the caller has read already, by our names; `names`: from ours to its own."""
    temperature = body.number("temperature")
    values: dict[str, Any] = {
        "temperature": default_temperature if temperature is None else temperature,
        "top_p": _not_zero(body.number("top_p")),
        # Some clients spell "all of them" as -1.
        "top_k": max(0, body.integer("top_k", low=-1) or 0),
        "min_p": body.number("min_p"),
        "repetition_penalty": _not_zero(body.number("repetition_penalty")),
        "presence_penalty": body.number("presence_penalty"),
        "frequency_penalty": body.number("frequency_penalty"),
        "ignore_eos": body.boolean("ignore_eos"),
        "skip_special_tokens": body.boolean("skip_special_tokens"),
        "stop": _stop(body),
        "stop_token_ids": _stop_token_ids(body),
        **given,
    }
    values = {name: value for name, value in values.items() if value is not None}
    found = Sampling(**values).violations(
        max_context_tokens=max_context_tokens, vocabulary_size=vocabulary_size, prefix=""
    )
    body.violations += [Violation(names.get(field, field), text) for field, text in found]
    return common_pb2.SamplingParams(**values)


def read_class(body: Fields) -> common_pb2.RequestClass.ValueType:
    """`priority`: a class, or a number of which more than 0 may wait. Else `service_tier`."""
    tier = body.choice("service_tier", *_TIERS)
    value = body.raw("priority")
    if isinstance(value, str):
        waits = body.choice("priority", "interactive", "batch") == "batch"
    elif value is not None:
        waits = (body.integer("priority", low=-MAX_UINT32) or 0) > 0
    elif tier in _WAITING_TIERS:
        waits = True
    else:  # what the tenant may have decides
        return common_pb2.REQUEST_CLASS_UNSPECIFIED
    return common_pb2.REQUEST_CLASS_BATCH if waits else common_pb2.REQUEST_CLASS_INTERACTIVE


def _not_zero(value: float | None) -> float | None:
    """Still above 0 once it is a float of 32 bits."""
    return max(value, _LEAST_FLOAT32) if value is not None and value > 0 else value


def _stop(body: Fields) -> tuple[str, ...]:
    value = body.raw("stop")
    if isinstance(value, str):
        return (value,)
    strings = body.items("stop") or []
    for index, string in enumerate(strings):
        if not isinstance(string, str):
            body.refuse(f"stop[{index}]", f"must be a string; got {kind_of(string)}")
    return tuple(string for string in strings if isinstance(string, str))


def _stop_token_ids(body: Fields) -> tuple[int, ...]:
    ids = []
    for index, value in enumerate(body.items("stop_token_ids") or []):
        token_id = to_token_id(value)
        if token_id is None:
            body.refuse(f"stop_token_ids[{index}]", f"must be a token id; got {kind_of(value)}")
        else:
            ids.append(token_id)
    return tuple(ids)
