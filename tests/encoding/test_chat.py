from __future__ import annotations

import json
from typing import Any

import pytest

from firsttoken.common.v1.common_pb2 import Chat, ChatMessage, ToolCall
from services.core.errors import InvalidArgument
from services.core.settings import TokenizerSettings
from services.encoding.chat import parse_chat
from services.encoding.template import ChatPrompt

USER = ChatMessage(role="user", content="Hi")


def parse(chat: Chat, **settings: Any) -> ChatPrompt:
    return parse_chat(chat, TokenizerSettings(**settings))


def refusals(chat: Chat) -> dict[str, str]:
    with pytest.raises(InvalidArgument) as caught:
        parse(chat)
    return dict(caught.value.violations)


def test_messages_have_openai_s_form() -> None:
    call = ToolCall(id="call_1", name="add", arguments_json='{"b": 2, "a": [1e2, null]}')
    prompt = parse(
        Chat(
            messages=[
                USER,
                ChatMessage(role="assistant", tool_calls=[call], reasoning_content="Sum."),
                ChatMessage(role="tool", content="3", tool_call_id="call_1", name="add"),
                ChatMessage(role="user", content=""),
            ]
        )
    )

    assert prompt.messages == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"b": 2, "a": [100.0, None]}},
                }
            ],
            "reasoning_content": "Sum.",
        },
        {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
        {"role": "user", "content": ""},
    ]


def test_defaults_are_those_of_the_contract() -> None:
    prompt = parse(Chat(messages=[USER]))

    assert prompt.tools is None
    assert prompt.add_generation_prompt is True
    assert prompt.template_args == {}
    assert parse(Chat(messages=[USER], add_generation_prompt=False)).add_generation_prompt is False


def test_tools_keep_the_order_of_their_keys() -> None:
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}'

    assert json.dumps(parse(Chat(messages=[USER], tools_json=[tool])).tools) == f"[{tool}]"


def test_equal_tools_give_equal_text_where_they_are_to_be_sorted() -> None:
    one = '{"type": "function", "function": {"name": "f", "parameters": [{"b": 1, "a": 2}]}}'
    other = '{"function":{"parameters":[{"a":2,"b":1}],"name":"f"},"type":"function"}'
    texts = [
        json.dumps(parse(Chat(messages=[USER], tools_json=[tool]), sort_tools=True).tools)
        for tool in (one, other)
    ]

    assert texts[0] == texts[1]
    assert json.loads(texts[0]) == [json.loads(one)]


def test_order_of_tools_and_of_a_call_s_arguments_is_kept() -> None:
    call = ToolCall(arguments_json='{"b": 1, "a": 2}')
    prompt = parse(
        Chat(
            messages=[ChatMessage(role="assistant", tool_calls=[call])],
            tools_json=['{"name": "z"}', '{"name": "a"}'],
        )
    )

    assert prompt.tools == [{"name": "z"}, {"name": "a"}]
    assert list(prompt.messages[0]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]


def test_arguments_of_a_call_may_be_given_to_the_template_as_they_were_sent() -> None:
    text = '{"b":1,  "a":2.50}'
    message = ChatMessage(role="assistant", tool_calls=[ToolCall(arguments_json=text)])
    prompt = parse(Chat(messages=[message]), tool_arguments="text")

    assert prompt.messages[0]["tool_calls"][0]["function"]["arguments"] == text


def test_arguments_of_a_call_are_checked_in_either_form() -> None:
    message = ChatMessage(role="assistant", tool_calls=[ToolCall(arguments_json="[1]")])

    with pytest.raises(InvalidArgument, match=r"tool_calls\[0\]\.arguments_json: must be a JSON"):
        parse(Chat(messages=[message]), tool_arguments="text")


def test_numbers_are_kept_as_written() -> None:
    prompt = parse(
        Chat(messages=[USER], template_args_json='{"id": 123456789012345678901234567890}')
    )

    assert prompt.template_args == {"id": 123456789012345678901234567890}


def test_chat_without_messages_is_refused() -> None:
    assert refusals(Chat()) == {"chat.messages": "must not be empty"}


def test_every_broken_field_is_named_at_once() -> None:
    chat = Chat(
        messages=[
            USER,
            ChatMessage(
                role="assistant",
                tool_calls=[ToolCall(arguments_json="{}"), ToolCall(arguments_json="{'a': 1}")],
            ),
            ChatMessage(content="no role"),
        ],
        tools_json=["{}", '{"name": '],
        template_args_json="[1]",
    )

    found = refusals(chat)

    assert list(found) == [
        "chat.messages[1].tool_calls[1].arguments_json",
        "chat.messages[2].role",
        "chat.tools_json[1]",
        "chat.template_args_json",
    ]
    assert found["chat.messages[2].role"] == "must not be empty"
    assert "line 1 column 2" in found["chat.messages[1].tool_calls[1].arguments_json"]
    assert found["chat.template_args_json"] == "must be a JSON object; got a list"


def test_only_a_message_that_says_something_else_may_be_without_content() -> None:
    call = ToolCall(name="f", arguments_json="{}")
    chat = Chat(
        messages=[
            USER,
            ChatMessage(role="assistant", tool_calls=[call]),
            ChatMessage(role="assistant", reasoning_content="Hm."),
            ChatMessage(role="user"),
            ChatMessage(role="user", content=""),
        ]
    )

    assert refusals(chat) == {
        "chat.messages[3].content": "must be there, unless there are tool_calls"
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be JSON"),
        ("null", "must be a JSON object; got null"),
        ('"my secret"', "must be a JSON object; got a string"),
        ("true", "must be a JSON object; got true or false"),
        ("1e3", "must be a JSON object; got a number"),
        ('{"a": NaN}', "NaN is no JSON value"),
        ('{"a": -Infinity}', "-Infinity is no JSON value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": 1} {}', "must be JSON"),
        ('{"messages": []}', "must not set messages"),
        ('{"tools": []}', "must not set tools"),
        ('{"add_generation_prompt": false}', "must not set add_generation_prompt"),
    ],
)
def test_template_arguments_that_are_refused(text: str, complaint: str) -> None:
    found = refusals(Chat(messages=[USER], template_args_json=text))

    assert list(found) == ["chat.template_args_json"]
    assert complaint in found["chat.template_args_json"]
