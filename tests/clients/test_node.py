"""From Node: a client that has only the .proto files and npm's gRPC, and OpenAI's own."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.edges import MODEL, HttpEdge

CLIENT = Path(__file__).resolve().parent / "node"
PROTOS = CLIENT.parent.parent.parent / "protos"


@pytest.fixture(scope="module")
def node() -> str:
    """The node program, with the client's packages installed beside the client."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    installed = CLIENT / "node_modules" / ".package-lock.json"
    lock = CLIENT / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        command = [npm, "ci", "--no-audit", "--no-fund"]
        result = subprocess.run(command, cwd=CLIENT, capture_output=True, text=True, timeout=120)
        if result.returncode:
            pytest.skip(f"npm ci failed: {result.stderr.strip()[-300:]}")
    return node


def test_a_node_client_generates_through_the_protos_alone(node: str) -> None:
    prompt = "Tell me about lighthouses."
    script = [node, str(CLIENT / "generate.mjs"), str(PROTOS), "$FIRSTTOKEN_ROUTER", prompt]
    command = " ".join(part if part.startswith("$") else shlex.quote(part) for part in script)
    up = [sys.executable, "-m", "services.cli.main", "up", "--engine", "simulated"]
    smallest = ["--workers", "1", "--no-kvstore", "--no-gateway", "--no-observer"]

    result = subprocess.run(
        [*up, *smallest, "--exec", command], capture_output=True, text=True, timeout=120
    )

    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["error"] is None
    assert len(answer["token_ids"]) == 8
    assert answer["text"]
    assert answer["finish_reason"] == "FINISH_REASON_LENGTH"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens"] > 8
    assert answer["ledger"]["total_ms"] > 0
    assert answer["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert answer["engine"] == "simulated"
    assert answer["refused_code"] == "INVALID_ARGUMENT"
    assert "sampling.max_tokens" in answer["refused_details"]


def test_openais_node_client_is_served(node: str, edge: HttpEdge) -> None:
    command = [node, str(CLIENT / "openai.mjs"), edge.base_url, MODEL]

    result = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["text"] == answer["streamed_text"] == answer["helper_text"]
    assert answer["text"]
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["streamed_usage"]["completion_tokens"] == 12
    assert answer["request_id"]
    assert answer["models"] == [MODEL]
    refused = {"name": "BadRequestError", "status": 400, "param": "max_tokens"}
    assert answer["bad_field"] == refused
    assert answer["other_model"] == {"name": "NotFoundError", "status": 404, "param": "model"}
    edge.wait_until_idle()
