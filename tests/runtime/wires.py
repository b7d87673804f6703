"""Untyped calls, for tests that speak below the generated stubs."""

from __future__ import annotations

from typing import Any

from services.runtime.channels import open_channel


def dial(address: str) -> Any:
    """A channel, untyped: its generic methods cannot be told what they carry."""
    return open_channel(address)
