"""Structured logs: an event, its fields, one line each.

On a terminal a readable line; elsewhere (or with FIRSTTOKEN_LOG=json) one JSON
object a line, on stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

FIELDS = "firsttoken_fields"
# gRPC shows metadata that is no UTF-8, which may be a caller's key with a slip in it.
_SHOWS_METADATA = ("grpc._cython.cygrpc", "Invalid encoding on ")


def configure(service: str, level: str = "info") -> None:
    """Send this process's logs to stderr. `level` as in the setting telemetry.log_level."""
    wanted = os.environ.get("FIRSTTOKEN_LOG", "")
    readable = wanted == "text" or (wanted != "json" and sys.stderr.isatty())
    handler = MeshHandler(sys.stderr)
    handler.setFormatter(ReadableFormatter(service) if readable else JsonFormatter(service))
    logging.root.handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    logging.root.setLevel(level.upper())


def follow_level(level: str) -> None:
    """What a new configuration says, where `configure` made the logging ours to change."""
    if any(isinstance(handler, MeshHandler) for handler in logging.root.handlers):
        set_level(level)


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """event(logger, logging.INFO, "worker joined", member_id=…, address=…)"""
    if logger.isEnabledFor(level):
        # Who calls is in none of our lines, and costs a third of an event to find out.
        extra = {FIELDS: fields}
        record = logger.makeRecord(logger.name, level, "", 0, message, (), None, extra=extra)
        logger.handle(record)


class MeshHandler(logging.StreamHandler[TextIO]):
    """What `configure` installs."""

    def emit(self, record: logging.LogRecord) -> None:
        name, beginning = _SHOWS_METADATA
        if record.name != name or not str(record.msg).startswith(beginning):
            super().emit(record)


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
            **getattr(record, FIELDS, {}),
            "logger": record.name,
            "pid": record.process,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except orjson.JSONEncodeError:  # a lone surrogate, a number beyond 64 bits
            return json.dumps(entry, default=str)


class ReadableFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        fields = "".join(f" {k}={v}" for k, v in getattr(record, FIELDS, {}).items())
        line = f"{clock} {self._service}: {level}{record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
