"""Calls of a command to the mesh, and what their failures mean to a person."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from firsttoken.control.v1 import control_pb2_grpc
from services.cli.failures import Failure
from services.core.errors import InvalidArgument
from services.runtime.channels import open_channel

T = TypeVar("T")

TIMEOUT_S = 10.0


def add_control_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--control",
        default=os.environ.get("FIRSTTOKEN_CONTROL") or "127.0.0.1:7101",
        metavar="HOST:PORT",
        help="the control service (default: FIRSTTOKEN_CONTROL, or 127.0.0.1:7101)",
    )


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run; what a person got wrong becomes a Failure."""
    try:
        return asyncio.run(main)
    except InvalidArgument as error:
        raise from_invalid(error) from None


@contextlib.asynccontextmanager
async def control_stub(address: str) -> AsyncIterator[control_pb2_grpc.ControlServiceStub]:
    """Failed calls inside become a Failure."""
    async with open_channel(address) as channel:
        with explain(f"the control service at {address}", "--control"):
            yield control_pb2_grpc.ControlServiceStub(channel)


@contextlib.contextmanager
def explain(peer: str, option: str) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error, peer, option) from None


def from_invalid(error: InvalidArgument) -> Failure:
    violations = [violation._asdict() for violation in error.violations]
    return Failure(error.message, code=error.status, reason=error.reason, violations=violations)


def from_rpc(error: grpc.aio.AioRpcError, peer: str, option: str) -> Failure:
    """The status, with the google.rpc details of one that the mesh itself gave."""
    code = error.code()
    status = rpc_status.from_call(error)
    if status is None and code is grpc.StatusCode.UNAVAILABLE:
        hint = f"start a mesh with `firsttoken up`, or name another address with {option}"
        return Failure(f"{peer} does not answer; {hint}", code=code.name)
    fields: dict[str, Any] = {"code": code.name}
    for detail in status.details if status else ():
        fields |= _fields(detail)
    return Failure(error.details() or f"{peer} answers {code.name}", **fields)


def _fields(detail: AnyMessage) -> dict[str, Any]:
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    if detail.Unpack(info):
        return {"reason": info.reason}
    if detail.Unpack(bad_request):
        found = bad_request.field_violations
        return {"violations": [{"field": v.field, "description": v.description} for v in found]}
    if detail.Unpack(retry):
        return {"retry_delay_s": retry.retry_delay.ToMilliseconds() / 1000}
    return {}
