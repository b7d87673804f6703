"""Which part of a request a worker serves."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """As firsttoken.control.v1.WorkerRole."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
