"""Why a process cannot start."""

from __future__ import annotations

from typing import NamedTuple

MAX_PORT = 65535
EVERY_INTERFACE = ("", "0.0.0.0", "[::]")


class StartupError(Exception):
    """One readable line that says what to change; the process exits with code 3."""


class ListenAddress(NamedTuple):
    # As it was written, an IPv6 address in brackets; "" for every interface.
    host: str
    port: int


def parse_listen(listen: str) -> ListenAddress:
    """`host:port`; port 0 takes a free one. Raises StartupError."""
    host, separator, port = listen.rpartition(":")
    if not (separator and port.isascii() and port.isdecimal()):
        raise StartupError(f"cannot listen on {listen!r}: must be host:port")
    if int(port) > MAX_PORT:
        raise StartupError(f"cannot listen on {listen!r}: the port must be at most {MAX_PORT}")
    return ListenAddress(host, int(port))


def require_named(option: str, listen: str) -> None:
    """That others can be told it. Raises StartupError for every interface at once."""
    if parse_listen(listen).host in EVERY_INTERFACE:
        raise StartupError(
            f"{option} {listen}: others are told this address to connect to: name the one by which"
            " they reach this machine"
        )
