"""Who is at the other end of a connection: the names in its verified certificate."""

from __future__ import annotations

from typing import Any

import grpc

from services.core.errors import PermissionDenied
from services.runtime.interceptor import (
    Behaviour,
    Context,
    Handler,
    WrappingInterceptor,
    behaviour_of,
)
from services.runtime.tls import MESH_NAME


def is_mesh_peer(context: Context) -> bool:
    """Whether the caller's certificate has the DNS name of the mesh's services.

    Neither its common name nor a name of another kind counts.
    """
    return MESH_NAME.encode() in context.auth_context().get("peer_dns", ())


class MeshPeersOnly(WrappingInterceptor):
    """Refuses a certificate that our CA gave to somebody else, a tenant for example."""

    def wrap(self, handler: Handler, method: str) -> Handler:
        kinds = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        return kinds[handler.request_streaming, handler.response_streaming](
            _for_peers(behaviour_of(handler)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _for_peers(behaviour: Behaviour) -> Behaviour:
    # The interceptor outside of this one takes both a coroutine and a generator.
    def respond(request: Any, context: Context) -> Any:
        if not is_mesh_peer(context):
            raise PermissionDenied(
                f"only services of the mesh may call this: their certificates have the DNS"
                f" name {MESH_NAME}",
                reason="NOT_A_MESH_PEER",
            )
        return behaviour(request, context)

    return respond
