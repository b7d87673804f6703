from __future__ import annotations

import math
from typing import Any

import orjson
import pytest

from firsttoken.common.v1 import common_pb2
from services.core.settings import GatewaySettings, MeshSettings
from services.core.tokens import unpack
from services.gateway.errors import ApiError
from services.gateway.fields import Fields
from services.gateway.request import (
    Ask,
    parse_body,
    read_chat_request,
    read_completion_request,
)
from services.gateway.served import Served, load_served
from services.gateway.tools import ToolFormat, ToolSupport
from tests.gateway.edges import HELLO, MODEL, chat_body

CONTEXT = 2048
SETTINGS = GatewaySettings()
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served() -> Served:
    return load_served(MeshSettings(), max_context_tokens=CONTEXT)


@pytest.fixture(scope="module")
def with_tools(served: Served) -> Served:
    return served._replace(tools=ToolSupport(renders_tools=True, format=ToolFormat.HERMES))


def said(content: Any, **more: Any) -> dict[str, Any]:
    """A body with one message."""
    return {"messages": [{"role": "user", "content": content, **more}]}


def chat(served: Served, **body: Any) -> Ask:
    return read_chat_request(Fields(chat_body(**body)), served, SETTINGS)


def completion(served: Served, **body: Any) -> Ask:
    return read_completion_request(Fields({"prompt": "Once", **body}), served, SETTINGS)


def test_a_chat_has_openai_s_defaults(served: Served) -> None:
    ask = chat(served)

    [request] = ask.requests
    assert request.sampling.temperature == 1
    assert request.sampling.max_tokens == CONTEXT  # to the end of the context
    assert request.request_class == common_pb2.REQUEST_CLASS_UNSPECIFIED
    assert [(each.role, each.content) for each in request.chat.messages] == [("user", "Hello")]
    assert ask.told == (False, False, False, None)


def test_a_completion_has_openai_s_defaults(served: Served) -> None:
    [request] = completion(served).requests

    assert request.text == "Once"
    assert (request.sampling.temperature, request.sampling.max_tokens) == (1, 16)


def test_the_defaults_can_be_set(served: Served) -> None:
    settings = GatewaySettings(default_temperature=0.5, default_max_tokens=100)
    [request] = read_chat_request(Fields(chat_body()), served, settings).requests

    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 100)


def test_every_option_arrives(served: Served) -> None:
    [request] = chat(
        served,
        model=MODEL,
        max_completion_tokens=5,
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=7,
        stop="end",
        stop_token_ids=[1, 2],
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-0.5,
        logprobs=True,
        top_logprobs=2,
        ignore_eos=True,
        skip_special_tokens=False,
        cache_salt="s",
        priority="batch",
        user="someone",
        chat_template_kwargs={"style": "short"},
        add_generation_prompt=False,
    ).requests

    assert request.sampling == common_pb2.SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=7,
        stop=["end"],
        stop_token_ids=[1, 2],
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-0.5,
        logprobs=2,
        ignore_eos=True,
        skip_special_tokens=False,
    )
    assert (request.model, request.cache_salt) == (MODEL, "s")
    assert request.request_class == common_pb2.REQUEST_CLASS_BATCH
    assert request.chat.template_args_json == '{"style":"short"}'
    assert not request.chat.add_generation_prompt


def test_null_is_absent(served: Served) -> None:
    names = [
        *("model", "n", "stream", "stream_options", "stop", "seed", "temperature", "top_p"),
        *("max_tokens", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format"),
        *("user", "priority", "service_tier", "cache_salt", "logit_bias", "functions"),
    ]

    assert chat(served, **dict.fromkeys(names)).requests == chat(served).requests


def test_fields_that_nobody_knows_are_ignored(served: Served) -> None:
    assert chat(served, store=True, metadata={"a": "b"}, x=[1]).requests == chat(served).requests


@pytest.mark.parametrize(
    "body",
    [
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"functions": []},
        {"modalities": ["text"]},
        {"min_tokens": 0},
    ],
)
def test_what_changes_nothing_is_no_reason_to_refuse(served: Served, body: dict[str, Any]) -> None:
    assert chat(served, **body).requests == chat(served).requests


def test_each_choice_has_a_seed_of_its_own(served: Served) -> None:
    seeds = [request.sampling.seed for request in chat(served, n=3, seed=-1).requests]

    assert seeds == [2**64 - 1, 0, 1]
    assert not any(request.sampling.HasField("seed") for request in chat(served, n=2).requests)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
        ([1.0, 2], [[1, 2]]),
    ],
)
def test_a_prompt_is_text_or_ids_or_several(served: Served, prompt: Any, wanted: Any) -> None:
    ask = completion(served, prompt=prompt, n=2)

    found = [request.text or list(unpack(request.token_ids, field="")) for request in ask.requests]
    assert found == [each for each in wanted for _ in range(2)]
    assert ask.num_choices == 2


def test_a_prompt_is_repeated_where_that_is_asked(served: Served) -> None:
    ids = [served.vocabulary.token_bytes.index(word) for word in (b"One", b"s")]
    assert completion(served, prompt=["One", ids], echo=True).echoes == ("One", "Ones")
    assert completion(served, prompt=["One"]).echoes == ("",)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, common_pb2.REQUEST_CLASS_UNSPECIFIED),
        ({"service_tier": "auto"}, common_pb2.REQUEST_CLASS_UNSPECIFIED),
        ({"service_tier": "flex"}, common_pb2.REQUEST_CLASS_BATCH),
        ({"priority": "interactive"}, common_pb2.REQUEST_CLASS_INTERACTIVE),
        ({"priority": "interactive", "service_tier": "flex"}, common_pb2.REQUEST_CLASS_INTERACTIVE),
        ({"priority": 0}, common_pb2.REQUEST_CLASS_INTERACTIVE),
        ({"priority": -5}, common_pb2.REQUEST_CLASS_INTERACTIVE),
        ({"priority": 3}, common_pb2.REQUEST_CLASS_BATCH),
    ],
)
def test_priority_and_service_tier_are_the_class(
    served: Served, body: dict[str, Any], wanted: int
) -> None:
    assert chat(served, **body).request_class == wanted


def test_messages_have_all_forms_of_content(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    [request] = chat(
        served,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "done", "tool_call_id": "c1"},
        ],
    ).requests

    system, user, assistant, tool = request.chat.messages
    assert (system.role, user.content) == ("system", "ab")
    assert not assistant.HasField("content")
    assert [(each.id, each.name, each.arguments_json) for each in assistant.tool_calls] == [
        ("c1", "look", '{"a":1}')
    ]
    assert (tool.tool_call_id, tool.content) == ("c1", "done")


def test_tools_go_to_the_template(with_tools: Served) -> None:
    ask = chat(with_tools, tools=[TOOL])

    assert [orjson.loads(each) for each in ask.requests[0].chat.tools_json] == [TOOL]
    assert ask.tools.names == {"look"}
    assert not chat(with_tools, tools=[TOOL], tool_choice="none").requests[0].chat.tools_json


def test_tools_are_refused_where_the_template_does_not_show_them(served: Served) -> None:
    with pytest.raises(ApiError) as caught:
        chat(served, tools=[TOOL])

    assert (caught.value.status, caught.value.param) == (400, "tools")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        (said(3), "messages[0].content"),
        (said([3]), "messages[0].content[0]"),
        (said([{"type": "image_url"}]), "messages[0].content[0].type"),
        (said([{"type": "text"}]), "messages[0].content[0].text"),
        (said(None, tool_calls=[{"id": "a"}]), "messages[0].tool_calls[0].function"),
        (said(None, tool_calls={}), "messages[0].tool_calls"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": CONTEXT + 1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": CONTEXT + 1}, "max_completion_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**32}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2.0**63)}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": {}}, "stop"),
        ({"stop": "x" * 300}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids[0]"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"user": 5}, "user"),
        ({"priority": "urgent"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"cache_salt": "x" * 300}, "cache_salt"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_chat_is_named(
    served: Served, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(served, **body)

    error = caught.value
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 3.5]}, "prompt[1]"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1, -1]]}, "prompt[0]"),
        ({"prompt": [[1, "a"]]}, "prompt[0]"),
        ({"prompt": [[True]]}, "prompt[0]"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["a"] * 65}, "n"),
        ({"prompt": ["a"] * 33, "n": 2}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_wrong_with_a_completion_is_named(
    served: Served, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        completion(served, **body)

    assert (caught.value.status, caught.value.param) == (400, param)


def test_everything_that_is_wrong_is_said_at_once(served: Served) -> None:
    with pytest.raises(ApiError) as caught:
        chat(served, temperature=-1, top_p=9, n="x")

    assert {"temperature", "top_p", "n"} <= {
        part.partition(":")[0] for part in caught.value.message.split("; ")
    }


def test_of_a_model_that_is_not_here_only_that_is_said(served: Served) -> None:
    with pytest.raises(ApiError) as caught:
        chat(served, model="gpt-4", temperature=-1)

    error = caught.value
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert MODEL in error.message


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "it is empty"),
        (b"[]", "got a list"),
        (b'"a"', "got a string"),
        (b'{"a":\n 1,}', "line 2, column"),
        (b"{'a': 1}", "line 1, column 2"),
        (b'{"a": NaN}', "line 1, column 7"),
        (b'{"a": "\xff"}', "must be JSON"),
        (b'{"a": "\\ud800"}', "must be JSON"),
        (b'{"a": 1} x', "line 1, column 10"),
        (b"[" * 100_000, "must be JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_its_place(raw: bytes, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(raw)

    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.top_p", "top_p"),
        ("sampling.max_tokens", "max_completion_tokens"),
        ("sampling.logprobs", "top_logprobs"),
        ("sampling.stop[1]", "stop[1]"),
        ("chat", "messages"),
        ("chat.messages[2].role", "messages[2].role"),
        ("chat.messages[2].tool_calls[0].name", "messages[2].tool_calls[0].function.name"),
        ("chat.tools_json[1]", "tools[1]"),
        ("chat.template_args_json", "chat_template_kwargs"),
        ("text", "prompt"),
        ("token_ids", "prompt"),
        ("input", "messages"),
        ("cache_salt", "cache_salt"),
        ("request_class", "priority"),
        ("model", "model"),
    ],
)  # fmt: skip
def test_the_mesh_s_names_become_openai_s(served: Served, field: str, param: str) -> None:
    assert chat(served, max_completion_tokens=3).to_param(field) == param


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    deep = b'{"chat_template_kwargs":' + b'{"a":' * 300 + b"1" + b"}" * 301

    with pytest.raises(ApiError, match="nested too deeply") as caught:
        parse_body(deep)

    assert caught.value.status == 400
