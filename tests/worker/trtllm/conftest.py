"""For these tests `tensorrt_llm` is its double."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOUBLES = Path(__file__).resolve().parent / "doubles"


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, and in every process that is started."""
    path = [str(DOUBLES), str(ROOT), str(ROOT / "protos")]
    monkeypatch.syspath_prepend(DOUBLES)
    monkeypatch.setenv("PYTHONPATH", ":".join(path))
    ours = [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]
    for name in [*ours, *_of_the_adapter()]:
        monkeypatch.delitem(sys.modules, name)


def _of_the_adapter() -> list[str]:
    return [name for name in sys.modules if name.startswith("worker.engines.trtllm")]
