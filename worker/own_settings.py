"""Settings in which one worker differs from the mesh: machines are unequal. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.core.config import flatten, nest, parse, settings
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig

PREFIX = "worker."


def read_own(text: str) -> dict[str, Any]:
    """Dotted keys and values, as JSON. Raises InvalidArgument."""
    try:
        own = json.loads(text or "{}")
    except ValueError:
        own = None
    if not isinstance(own, dict):
        raise InvalidArgument.of("--settings", "must be a JSON object of dotted keys")
    return own


def with_own(config: MeshConfig, own: Mapping[str, Any]) -> MeshConfig:
    """`config` with what is this worker's own.

    Only what a worker reads once, at start: the rest the mesh may change at any time.
    Raises InvalidArgument.
    """
    rules = dict(settings())
    for key in own:
        if not key.startswith(PREFIX) or key not in rules or not rules[key].at_start:
            raise InvalidArgument.of(
                key, f"no setting of one worker's own: those are {PREFIX}* that are read at start"
            )
    return parse(nest({**flatten(config), **own})) if own else config
