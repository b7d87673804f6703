"""The ASGI application: routes, and around them what every request has.

Edge              request id, trace, metrics, access log
└── CORS          only when gateway.cors_origins says so
    └── errors    whatever is raised becomes an answer in OpenAI's form
        └── Router
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firsttoken.client import MeshError
from services.gateway import routes
from services.gateway.errors import ApiError, ClientGone, from_mesh, internal_error, unavailable
from services.gateway.exchange import EXCHANGE, Exchange
from services.gateway.gateway import Gateway
from services.runtime.logs import event
from services.runtime.telemetry import TRACEPARENT

Handler: TypeAlias = Callable[[Gateway, Exchange], Awaitable[None]]

# As nginx logs it: the client left before its answer.
CLIENT_GONE = 499
# What a script in a browser may read of an answer.
EXPOSED = ("x-request-id", TRACEPARENT, "server-timing", "retry-after", "retry-after-ms")

logger = logging.getLogger(__name__)


class Edge:
    """The outermost part."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._router = make_router(gateway)
        self._cors_origins = ""
        self._app: ASGIApp = self._serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        exchange = Exchange(scope)
        exchange.trace = exchange.caller.child(sampled=self._gateway.samples(exchange.caller))
        scope[EXCHANGE] = exchange
        # Starlette's routes then raise what they do not find.
        scope["app"] = self
        own = [
            (b"x-request-id", exchange.request_id.encode()),
            (b"traceparent", exchange.trace.metadata()[0][1].encode()),
        ]

        async def send_with_own(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        in_flight = self._gateway.metrics.in_flight
        in_flight.inc()
        try:
            await self._with_cors()(scope, receive, send_with_own)
        finally:
            in_flight.dec()
            self._count(exchange)

    def _with_cors(self) -> ASGIApp:
        """As the configuration has it now."""
        origins = self._gateway.settings.cors_origins
        if origins != self._cors_origins:
            self._cors_origins = origins
            self._app = self._serve
            if origins:
                self._app = CORSMiddleware(
                    self._serve,
                    allow_origins=origins.split(),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=EXPOSED,
                )
        return self._app

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        exchange.attach(receive, send)
        try:
            await self._router(scope, receive, send)
        except ClientGone:
            exchange.status, exchange.error = CLIENT_GONE, "the client is gone"
        except asyncio.CancelledError:
            # Only the server's end cancels a request; this task ends here anyway.
            await _answer(exchange, unavailable("the gateway stops", code="stopping"))
        except HTTPException as error:
            await _answer(exchange, _of_route(error, exchange))
        except ApiError as error:
            await _answer(exchange, error)
        except MeshError as error:
            await _answer(exchange, from_mesh(error, str))
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.route)
            await _answer(exchange, internal_error())

    def _count(self, exchange: Exchange) -> None:
        gateway, duration_s = self._gateway, time.monotonic() - exchange.arrived_s
        status = str(exchange.status)
        gateway.metrics.requests_of(exchange.route, status, exchange.request_class).inc()
        gateway.metrics.duration_of(exchange.route).observe(duration_s)
        if not gateway.settings.access_log:
            return
        event(
            logger,
            logging.INFO,
            "request",
            method=exchange.method,
            path=exchange.path[:256],
            status=exchange.status,
            duration_ms=round(duration_s * 1000, 2),
            ttft_ms=None if exchange.ttft_s is None else round(exchange.ttft_s * 1000, 2),
            request_id=exchange.request_id,
            trace_id=exchange.trace.trace_id,
            client=exchange.client[0] if exchange.client else "",
            error=exchange.error,
        )


def make_router(gateway: Gateway) -> Router:
    def route(path: str, handler: Handler, method: str) -> Route:
        return Route(path, _Endpoint(gateway, path, handler), methods=[method])

    return Router(
        [
            route("/v1/chat/completions", routes.chat, "POST"),
            route("/v1/completions", routes.completions, "POST"),
            route("/v1/models", routes.models, "GET"),
            route("/v1/models/{model:path}", routes.model, "GET"),
            route("/health", routes.health, "GET"),
            route("/ready", routes.ready, "GET"),
            route("/metrics", routes.metrics, "GET"),
            route("/openapi.json", routes.openapi, "GET"),
        ],
        redirect_slashes=False,
    )


class _Endpoint:
    """A route's handler as an ASGI application."""

    def __init__(self, gateway: Gateway, path: str, handler: Handler) -> None:
        self._gateway = gateway
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        exchange.route = self._path
        exchange.path_params = scope["path_params"]
        await self._handler(self._gateway, exchange)


async def _answer(exchange: Exchange, error: ApiError) -> None:
    exchange.error = error.message
    if not exchange.status:
        await exchange.respond(error.status, error.body(), error.headers)
    elif exchange.is_streaming:
        await exchange.break_off(error)


def _of_route(error: HTTPException, exchange: Exchange) -> ApiError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{exchange.method} is not allowed here; allowed: {allowed}"
        headers = {"allow": allowed}
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(404, f"there is nothing at {exchange.path[:256]!r}", code="not_found")
