from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from firsttoken._requests import build_request
from firsttoken.common.v1 import common_pb2
from services.core.tokens import pack

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def test_takes_text_as_it_is() -> None:
    request = build_request("Once upon", {})

    assert request.text == "Once upon"
    assert request.request_class == common_pb2.REQUEST_CLASS_UNSPECIFIED
    assert request.sampling == common_pb2.SamplingParams()


@pytest.mark.parametrize("ids", [[1, 2, 70000], (1, 2, 70000), np.array([1, 2, 70000], np.uint32)])
def test_packs_token_ids(ids: Any) -> None:
    assert build_request(ids, {}).token_ids == pack([1, 2, 70000])


def test_leaves_an_empty_prompt_for_the_mesh_to_refuse() -> None:
    assert build_request("", {}).WhichOneof("input") == "text"
    assert build_request([], {}).WhichOneof("input") == "token_ids"


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "Rome?"}],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]


def test_takes_a_chat_in_the_form_of_openai() -> None:
    request = build_request(
        CHAT,
        {"tools": [WEATHER], "template_args": {"brief": True}, "add_generation_prompt": False},
    )
    system, user, assistant, tool = request.chat.messages

    assert (system.role, system.content) == ("system", "Be brief.")
    assert user.content == "How is Rome?"
    assert not assistant.HasField("content")
    assert assistant.tool_calls[0] == common_pb2.ToolCall(
        id="1", name="weather", arguments_json='{"city": "Rome"}'
    )
    assert (tool.tool_call_id, tool.content) == ("1", "sunny")
    assert json.loads(request.chat.tools_json[0]) == WEATHER
    assert request.chat.template_args_json == '{"brief": true}'
    assert request.chat.add_generation_prompt is False


def test_passes_every_option_on() -> None:
    request = build_request(
        "hi",
        {
            "model": "small",
            "cache_salt": "s",
            "request_class": "batch",
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "min_p": 0.125,
            "seed": 2**64 - 1,
            "stop": ["a", "b"],
            "stop_token_ids": [1, 2],
            "repetition_penalty": 1.5,
            "presence_penalty": 0.75,
            "frequency_penalty": -0.5,
            "logprobs": 2,
            "ignore_eos": True,
        },
    )

    assert (request.model, request.cache_salt) == ("small", "s")
    assert request.request_class == common_pb2.REQUEST_CLASS_BATCH
    assert request.sampling == common_pb2.SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-0.5,
        logprobs=2,
        ignore_eos=True,
    )


def test_takes_one_stop_string_as_one() -> None:
    assert build_request("hi", {"stop": "end"}).sampling.stop == ["end"]


def test_takes_none_as_absent() -> None:
    request = build_request("hi", {"temperature": None, "stop": None, "seed": None})

    assert request == build_request("hi", {})


def test_distinguishes_zero_from_absent() -> None:
    assert build_request("hi", {"max_tokens": 0}).sampling.HasField("max_tokens")


@pytest.mark.parametrize(
    ("prompt", "options", "error", "said"),
    [
        ("hi", {"temprature": 1}, TypeError, "no option 'temprature'"),
        ("hi", {"temperature": "hot"}, TypeError, "must be real number|expected: int, float"),
        ("hi", {"max_tokens": -1}, ValueError, "range"),
        ("hi", {"request_class": "urgent"}, ValueError, "'interactive' or 'batch'"),
        ("hi", {"tools": [WEATHER]}, ValueError, "only a chat takes tools"),
        (b"hi", {}, TypeError, "must be a string"),
        ({"role": "user"}, {}, TypeError, "must be a string"),
        ([1, -1], {}, ValueError, "whole numbers"),
        ([1, "2"], {}, ValueError, "whole numbers"),
        ([1, 2**32], {}, ValueError, "whole numbers"),
        ([{"role": "user", "contents": "hi"}], {}, ValueError, "no 'contents'"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            ValueError,
            "only text.*image_url",
        ),
    ],
)
def test_refuses_misuse_at_once(
    prompt: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        build_request(prompt, options)
