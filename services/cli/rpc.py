"""Calls of a command to the mesh, and what their failures mean to a person."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from firsttoken._errors import to_mesh_error
from firsttoken.client import MeshClient, MeshError
from firsttoken.control.v1 import control_pb2_grpc
from services.cli.failures import Failure
from services.core.errors import InvalidArgument
from services.runtime.channels import open_channel

T = TypeVar("T")

TIMEOUT_S = 10.0


def add_control_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--control",
        type=_address,
        default=os.environ.get("FIRSTTOKEN_CONTROL") or "127.0.0.1:7101",
        metavar="HOST:PORT",
        help="the control service (default: FIRSTTOKEN_CONTROL, or 127.0.0.1:7101)",
    )


def add_router_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router",
        type=_address,
        default=os.environ.get("FIRSTTOKEN_ROUTER") or "127.0.0.1:7100",
        metavar="HOST:PORT",
        help="where the mesh answers (default: FIRSTTOKEN_ROUTER, or 127.0.0.1:7100)",
    )


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT; got {text!r}")
    return text


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run; what a person got wrong becomes a Failure."""
    try:
        return asyncio.run(main)
    except InvalidArgument as error:
        violations = [violation._asdict() for violation in error.violations]
        raise Failure(
            error.message, code=error.status, reason=error.reason, violations=violations
        ) from None


@contextlib.asynccontextmanager
async def mesh_client(router: str) -> AsyncIterator[MeshClient]:
    """Failed requests inside become a Failure."""
    try:
        async with MeshClient(router) as client:
            yield client
    except MeshError as error:
        raise to_failure(error, nobody=_nobody("router", router, "--router")) from None


@contextlib.asynccontextmanager
async def control_stub(address: str) -> AsyncIterator[control_pb2_grpc.ControlServiceStub]:
    """Failed calls inside become a Failure."""
    async with open_channel(address) as channel:
        try:
            yield control_pb2_grpc.ControlServiceStub(channel)
        except grpc.aio.AioRpcError as error:
            nobody = _nobody("control service", address, "--control")
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


def _nobody(what: str, address: str, option: str) -> str:
    hint = f"start a mesh with `firsttoken up`, or name another address with {option}"
    return f"no {what} at {address}: {hint}"
