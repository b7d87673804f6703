"""That the stub says what TensorRT-LLM 1.2.1 has, and that it is heeded."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path

import mypy.api
import pytest

from tests.worker.trtllm.conftest import DOUBLES, ROOT
from tests.worker.trtllm.contract import missing

TYPINGS = ROOT / "typings"
SOURCES = "FIRSTTOKEN_TRTLLM_SOURCES"


def find_sources() -> Path | None:
    """The folder that holds `tensorrt_llm`: installed, or unpacked where a variable says."""
    if unpacked := os.environ.get(SOURCES):
        return Path(unpacked)
    path = [each for each in sys.path if each != str(DOUBLES)]
    spec = importlib.machinery.PathFinder.find_spec("tensorrt_llm", path)
    return Path(spec.origin).parents[1] if spec and spec.origin else None


def test_the_stub_has_no_name_that_the_sources_lack() -> None:
    sources = find_sources()
    if sources is None:
        pytest.skip(f"TensorRT-LLM is not installed here, and {SOURCES} names no sources")

    assert list(missing(TYPINGS, sources)) == []


def test_a_name_that_the_sources_lack_is_found(tmp_path: Path) -> None:
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    stub = (TYPINGS / "tensorrt_llm" / "disaggregated_params.pyi").read_text()
    (package / "params.py").write_text(stub.replace("opaque_state", "other"))
    found = [each for each in missing(TYPINGS, tmp_path) if ": DisaggregatedParams" in each]

    assert found == ["tensorrt_llm/disaggregated_params.py: DisaggregatedParams.opaque_state"]


def test_names_of_1_3_fail_the_type_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        "from tensorrt_llm.llmapi import LLM, DisaggregatedParams\n"
        "good = DisaggregatedParams(request_type='context_only', ctx_request_id=1)\n"
        "planted = DisaggregatedParams(disagg_request_id=1)\n"
        "def ask(llm: LLM) -> None:\n"
        "    llm.generate_async([1], disaggregated_params=good, cache_salt='a')\n"
        "    llm.generate_async([1], priority=0.5)\n"
    )
    monkeypatch.setenv("MYPYPATH", str(TYPINGS))
    cache = str(ROOT / ".mypy_cache" / "planted")
    options = ["--strict", "--config-file=", f"--cache-dir={cache}", "--no-error-summary"]
    said, _, status = mypy.api.run([*options, str(snippet)])
    lines = {int(line.rpartition("snippet.py:")[2].split(":")[0]) for line in said.splitlines()}

    assert status == 1
    assert "disagg_request_id" in said
    assert lines == {3, 6}, said
