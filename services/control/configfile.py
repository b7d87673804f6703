"""The configuration file: TOML, read once at start."""

from __future__ import annotations

import tomllib
from pathlib import Path

from services.core.config import parse
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from services.runtime.startup import StartupError


def read_config(path: Path) -> MeshConfig:
    """Raises StartupError naming the file, the setting and what it must be."""
    try:
        return parse(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise StartupError(f"{path}: is no valid TOML: it is nested too deeply") from error
    except ValueError as error:  # bytes that are no UTF-8, and numbers of too many digits too
        raise StartupError(f"{path}: is no valid TOML: {error}") from error
    except InvalidArgument as error:
        raise StartupError(f"{path}: {error.message}") from error
