"""What a command asks the observer of a mesh, over its HTTP."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import socket
import ssl
from typing import Any, NamedTuple
from urllib.parse import quote

from firsttoken._security import is_loopback
from firsttoken.control.v1 import control_pb2
from services.cli import rpc
from services.cli.failures import Failure
from services.cli.members import READY
from services.runtime.process import INSECURE_VARIABLE
from services.runtime.tls import CA_FILE, MESH_NAME, Tls

# It may have thousands of prompts to compare.
TIMEOUT_S = 60.0
PAGE_KEY_VARIABLE = "FIRSTTOKEN_PAGE_KEY"
_CODES = {401: "UNAUTHENTICATED", 404: "NOT_FOUND"}


class Answer(NamedTuple):
    status: int
    body: bytes


def ask(arguments: argparse.Namespace, *path: str) -> Any:
    """What is at `path`, which is quoted here: the JSON, read.

    `arguments`: those of rpc.add_control_option. Raises Failure.
    """
    return json.loads(ask_bytes(arguments, *path))


def ask_bytes(arguments: argparse.Namespace, *path: str) -> bytes:
    """The same, as it is."""
    tls = rpc.open_tls(arguments.tls_dir)
    return rpc.run(_ask(arguments.control, tls, "/".join(map(_quoted, path))))


def _quoted(part: str) -> str:
    return quote(part, safe="")


async def _ask(control: str, tls: Tls | None, path: str) -> bytes:
    address = await _find(control, tls)
    try:
        answer = await asyncio.to_thread(_get, address, f"/{path}", tls)
    except (OSError, http.client.HTTPException) as error:
        raise Failure(
            f"the observer at {address} does not answer: {error or type(error).__name__}",
            code="UNAVAILABLE",
        ) from None
    if answer.status == http.client.OK:
        return answer.body
    problem = _problem(answer)
    if answer.status == http.client.UNAUTHORIZED:
        problem = f"{problem}: set {PAGE_KEY_VARIABLE}"
    raise Failure(problem, code=_CODES.get(answer.status, "INTERNAL"))


async def _find(control: str, tls: Tls | None) -> str:
    """Where its HTTP is."""
    async with rpc.control_stub(control, tls) as stub:
        listed = await stub.ListMembers(control_pb2.ListMembersRequest(), timeout=rpc.TIMEOUT_S)
    observers = [m for m in listed.members if m.role == control_pb2.MEMBER_ROLE_OBSERVER]
    ready = [member for member in observers if member.state == READY and member.http_address]
    if not ready:
        state = "is ready: it is starting" if observers else "is in this mesh"
        raise Failure(
            f"no observer {state}; `firsttoken up` starts one, as does python -m services.observer",
            code="FAILED_PRECONDITION",
        )
    # The one that all processes tell, where there are several.
    return min(ready, key=lambda member: member.id).http_address


def _get(address: str, path: str, tls: Tls | None) -> Answer:
    """Raises OSError or HTTPException; Failure for a key that must not be sent."""
    headers = {"accept": "application/json"}
    if key := _page_key():
        _check_may_send(address, tls)
        headers["authorization"] = f"Bearer {key}"
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT_S)
    try:
        if tls is not None:
            context = ssl.create_default_context(cafile=tls.directory / CA_FILE)
            plain = socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S)
            connection.sock = context.wrap_socket(plain, server_hostname=MESH_NAME)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, response.read())
    finally:
        connection.close()


def _page_key() -> str:
    """ "" where there is none. Raises Failure for what can be none, without showing it."""
    key = os.environ.get(PAGE_KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise Failure(f"{PAGE_KEY_VARIABLE} holds no key", code="INVALID_ARGUMENT")
    return key


def _check_may_send(address: str, tls: Tls | None) -> None:
    insecure = os.environ.get(INSECURE_VARIABLE) == "1"
    if tls is None and not insecure and not is_loopback(address):
        raise Failure(
            f"the key in {PAGE_KEY_VARIABLE} would cross the network to {address} unencrypted: use"
            f" --tls-dir DIR, or accept it with {INSECURE_VARIABLE}=1",
            code="FAILED_PRECONDITION",
        )


def _problem(answer: Answer) -> str:
    try:
        return str(json.loads(answer.body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the observer answers with HTTP status {answer.status}"
