"""ControlService: protobuf to the hub and back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.control.hub import Hub, Session, configuration_of
from services.core.config import Snapshot, to_json, without_passwords
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from services.runtime.server import Context
from services.runtime.tasks import end_tasks


class ControlService(control_pb2_grpc.ControlServiceServicer):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def Join(
        self, request_iterator: AsyncIterator[control_pb2.JoinRequest], context: Context
    ) -> AsyncIterator[control_pb2.JoinResponse]:
        first = await anext(request_iterator, None)
        if first is None:
            raise InvalidArgument.of("member", "must be announced by the first message")
        with self._hub.session(first.member) as session:
            pushes = contextlib.aclosing(session.pushes())
            async with self._following(request_iterator, session), pushes as responses:
                async for response in responses:
                    yield response

    @contextlib.asynccontextmanager
    async def _following(
        self, requests: AsyncIterator[control_pb2.JoinRequest], session: Session
    ) -> AsyncIterator[None]:
        """Take the member's reports; their end is the session's end."""
        task = asyncio.create_task(self._follow(requests, session), name="follow member")
        try:
            yield
        finally:
            await end_tasks([task])
            failure = None if task.cancelled() else task.exception()
        if failure is not None:
            raise failure

    async def _follow(
        self, requests: AsyncIterator[control_pb2.JoinRequest], session: Session
    ) -> None:
        try:
            async for request in requests:
                if request.member.id != session.member_id:
                    raise InvalidArgument.of("member.id", "must stay the same in one stream")
                self._hub.report(session.id, request.member)
        finally:
            session.end()

    async def SetConfig(
        self, request: control_pb2.SetConfigRequest, context: Context
    ) -> control_pb2.SetConfigResponse:
        expected = request.expected_generation if request.HasField("expected_generation") else None
        snapshot = await self._hub.change(dict(request.changes), expected)
        return control_pb2.SetConfigResponse(configuration=_shown(snapshot))

    async def GetConfig(
        self, request: control_pb2.GetConfigRequest, context: Context
    ) -> control_pb2.GetConfigResponse:
        return control_pb2.GetConfigResponse(
            configuration=_shown(self._hub.state.snapshot), default_json=to_json(MeshConfig())
        )

    async def ListMembers(
        self, request: control_pb2.ListMembersRequest, context: Context
    ) -> control_pb2.ListMembersResponse:
        state = self._hub.state
        return control_pb2.ListMembersResponse(
            generation=state.snapshot.generation, members=state.members
        )


def _shown(snapshot: Snapshot) -> control_pb2.Configuration:
    return configuration_of(snapshot._replace(config=without_passwords(snapshot.config)))
