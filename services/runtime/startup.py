"""Why a process cannot start."""

from __future__ import annotations


class StartupError(Exception):
    """One readable line that says what to change; the process exits with code 3."""
