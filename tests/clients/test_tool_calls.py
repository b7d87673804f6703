"""A real model's tool calls, as OpenAI's client sees them.

The model is too small to call tools by itself. A chat template that shows it a few calls
first makes it do so; all that lies between the template and the client is the real one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from services.models.catalog import find_model
from services.models.gguf import read_metadata
from tests.clients.edges import MODEL, run_http_edge

# Of tensors in a GGUF file.
ALIGNMENT = 32
# Calls as Llama 3 writes them, of which <|start_header_id|> is the sign.
TEMPLATE = """{# <|start_header_id|> #}
{%- macro turn(role, text) -%}
{{ '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}
{%- endmacro %}
{%- for tool in tools or [] %}
{%- for a, b in [(1, 2), (3, 4), (5, 6), (7, 8)] %}
{{- turn('user', 'What is %d plus %d?' % (a, b)) }}
{{- turn('assistant', '{"name": "%s", "parameters": {"a": %d, "b": %d}}'
    % (tool.function.name, a, b)) }}
{%- endfor %}
{%- endfor %}
{%- for message in messages %}{{- turn(message.role, message.content) }}{%- endfor %}
{{- '<|im_start|>assistant\n' }}"""
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
SUM: Any = [{"role": "user", "content": "What is 2 plus 9?"}]
GREEDY: dict[str, Any] = {"model": "caller", "max_tokens": 64, "temperature": 0, "messages": SUM}


def write_model(path: Path) -> None:
    """The known model with another chat template, its tensors as far from the start as before."""
    known = find_model(MODEL).gguf_path
    old = read_metadata(known)["tokenizer.chat_template"].encode()
    new = TEMPLATE.encode()
    new += b" " * ((len(old) - len(new)) % ALIGNMENT)
    content = known.read_bytes()
    spelled = struct.pack("<Q", len(old)) + old
    assert content.count(spelled) == 1
    path.write_bytes(content.replace(spelled, struct.pack("<Q", len(new)) + new))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("edge")
    path = directory / "caller.gguf"
    write_model(path)
    # Threads that wait for each other crawl on a machine with anything else to do.
    settings = ("--set", f"mesh.model={path}", "--set", "worker.threads=1")
    with (
        run_http_edge(directory, "--workers", "1", *settings) as edge,
        openai.OpenAI(base_url=edge.base_url, api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_call_is_parsed_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(tools=[ADD], **GREEDY)

    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 2, "b": 9}


def test_a_streamed_call_is_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(tools=[ADD], **GREEDY)
    with client.chat.completions.stream(tools=[ADD], **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()

    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert "tool_calls.function.arguments.done" in kinds
    assert not final.choices[0].message.content
    assert final.choices[0].finish_reason == "tool_calls"
    streamed, told = final.choices[0].message.tool_calls, whole.choices[0].message.tool_calls
    assert streamed
    assert told
    assert [call.function.arguments for call in streamed] == [
        call.function.arguments for call in told if call.type == "function"
    ]


def test_a_call_that_is_cut_off_is_told_as_it_came(client: openai.OpenAI) -> None:
    short: dict[str, Any] = {**GREEDY, "max_tokens": 12}
    whole = client.chat.completions.create(tools=[ADD], **short)
    chunks = list(client.chat.completions.create(tools=[ADD], stream=True, **short))

    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.choices[0].message.content
    assert whole.choices[0].message.content.startswith(' {"name": "add"')
    assert not whole.choices[0].message.tool_calls


def test_without_tools_nothing_is_called(client: openai.OpenAI) -> None:
    for extra in ({}, {"tools": [ADD], "tool_choice": "none"}):
        options: dict[str, Any] = {**GREEDY, "max_tokens": 8, **extra}
        answer = client.chat.completions.create(**options)
        assert answer.choices[0].message.content
        assert not answer.choices[0].message.tool_calls


def test_a_call_cannot_be_forced(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice") as caught:
        client.chat.completions.create(tools=[ADD], tool_choice="required", **GREEDY)

    assert caught.value.param == "tool_choice"
