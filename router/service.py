"""InferenceService on a server."""

from __future__ import annotations

from typing import TypeAlias

import grpc

from firsttoken.router.v1 import inference_pb2
from router.mesh import Mesh
from router.planning import PlanningJourney
from router.proxied import ProxiedJourney
from services.runtime.interceptor import Context

Handler: TypeAlias = "grpc.RpcMethodHandler[inference_pb2.GenerateRequest, bytes]"

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


class InferenceService:
    """Responses have no serializer: they are bytes already, most of them a worker's own."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def add_to(self, server: grpc.aio.Server) -> None:
        generate: Handler = grpc.unary_stream_rpc_method_handler(
            self.Generate, request_deserializer=inference_pb2.GenerateRequest.FromString
        )
        plan = grpc.unary_unary_rpc_method_handler(
            self.Plan,
            request_deserializer=inference_pb2.PlanRequest.FromString,
            response_serializer=inference_pb2.PlanResponse.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(
            SERVICE_NAME, {"Generate": generate, "Plan": plan}
        )
        server.add_generic_rpc_handlers((handlers,))

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        # It writes the responses itself. A generator would be left where it is when
        # the client goes away during a write, and hold its slot until collected.
        await ProxiedJourney(self._mesh, request, context).run()

    async def Plan(
        self, request: inference_pb2.PlanRequest, context: Context
    ) -> inference_pb2.PlanResponse:
        return await PlanningJourney(self._mesh, request.request, context).run()
