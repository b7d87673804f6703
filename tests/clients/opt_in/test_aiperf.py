"""NVIDIA's benchmark, to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import SIMULATED
from tests.clients.edges import run_http_edge
from tests.clients.opt_in.conftest import Programs
from tests.tokenizers import qwen3_folder

NUM_REQUESTS = 40


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_measures_what_it_asked_for(
    programs: Programs, tmp_path: Path, endpoint: str
) -> None:
    folder = qwen3_folder()
    with run_http_edge(tmp_path, *SIMULATED, "--set", f"mesh.model={folder}") as edge:
        programs.run(
            "aiperf", "profile", "--model", folder.name, "--url", edge.url,
            "--endpoint-type", endpoint, "--streaming", "--use-server-token-count",
            "--tokenizer", str(folder), "--synthetic-input-tokens-mean", "100",
            "--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true",
            "--request-count", str(NUM_REQUESTS), "--concurrency", "4",
            "--ui", "simple", "--no-gpu-telemetry", "--output-artifact-dir", str(tmp_path / "out"),
        )  # fmt: skip
        edge.wait_until_idle()

    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert not report.get("error_summary")
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == 16
    assert report["input_sequence_length"]["min"] >= 100
    assert 0 < report["time_to_first_token"]["avg"] < report["request_latency"]["avg"]
