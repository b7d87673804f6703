from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from services.runtime.startup import StartupError
from worker.engines.llamacpp import binding


def refusal() -> str:
    with pytest.raises(StartupError) as caught:
        binding.load_library(passive_wait=False)
    return str(caught.value)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "PACKAGE", "package_that_nobody_has")

    assert refusal() == (
        "the engine is not installed; run: pip install package_that_nobody_has==2026.10.11549"
    )


def test_another_version_is_not_even_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _package: "2026.11.0")

    assert "xllamacpp 2026.11.0 is installed, but its C structs are known" in refusal()


def test_a_library_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "FILE_NAME", "absent.so")

    assert "cannot be loaded" in refusal()
    assert "absent.so" in refusal()


def test_a_library_without_the_symbols_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("_ctypes")
    assert spec is not None
    assert spec.origin is not None
    # A shared library that loads; an absolute name replaces the package's folder.
    monkeypatch.setattr(binding, "FILE_NAME", str(Path(spec.origin).resolve()))

    assert "does not export llama_backend_init, llama_log_set," in refusal()


def test_unexpected_defaults_mean_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(binding._DEFAULT_CONTEXT_PARAMS, "n_batch", 4096)

    assert refusal() == (
        "the engine's library has another layout of struct llama_context_params;"
        " unexpected defaults: n_batch"
    )
