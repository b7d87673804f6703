"""Settings changed in a running mesh, so that one run compares both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import grpc.aio

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.bench.processes import until
from services.runtime.channels import open_channel
from services.runtime.startup import StartupError

APPLY_TIMEOUT_S = 60.0


async def configure(control: str, changes: Mapping[str, Any]) -> None:
    """`changes`: dotted key to value. Returns when every member has applied them.

    Raises StartupError when the mesh does not take them.
    """
    try:
        await _configure(control, changes)
    except grpc.aio.AioRpcError as error:
        raise StartupError(f"the mesh's control service failed: {error.details()}") from error
    except TimeoutError as error:
        problem = f"some of the mesh did not apply its settings within {APPLY_TIMEOUT_S:g} s"
        raise StartupError(problem) from error


async def _configure(control: str, changes: Mapping[str, Any]) -> None:
    texts = {key: json.dumps(value) for key, value in changes.items()}
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        response = await stub.SetConfig(control_pb2.SetConfigRequest(changes=texts))
        generation = response.configuration.generation
        await until(lambda: _all_have(stub, generation), APPLY_TIMEOUT_S)


async def _all_have(stub: control_pb2_grpc.ControlServiceStub, generation: int) -> bool:
    members = (await stub.ListMembers(control_pb2.ListMembersRequest())).members
    return all(member.generation >= generation for member in members)
