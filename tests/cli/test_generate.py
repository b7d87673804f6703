from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.core.ledger import Segment
from tests.cli.running import Endpoints, run_to_end


def test_json_is_one_line_with_every_figure_under_a_plain_name(mesh: Endpoints) -> None:
    result = run_to_end("generate", "--json", "--max-tokens", "4", "Hello", env=mesh.env)

    answer = result.json
    assert result.status == 0
    assert len(result.stdout.splitlines()) == 1
    assert answer.keys() == {
        *("text", "token_ids", "finish_reason", "usage", "ttft_ms", "ledger", "residual_ms"),
        *("handoff_ms", "kv_path", "trace_id", "generation", "worker_id", "engine"),
        *("attempts", "migrations", "routing"),
    }
    assert answer["kv_path"].keys() == {
        *("handed_off", "prefill_worker_id", "loaded_blocks", "expected_load_ms", "load_ms"),
        *("expected_compute_ms", "handoff_gap_ms", "transport", "reason"),
    }
    assert answer["usage"].keys() == {
        *("prompt_tokens", "completion_tokens", "cached_tokens", "evaluated_prompt_tokens")
    }
    assert list(answer["ledger"]) == [segment.value for segment in Segment]
    assert answer["engine"] == "simulated"
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] <= 4
    total_ms = sum(answer["ledger"].values()) + answer["residual_ms"]
    assert total_ms == pytest.approx(answer["ttft_ms"])
    assert len(answer["trace_id"]) == 32


def test_text_is_followed_by_the_ledger_as_a_chart(mesh: Endpoints) -> None:
    result = run_to_end("generate", "--max-tokens", "4", "Hello", env=mesh.env)

    lines = result.stdout.splitlines()
    chart = [line.split()[0] for line in lines if " ms" in line]
    assert chart == [*(segment.value for segment in Segment), "residual", "total"]
    assert lines[-1].endswith("by the simulated engine (its text and its times are made up)")


def test_a_raw_prompt_has_no_chat_template_around_it(mesh: Endpoints) -> None:
    shared = ("generate", "--json", "--max-tokens", "1", "Hello")
    chat = run_to_end(*shared, env=mesh.env).json
    raw = run_to_end(*shared, "--raw", env=mesh.env).json

    assert raw["usage"]["prompt_tokens"] == 1
    assert chat["usage"]["prompt_tokens"] > 1


def test_a_chat_file_and_stdin_are_prompts_too(mesh: Endpoints, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": messages}))
    shared = ("generate", "--json", "--max-tokens", "1")

    prompts = [
        run_to_end(*shared, *source, stdin="Hello", env=mesh.env).json["usage"]["prompt_tokens"]
        for source in (("Hello",), ("--chat", str(file)), ("--file", "-"))
    ]

    assert prompts[0] == prompts[1] == prompts[2]


def test_a_refused_request_is_one_line_that_names_the_field(mesh: Endpoints) -> None:
    arguments = ("generate", "--max-tokens", "0", "Hello")
    plain = run_to_end(*arguments, env=mesh.env)
    as_json = run_to_end(*arguments, "--json", env=mesh.env)

    assert plain.status == as_json.status == 1
    assert plain.stderr.startswith("firsttoken: sampling.max_tokens: must be in [1, ")
    assert plain.stderr.count("\n") == 1
    error = as_json.json["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert [violation["field"] for violation in error["violations"]] == ["sampling.max_tokens"]
    assert as_json.stderr == ""


def test_a_chat_that_makes_no_sense_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "contents": "Hello"}]))

    result = run_to_end("generate", "--chat", str(file), "--router", "127.0.0.1:1")

    assert result.status == 1
    assert "contents" in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_router_is_one_line_that_says_what_to_do() -> None:
    result = run_to_end("generate", "--router", "127.0.0.1:1", "Hello")

    assert result.status == 1
    assert result.stderr == (
        "firsttoken: no router at 127.0.0.1:1: start a mesh with `firsttoken up`,"
        " or name another address with --router\n"
    )


@pytest.mark.parametrize("arguments", [[], ["--max-tokens", "-1", "Hello"], ["--seed", "x", "Hi"]])
def test_wrong_usage_has_status_2(arguments: list[str]) -> None:
    assert run_to_end("generate", *arguments).status == 2
