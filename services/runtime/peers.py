"""Who is at the other end of a connection: the names in its verified certificate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from services.core.errors import PermissionDenied
from services.runtime.interceptor import Behaviour, Context, Handler
from services.runtime.tls import MESH_NAME


def is_mesh_peer(context: Context) -> bool:
    """Whether the caller's certificate has the DNS name of the mesh's services.

    Neither its common name nor a name of another kind counts.
    """
    return MESH_NAME.encode() in context.auth_context().get("peer_dns", ())


class MeshPeersOnly(grpc.aio.ServerInterceptor):
    """Refuses a certificate that our CA gave to somebody else, a tenant for example."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = handler, _guarded(handler)
        return known[1]


def _guarded(handler: Handler) -> Handler:
    kinds = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }
    name, make = kinds[handler.request_streaming, handler.response_streaming]
    return make(
        _for_peers(getattr(handler, name)),
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
