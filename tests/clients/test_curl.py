"""curl, and the bytes that it sees."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import KeyedEdge
from tests.clients.edges import MODEL, HttpEdge

if shutil.which("curl") is None:
    pytest.skip("curl is not installed", allow_module_level=True)

BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me of lighthouses."}],
    "max_tokens": 6,
    "seed": 7,
}
CHAT = "/v1/chat/completions"


def curl(*arguments: str, body: Any = None) -> bytes:
    """What it writes to stdout; it must end well."""
    given: tuple[str, ...] = ()
    if body is not None:
        given = ("--json", json.dumps(body))
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *given, *arguments]
    done = subprocess.run(command, capture_output=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_stream_is_byte_for_byte_server_sent_events(edge: HttpEdge) -> None:
    sent = curl("--no-buffer", "--include", f"{edge.url}{CHAT}", body={**BODY, "stream": True})

    head, _, stream = sent.partition(b"\r\n\r\n")
    status, *headers = head.decode("ascii").split("\r\n")
    names = {name.lower(): value for name, _, value in (line.partition(": ") for line in headers)}
    assert status == "HTTP/1.1 200 OK"
    assert names["content-type"] == "text/event-stream; charset=utf-8"
    assert names["cache-control"] == "no-cache"
    assert names["transfer-encoding"] == "chunked"
    assert "content-length" not in names
    # Each event is one line of JSON and an empty line, the last is [DONE]; nothing else.
    assert re.fullmatch(rb"(data: \{[^\n]*\}\n\n)+data: \[DONE\]\n\n", stream)
    chunks = [json.loads(line[6:]) for line in stream.split(b"\n\n")[:-2]]
    whole = json.loads(curl(f"{edge.url}{CHAT}", body=BODY))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert {"id", "created", "model", "choices"} <= chunk.keys()


def test_one_connection_serves_many_requests(edge: HttpEdge) -> None:
    urls = [f"{edge.url}/v1/models"] * 5
    report = curl("--write-out", "\n%{num_connects} %{http_code}\n", *urls).decode().splitlines()

    assert [line for line in report if re.fullmatch(r"\d+ \d+", line)] == [
        "1 200",
        *["0 200"] * 4,
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["--data", "{}"], "415", "unsupported_media_type"),
        (["--json", "{"], "400", "invalid_json"),
        (["--json", "[1]"], "400", "invalid_json"),
        (["--json", '{"messages": "hello"}'], "400", "invalid_value"),
        (["--request", "DELETE"], "405", "method_not_allowed"),
        (["--json", '{"model": "other"}'], "404", "model_not_found"),
    ],
)
def test_errors_have_openais_form(
    edge: HttpEdge, arguments: list[str], status: str, code: str
) -> None:
    output = curl(*arguments, "--write-out", "\n%{http_code}", f"{edge.url}{CHAT}").decode()

    body, _, seen = output.rpartition("\n")
    error = json.loads(body)["error"]
    assert (seen, error["code"]) == (status, code)
    assert error.keys() == {"message", "type", "param", "code"}


def test_keys_are_asked_for_and_never_repeated(keyed_edge: KeyedEdge) -> None:
    edge, wrong = keyed_edge.edge, "sk-a-key-that-is-nobodys"
    bearer = ["--header", f"authorization: Bearer {wrong}"]

    without = curl(f"{edge.url}{CHAT}", body=BODY)
    refused = curl("--include", *bearer, f"{edge.url}{CHAT}", body=BODY)
    welcome = curl(
        "--header", f"authorization: Bearer {keyed_edge.key}", f"{edge.url}{CHAT}", body=BODY
    )

    assert json.loads(without)["error"]["code"] == "invalid_api_key"
    assert refused.startswith(b"HTTP/1.1 401")
    assert wrong.encode() not in refused
    assert json.loads(welcome)["choices"]


def test_expect_100_continue_and_a_chunked_body_are_taken(edge: HttpEdge) -> None:
    headers = ["--header", "expect: 100-continue", "--header", "transfer-encoding: chunked"]

    answer = json.loads(curl(*headers, f"{edge.url}{CHAT}", body=BODY))

    assert answer["usage"]["completion_tokens"] == 6
