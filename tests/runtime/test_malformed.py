from __future__ import annotations

from typing import cast

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.common.v1 import common_pb2
from firsttoken.control.v1 import control_pb2
from firsttoken.router.v1 import inference_pb2
from services.core.errors import Violation
from services.runtime.malformed import find_violation

# Same length, not UTF-8: put where the mark was, so that lengths on the wire stay right.
MARK = "?bad-text?"
BAD = b"\xff\xfebad-tex\xff"


def corrupt(message: Message) -> Violation:
    data = message.SerializeToString().replace(MARK.encode(), BAD)
    with pytest.raises(DecodeError):
        type(message).FromString(data)
    return find_violation(cast(Descriptor, message.DESCRIPTOR), data)


def test_a_string_of_the_message_itself_is_named() -> None:
    violation = corrupt(inference_pb2.GenerateRequest(model="m", text=MARK))

    assert violation == ("text", "must be valid UTF-8; byte 0 is 0xff")


def test_a_repeated_string_is_named_with_its_index() -> None:
    sampling = common_pb2.SamplingParams(max_tokens=4, temperature=0.5, stop=["a", MARK])
    violation = corrupt(inference_pb2.GenerateRequest(text="hello", sampling=sampling))

    assert violation.field == "sampling.stop[1]"


def test_a_string_deep_inside_repeated_messages_is_named() -> None:
    call = common_pb2.ToolCall(id="1", name="f", arguments_json=MARK)
    messages = [
        common_pb2.ChatMessage(role="user", content="hello"),
        common_pb2.ChatMessage(role="assistant", tool_calls=[common_pb2.ToolCall(), call]),
    ]
    chat = common_pb2.Chat(messages=messages, tools_json=["{}"])
    violation = corrupt(inference_pb2.GenerateRequest(chat=chat))

    assert violation.field == "chat.messages[1].tool_calls[1].arguments_json"


def test_a_value_of_a_map_is_named() -> None:
    violation = corrupt(control_pb2.SetConfigRequest(changes={"router.max_queue": MARK}))

    assert violation.field == "changes[0].value"


def test_bytes_that_are_no_text_are_fine_in_a_bytes_field() -> None:
    request = inference_pb2.GenerateRequest(token_ids=BAD, cache_salt=MARK)
    violation = corrupt(request)

    assert violation.field == "cache_salt"


def test_the_first_of_several_bad_strings_is_named() -> None:
    sampling = common_pb2.SamplingParams(stop=[MARK])
    violation = corrupt(inference_pb2.GenerateRequest(text=MARK, sampling=sampling))

    assert violation.field == "text"


def test_a_message_cut_off_inside_a_field_names_it() -> None:
    data = inference_pb2.GenerateRequest(text="hello").SerializeToString()[:-1]
    violation = find_violation(inference_pb2.GenerateRequest.DESCRIPTOR, data)

    assert violation.field == "text"
    assert "cut off or corrupt" in violation.description


def test_packed_values_cut_off_are_named() -> None:
    ids = common_pb2.SamplingParams(stop_token_ids=[300]).SerializeToString()
    data = ids[:-1] + b"\xff"  # a varint that goes on
    violation = find_violation(common_pb2.SamplingParams.DESCRIPTOR, data)

    assert violation.field == "stop_token_ids[0]"
    assert "cut off or corrupt" in violation.description


def test_unknown_fields_of_every_wire_type_are_passed_over() -> None:
    unknown = (
        b"\xf8\x06\x05"  # field 111, varint
        b"\xf1\x06\x00\x00\x00\x00\x00\x00\x00\x00"  # field 110, 8 bytes
        b"\xed\x06\x00\x00\x00\x00"  # field 109, 4 bytes
        b"\xe2\x06\x02\xff\xff"  # field 108, length-delimited
        b"\xdb\x06\xf8\x06\x05\xd3\x06\xd4\x06\xdc\x06"  # field 107, a group around a group
    )
    bad = inference_pb2.GenerateRequest(cache_salt=MARK).SerializeToString()
    data = unknown + bad.replace(MARK.encode(), BAD)
    violation = find_violation(inference_pb2.GenerateRequest.DESCRIPTOR, data)

    assert violation.field == "cache_salt"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00",  # field number 0
        b"\x0f",  # wire type 7
        b"\x0c",  # the end of a group that never began
        b"\xff" * 11,  # a varint that does not end
        b"\xdb\x06\xe4\x06",  # a group closed by another number
        b"\xdb\x06",  # a group that never ends
    ],
)
def test_bytes_that_are_no_protobuf_are_reported_as_such(data: bytes) -> None:
    violation = find_violation(inference_pb2.GenerateRequest.DESCRIPTOR, data)

    assert "cut off or corrupt" in violation.description


def test_a_sound_message_gets_the_general_answer() -> None:
    data = inference_pb2.GenerateRequest(text="hello").SerializeToString()
    violation = find_violation(inference_pb2.GenerateRequest.DESCRIPTOR, data)

    assert violation == ("", "must be an encoded firsttoken.router.v1.GenerateRequest")


@given(data=st.binary(max_size=200))
def test_any_bytes_get_an_answer(data: bytes) -> None:
    assert find_violation(inference_pb2.GenerateRequest.DESCRIPTOR, data).description


@given(
    stop=st.lists(st.text(max_size=8), max_size=4),
    position=st.integers(0, 80),
    byte=st.binary(min_size=1, max_size=1),
)
def test_whatever_the_parser_refuses_is_named(stop: list[str], position: int, byte: bytes) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=7, stop=stop)
    request = inference_pb2.GenerateRequest(model="m", text="some text", sampling=sampling)
    data = bytearray(request.SerializeToString())
    data[position % len(data)] = byte[0]
    try:
        inference_pb2.GenerateRequest.FromString(bytes(data))
    except DecodeError:
        violation = find_violation(inference_pb2.GenerateRequest.DESCRIPTOR, bytes(data))

        assert "must be an encoded" not in violation.description
