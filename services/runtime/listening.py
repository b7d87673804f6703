"""A socket to listen on, or one readable line that says why there is none."""

from __future__ import annotations

import asyncio
import errno
import socket

from services.runtime.startup import StartupError, parse_listen


async def bind(listen: str) -> tuple[socket.socket, str]:
    """On the first address of the host that can be had, and where that is. Raises StartupError."""
    host, port = parse_listen(listen)
    bare = host.removeprefix("[").removesuffix("]") or None
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such host"
        raise StartupError(f"cannot listen on {listen}: {reason}") from error
    reason = "it has no address"
    for family, kind, protocol, _, address in found:
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError as error:
            listening.close()
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                reason = "the port is in use; choose another"
        else:
            return listening, f"{host}:{listening.getsockname()[1]}"
    raise StartupError(f"cannot listen on {listen}: {reason}")
