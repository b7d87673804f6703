"""Calls of a command to the mesh, and what their failures mean to a person."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import grpc
from google.protobuf.message import Message

from firsttoken._errors import to_mesh_error
from firsttoken._security import is_loopback
from firsttoken.client import MeshClient, MeshError
from firsttoken.control.v1 import control_pb2_grpc
from services.cli.failures import Failure
from services.core.errors import InvalidArgument
from services.runtime.channels import open_channel
from services.runtime.probe import explain
from services.runtime.process import INSECURE_VARIABLE, add_tls_option
from services.runtime.startup import StartupError
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, MESH_NAME, Tls

T = TypeVar("T")
P = ParamSpec("P")

TIMEOUT_S = 10.0
API_KEY_VARIABLE = "FIRSTTOKEN_API_KEY"


def add_control_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--control",
        type=parse_address,
        default=os.environ.get("FIRSTTOKEN_CONTROL") or "127.0.0.1:7101",
        metavar="HOST:PORT",
        help="the control service (default: FIRSTTOKEN_CONTROL, or 127.0.0.1:7101)",
    )
    add_tls_option(parser)


def add_router_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router",
        type=parse_address,
        default=os.environ.get("FIRSTTOKEN_ROUTER") or "127.0.0.1:7100",
        metavar="HOST:PORT",
        help="where the mesh answers (default: FIRSTTOKEN_ROUTER, or 127.0.0.1:7100)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE) or None,
        metavar="KEY",
        help=f"who is calling (default: {API_KEY_VARIABLE}, which others on this machine cannot"
        " see, as they can a command line)",
    )
    add_tls_option(parser)


def parse_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT; got {text!r}")
    return text


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run; what a person got wrong becomes a Failure."""
    return readably(asyncio.run, main)


def readably(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What it returns; what a person got wrong becomes a Failure."""
    try:
        return work(*args, **kwargs)
    except InvalidArgument as error:
        raise invalid(error) from None


def invalid(error: InvalidArgument) -> Failure:
    violations = [violation._asdict() for violation in error.violations]
    return Failure(error.message, code=error.status, reason=error.reason, violations=violations)


def open_tls(directory: Path | None, *, service: bool = True) -> Tls | None:
    """What --tls-dir names. Raises Failure when it is of no use.

    `service`: the call goes to a part that wants a certificate of the mesh.
    """
    try:
        return Tls(directory, service=service) if directory is not None else None
    except StartupError as error:
        raise Failure(str(error), code="FAILED_PRECONDITION") from None


def make_client(router: str, *, tls: Tls | None, api_key: str | None = None) -> MeshClient:
    """Raises Failure for a key that must not be sent."""
    insecure = os.environ.get(INSECURE_VARIABLE) == "1"
    if api_key and tls is None and not insecure and not is_loopback(router):
        raise Failure(
            f"the API key would cross the network to {router} unencrypted: use --tls-dir DIR, or"
            f" accept it with {INSECURE_VARIABLE}=1",
            code="FAILED_PRECONDITION",
        )
    try:
        return MeshClient(router, api_key=api_key, insecure=insecure, **_files(tls))
    except ValueError as error:
        raise Failure(f"--api-key: {error}", code="INVALID_ARGUMENT") from None


@contextlib.asynccontextmanager
async def mesh_client(
    router: str, *, tls_dir: Path | None = None, api_key: str | None = None
) -> AsyncIterator[MeshClient]:
    """Failed requests inside become a Failure."""
    tls = open_tls(tls_dir, service=False)
    try:
        async with make_client(router, tls=tls, api_key=api_key) as client:
            yield client
    except MeshError as error:
        nobody = await _nobody("router", router, "--router", tls)
        raise to_failure(error, nobody=nobody) from None


@contextlib.asynccontextmanager
async def control_stub(
    address: str, tls: Tls | None
) -> AsyncIterator[control_pb2_grpc.ControlServiceStub]:
    """Failed calls inside become a Failure."""
    async with open_channel(address, tls) as channel:
        try:
            yield control_pb2_grpc.ControlServiceStub(channel)
        except grpc.aio.AioRpcError as error:
            nobody = await _nobody("control service", address, "--control", tls)
            raise to_failure(to_mesh_error(error), nobody=nobody) from None


def plain(message: Message) -> dict[str, Any]:
    """The fields of a message without lists; MessageToDict makes strings of uint64."""
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return {name: _plain_value(value) for name, value in values.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    return dict(value) if isinstance(value, Mapping) else value


def to_failure(error: MeshError, *, nobody: str) -> Failure:
    """`nobody`: what to say when nothing answers at the address."""
    code = error.code.name
    # The mesh gives a reason with each of its own errors.
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        return Failure(nobody, code=code)
    fields: dict[str, Any] = {"code": code}
    if error.reason:
        fields["reason"] = error.reason
    if error.violations:
        fields["violations"] = [violation._asdict() for violation in error.violations]
    if error.retry_delay_s is not None:
        fields["retry_delay_s"] = error.retry_delay_s
    return Failure(error.message, **fields)


def _files(tls: Tls | None) -> dict[str, Any]:
    """As MeshClient takes them."""
    if tls is None:
        return {}
    files: dict[str, Any] = {"ca_file": tls.directory / CA_FILE, "server_name": MESH_NAME}
    if tls.files.certificate:
        files["cert_file"] = tls.directory / CERTIFICATE_FILE
        files["key_file"] = tls.directory / KEY_FILE
    return files


async def _nobody(what: str, address: str, option: str, tls: Tls | None) -> str:
    if problem := await explain(address, tls):
        return problem
    hint = f"start a mesh with `firsttoken up`, or name another address with {option}"
    return f"no {what} at {address}: {hint}"
