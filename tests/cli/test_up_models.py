"""A mesh over the tokenizer of a model whose weights nobody has."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from services.models.catalog import find_model
from services.models.loading import load_vocabulary
from tests.cli.running import COMMAND, run_to_end

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "call00001", "type": "function"}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
            ],
        },
        {"role": "tool", "content": "18 C", "tool_call_id": "call00001", "name": "get_weather"},
    ],
    "tools": [TOOL],
}


# What the template, and Mistral's encoder, make of it.
PROMPT_TOKENS = {"qwen3": 182, "tekken": 117}


@pytest.mark.parametrize("model", PROMPT_TOKENS)
def test_chat_with_tools_is_answered_in_the_model_s_own_tokens(
    model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps(CHAT))
    ask = shlex.join([*COMMAND, "generate", "--json", "--max-tokens", "8", "--chat", str(chat)])
    smallest = ("--workers", "1", "--no-kvstore", "--no-gateway", "--no-observer")
    options = ("--engine", "simulated", "--set", f"mesh.model={path}")

    result = run_to_end("up", *smallest, *options, "--exec", ask)

    assert result.status == 0, result.stderr
    answer = result.json
    vocabulary = load_vocabulary(find_model(str(path)))
    assert answer["usage"]["prompt_tokens"] == PROMPT_TOKENS[model]
    assert len(answer["token_ids"]) == 8
    assert answer["text"] == vocabulary.join(answer["token_ids"], skip_special_tokens=True).decode()
    assert answer["text"].isprintable()


def test_engine_that_needs_weights_is_refused_before_anything_starts(qwen3: Path) -> None:
    result = run_to_end("up", "--set", f"mesh.model={qwen3}")

    assert result.status == 3
    assert result.stderr.startswith("firsttoken: mesh.model: ")
    assert "is a tokenizer without weights; set worker.engine to simulated" in result.stderr
    assert len(result.stderr.splitlines()) == 1
