"""Flat packages have common names: no dependency may shadow ours."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", ["router", "worker", "services", "protos/firsttoken"])
def test_package_comes_from_this_checkout(path: str) -> None:
    package = importlib.import_module(Path(path).name)

    assert [Path(entry) for entry in package.__path__] == [ROOT / path]
