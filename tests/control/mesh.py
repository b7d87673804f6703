"""Members and calls for the tests of the control service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.runtime.channels import open_channel

Join: TypeAlias = "grpc.aio.StreamStreamCall[control_pb2.JoinRequest, control_pb2.JoinResponse]"


def make_member(member_id: str, **fields: object) -> control_pb2.Member:
    known: dict[str, object] = {
        "role": control_pb2.MEMBER_ROLE_WORKER,
        "address": "127.0.0.1:7000",
        "state": control_pb2.MEMBER_STATE_READY,
        **fields,
    }
    return control_pb2.Member(id=member_id, **known)  # type: ignore[arg-type]


class Operator:
    """Whoever asks the control service and changes the configuration."""

    def __init__(self, stub: control_pb2_grpc.ControlServiceStub) -> None:
        self.stub = stub

    async def set_config(
        self, changes: dict[str, str], expected_generation: int | None = None
    ) -> control_pb2.Configuration:
        request = control_pb2.SetConfigRequest(
            changes=changes, expected_generation=expected_generation
        )
        return (await self.stub.SetConfig(request)).configuration

    async def join(self, member: control_pb2.Member) -> Join:
        """A bare stream that has announced `member` and heard nothing yet."""
        stream = self.stub.Join()
        await stream.write(control_pb2.JoinRequest(member=member))
        return stream

    async def generation(self) -> int:
        answer = await self.stub.GetConfig(control_pb2.GetConfigRequest())
        return answer.configuration.generation

    async def member_ids(self) -> list[str]:
        return [member.id for member in await self.members()]

    async def nobody_is_left(self) -> bool:
        return not await self.members()

    async def members(self) -> list[control_pb2.Member]:
        return list((await self.stub.ListMembers(control_pb2.ListMembersRequest())).members)


async def read_to_end(stream: Join) -> list[control_pb2.JoinResponse]:
    responses = []
    while (response := await stream.read()) is not grpc.aio.EOF:
        assert isinstance(response, control_pb2.JoinResponse)
        responses.append(response)
    return responses


@contextlib.asynccontextmanager
async def operating(address: str) -> AsyncIterator[Operator]:
    async with open_channel(address) as channel:
        yield Operator(control_pb2_grpc.ControlServiceStub(channel))
