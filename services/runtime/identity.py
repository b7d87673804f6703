"""Who calls, asked before anything of the call is read.

A caller is known by an API key in the metadata, as `authorization: Bearer KEY` or
`x-api-key: KEY`, or by the DNS names and URIs in its verified certificate. While no tenant
is configured nobody is asked.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import grpc
from grpc_health.v1 import health

from services.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
)
from services.core.tenants import ANYBODY, Tenant, Tenants
from services.runtime.interceptor import (
    Behaviour,
    Context,
    Handler,
    WrappingInterceptor,
    behaviour_of,
    checked,
    write_all,
)
from services.runtime.protocol import TENANT_KEY
from services.runtime.telemetry import Metadata

AUTHORIZATION_KEY = "authorization"
API_KEY_KEY = "x-api-key"
HOW = f"send `{AUTHORIZATION_KEY}: Bearer KEY` or `{API_KEY_KEY}: KEY`"
UNKNOWN = "UNKNOWN_CREDENTIALS"
# gRPC's own bound is another, 16 MiB, until the client has confirmed its settings.
MAX_METADATA_BYTES = 16 << 10

# Those names in a certificate that can be a tenant's.
_NAME_PROPERTIES = ("peer_dns", "peer_uri")
_BEARER = re.compile(r"bearer +(\S.*)", re.IGNORECASE | re.DOTALL)
_HEALTH = f"/{health.SERVICE_NAME}/"

_caller: ContextVar[Tenant] = ContextVar("caller", default=ANYBODY)


class CallBounds(NamedTuple):
    # The settings router.max_deadline_s and router.request_timeout_s.
    max_deadline_s: float
    request_timeout_s: float


class Edge(Protocol):
    """What is asked at each call, by the configuration of that moment."""

    @property
    def tenants(self) -> Tenants: ...

    @property
    def call_bounds(self) -> CallBounds: ...

    def admit(self, tenant: Tenant) -> AbstractContextManager[object]:
        """What a call holds while it lasts. Raises Overloaded when the tenant has enough."""
        ...

    def refused(self, context: Context, tenant: Tenant, error: Overloaded, since_s: float) -> None:
        """By `admit`; the call came at `since_s`, on the monotonic clock."""
        ...


class CallerInterceptor(WrappingInterceptor):
    """Lets each call in as its tenant's, and bounds how long it may take.

    A method that takes one message is served as one that takes a stream of them, which is
    the same on the wire: gRPC would otherwise read and parse the message first, and wait
    for it for ever. Health is open to everybody.
    """

    def __init__(self, edge: Edge) -> None:
        super().__init__()
        self._edge = edge

    def wrap(self, handler: Handler, method: str) -> Handler:
        behaviour = self._taking_a_stream(handler)
        if not method.startswith(_HEALTH):
            behaviour = self._for_a_tenant(behaviour)
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(
            behaviour,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _for_a_tenant(self, behaviour: Behaviour) -> Behaviour:
        async def respond(requests: Any, context: Context) -> Any:
            arrived_s = time.monotonic()
            metadata = context.invocation_metadata() or ()
            check_size(metadata)
            tenant = self._identify(metadata, context)
            _caller.set(tenant)
            longest_s = self._edge.call_bounds.max_deadline_s
            try:
                held = self._edge.admit(tenant)
            except Overloaded as error:
                self._edge.refused(context, tenant, error, arrived_s)
                raise
            with held:
                try:
                    async with asyncio.timeout(longest_s) as deadline:
                        return await behaviour(requests, context)
                except TimeoutError:
                    if not deadline.expired():
                        raise
                    raise DeadlineExceeded(
                        f"a request lasts at most {longest_s:g} s (router.max_deadline_s)",
                        reason="MAX_DEADLINE",
                    ) from None

        return respond

    def _taking_a_stream(self, handler: Handler) -> Behaviour:
        behaviour = behaviour_of(handler)

        async def respond(requests: Any, context: Context) -> Any:
            given = requests
            if not handler.request_streaming:
                given = await _only_message(context, self._edge.call_bounds.request_timeout_s)
            responses = behaviour(given, context)
            if handler.response_streaming:
                return await write_all(responses, context)
            return await responses

        return respond

    def _identify(self, metadata: Metadata, context: Context) -> Tenant:
        tenants = self._edge.tenants
        if not tenants.required:
            return ANYBODY
        return identify(tenants, metadata, certified_names(context))


def caller() -> Tenant:
    """Whose call this task serves; ANYBODY while there are no tenants."""
    return _caller.get()


def check_size(metadata: Metadata) -> None:
    """Raises Overloaded, whose status is also gRPC's for it."""
    num_bytes = sum(len(key) + len(value) for key, value in metadata)
    if num_bytes > MAX_METADATA_BYTES:
        raise Overloaded(
            f"the metadata must be at most {MAX_METADATA_BYTES} bytes; got {num_bytes}",
            reason="METADATA_TOO_LONG",
        )


def identify(tenants: Tenants, metadata: Metadata, names: Iterable[str]) -> Tenant:
    """`names`: those in the caller's verified certificate.

    Raises Unauthenticated without credentials, or with a key that is nobody's, and
    PermissionDenied for credentials of several tenants or a claim to be another one.
    """
    pairs = tuple(metadata)
    names = tuple(names)
    keys = keys_in(pairs)
    found = {tenant.name: tenant for name in names if (tenant := tenants.by_identity(name))}
    for key in keys:
        tenant = tenants.by_key(key)
        if tenant is None:
            raise Unauthenticated(f"no tenant has this API key; {HOW}", reason=UNKNOWN)
        found[tenant.name] = tenant
    if not found and names:
        raise Unauthenticated(
            f"no tenant has a name of this certificate, {', '.join(names)}", reason=UNKNOWN
        )
    if not found:
        raise Unauthenticated(f"who calls? {HOW}", reason="NO_CREDENTIALS")
    if len(found) > 1:
        raise PermissionDenied(
            "these credentials are of several tenants: send those of one",
            reason="SEVERAL_TENANTS",
        )
    [tenant] = found.values()
    if any(value not in ("", tenant.name) for value in _values(pairs, TENANT_KEY)):
        raise PermissionDenied(
            f"{TENANT_KEY} names another tenant than the credentials: leave it out",
            reason="FOREIGN_TENANT",
        )
    return tenant


def keys_in(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[str, ...]:
    """All API keys; "" for what is no form of one."""
    pairs = tuple(metadata)
    bearers = (_BEARER.fullmatch(value) for value in _values(pairs, AUTHORIZATION_KEY))
    keys = (bearer[1].strip() if bearer else "" for bearer in bearers)
    return *keys, *_values(pairs, API_KEY_KEY)


def certified_names(context: Context) -> tuple[str, ...]:
    """DNS names and URIs; none without a verified certificate."""
    properties = context.auth_context()
    return tuple(
        name.decode(errors="replace")
        for kind in _NAME_PROPERTIES
        for name in properties.get(kind, ())
    )


def _values(pairs: Iterable[tuple[str, str | bytes]], key: str) -> Iterator[str]:
    return (str(value) for name, value in pairs if name == key)


async def _only_message(context: Context, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            message = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(
            f"no request message came within {timeout_s:g} s (router.request_timeout_s)",
            reason="NO_REQUEST",
        ) from None
    if message is grpc.aio.EOF:
        raise InvalidArgument.of("request", "must be one message; the call ended without")
    return checked(message)
