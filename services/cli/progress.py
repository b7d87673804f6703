"""How far a starting mesh has come, as the control service sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.cli.members import READY, describe
from services.cli.supervisor import Supervisor
from services.runtime.channels import open_channel
from services.runtime.tls import Tls

POLL_S = 0.1


async def watch_until_ready(
    control: str, supervisors: Sequence[Supervisor], tls: Tls | None = None
) -> None:
    """Report each change of the supervised members, until all are ready at once.

    Except those that were given up: the mesh goes on without them, or does not go on.
    """
    shown: dict[Supervisor, str] = {}
    async with open_channel(control, tls) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        while True:
            members = await _list(stub)
            found = [(supervisor, members.get(supervisor.pid)) for supervisor in supervisors]
            for supervisor, member in found:
                text = describe(member) if member else ""
                if text and shown.get(supervisor) != text:
                    shown[supervisor] = text
                    supervisor.report(text)
            if all(
                supervisor.given_up or (member and member.state == READY)
                for supervisor, member in found
            ):
                return
            await asyncio.sleep(POLL_S)


async def _list(
    stub: control_pb2_grpc.ControlServiceStub,
) -> dict[int | None, control_pb2.Member]:
    try:
        response = await stub.ListMembers(control_pb2.ListMembersRequest(), timeout=5)
    except grpc.aio.AioRpcError:
        return {}  # it is being started again
    return {member.pid: member for member in response.members}
