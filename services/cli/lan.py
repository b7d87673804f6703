"""What `firsttoken up --lan` adds to a mesh."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

from services.cli.failures import CANNOT_START, Failure
from services.cli.invitation import JOIN_PORT
from services.cli.mesh import LocalMesh
from services.cli.screen import Screen
from services.core.settings import MeshConfig
from services.models.catalog import find_model

# By the default route; nothing is sent there (TEST-NET-1, RFC 5737).
ANYWHERE = ("192.0.2.1", 9)


def lan_tls_directory() -> Path:
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "firsttoken" / "lan-tls"


@contextlib.asynccontextmanager
async def open_desk(
    mesh: LocalMesh, config: MeshConfig, screen: Screen, arguments: argparse.Namespace
) -> AsyncIterator[None]:
    # Certificates' imports take longer than all else of a command.
    from services.cli.lan_desk import JoinDesk

    assert mesh.tls is not None
    desk = JoinDesk(
        arguments.lan,
        arguments.join_port,
        directory=mesh.tls.directory,
        control=mesh.control,
        version=version("firsttoken"),
        model=find_model(config.mesh.model, with_weights=False).name,
    )
    async with desk:
        screen.report("mesh", "a worker joins from another machine of this network with")
        screen.report("mesh", "    " + join_command(desk.address, desk.invitation.token))
        yield


def join_command(address: str, token: str) -> str:
    place = address.removesuffix(f":{JOIN_PORT}")
    return f"firsttoken worker --join {place} --token {token}"


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`. Nothing is sent. Raises Failure."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Failure(f"no way to {host}: {reason}", exit_status=CANNOT_START) from None
