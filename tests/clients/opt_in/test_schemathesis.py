"""The gateway and its own OpenAPI document, held against each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.core.tenants import hash_key, new_key
from tests.clients.conftest import SIMULATED
from tests.clients.edges import run_http_edge
from tests.clients.opt_in.conftest import Programs
from tests.tokenizers import qwen3_folder

HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
# No prompt is too long, and the longest answer comes soon.
FAST = (
    "gateway.default_max_tokens=16",
    "worker.max_context_tokens=4096",
    "worker.simulated.decode_step_ms=0.01",
    "worker.simulated.decode_step_ms_per_seq=0",
)


def _options(settings: Sequence[str]) -> list[str]:
    return [option for setting in settings for option in ("--set", setting)]


@pytest.mark.parametrize("keyed", [False, True], ids=["open", "keyed-with-tools"])
def test_schemathesis_finds_nothing(programs: Programs, tmp_path: Path, keyed: bool) -> None:
    settings, headers = list(FAST), list[str]()
    if keyed:
        key = new_key()
        settings += [f"mesh.model={qwen3_folder()}", f"tenants.a.key_hashes={hash_key(key)}"]
        headers = ["--header", f"Authorization: Bearer {key}"]
    with run_http_edge(tmp_path, *SIMULATED, *_options(settings)) as edge:
        output = programs.run(
            "schemathesis", "run", f"{edge.url}/openapi.json", *headers,
            "--checks", "all", "--max-examples", "60", "--seed", "1", "--continue-on-failure",
            "--request-timeout", "60", "--no-color",
            env={"SCHEMATHESIS_HOOKS": str(HOOKS)},
        )  # fmt: skip
        edge.wait_until_idle()

    tested = re.search(r"Operations: +(\d+) selected / (\d+) total", output)
    assert tested is not None
    assert tested[1] == tested[2] != "0"
    assert "No issues found" in output
