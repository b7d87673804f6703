"""DisaggregatedParams between protobuf and plain values: nothing lost, nothing read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from firsttoken.worker.v1 import worker_pb2
from worker.engines.contract import DisaggregatedParams, Handle

_FIELDS = [field.name for field in dataclasses.fields(DisaggregatedParams)]
_MESSAGES = {
    field.name: field.message_type.name
    for field in worker_pb2.DisaggregatedParams.DESCRIPTOR.fields
    if field.message_type is not None
}


def params_to_proto(params: DisaggregatedParams) -> worker_pb2.DisaggregatedParams:
    """Raises TypeError for a value that has no place in a message."""
    message = worker_pb2.DisaggregatedParams()
    for name in _FIELDS:
        value = getattr(params, name)
        if value is None:
            continue
        if name in _MESSAGES:
            getattr(message, name).CopyFrom(_TO_PROTO[_MESSAGES[name]](value))
        else:
            setattr(message, name, value)
    return message


def params_from_proto(message: worker_pb2.DisaggregatedParams) -> DisaggregatedParams:
    values = {field.name: value for field, value in message.ListFields()}
    return DisaggregatedParams(
        **{
            name: _FROM_PROTO[_MESSAGES[name]](value) if name in _MESSAGES else value
            for name, value in values.items()
        }
    )


def _integers(values: Iterable[int]) -> worker_pb2.Integers:
    return worker_pb2.Integers(values=values)


def _integer_lists(lists: Iterable[Iterable[int]]) -> worker_pb2.IntegerLists:
    return worker_pb2.IntegerLists(lists=map(_integers, lists))


def _dicts(dicts: Iterable[Handle]) -> worker_pb2.EngineDicts:
    return worker_pb2.EngineDicts(dicts=map(_dict, dicts))


def _dict(handle: Handle) -> worker_pb2.EngineDict:
    return worker_pb2.EngineDict(
        items=[
            worker_pb2.EngineItem(key=_value(key), value=_value(value))
            for key, value in handle.items()
        ]
    )


def _value(value: Any) -> worker_pb2.EngineValue:
    match value:
        case None:
            return worker_pb2.EngineValue()
        case bool():
            return worker_pb2.EngineValue(boolean=value)
        case int():
            return worker_pb2.EngineValue(integer=value)
        case float():
            return worker_pb2.EngineValue(number=value)
        case str():
            return worker_pb2.EngineValue(text=value)
        case bytes():
            return worker_pb2.EngineValue(data=value)
        case list() | tuple():
            return worker_pb2.EngineValue(list=worker_pb2.EngineValues(values=map(_value, value)))
        case dict():
            return worker_pb2.EngineValue(dict=_dict(value))
    raise TypeError(f"{type(value).__name__} has no place in DisaggregatedParams")


def _to_dict(message: worker_pb2.EngineDict) -> Handle:
    return {_to_value(item.key): _to_value(item.value) for item in message.items}


def _to_value(message: worker_pb2.EngineValue) -> Any:
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    value = getattr(message, kind)
    if kind == "list":
        return [_to_value(each) for each in value.values]
    return _to_dict(value) if kind == "dict" else value


_TO_PROTO: dict[str, Any] = {
    "Integers": _integers,
    "IntegerLists": _integer_lists,
    "EngineDicts": _dicts,
    "EngineDict": _dict,
    "EngineValue": _value,
}
_FROM_PROTO: dict[str, Any] = {
    "Integers": lambda message: list(message.values),
    "IntegerLists": lambda message: [list(each.values) for each in message.lists],
    "EngineDicts": lambda message: list(map(_to_dict, message.dicts)),
    "EngineDict": _to_dict,
    "EngineValue": _to_value,
}
