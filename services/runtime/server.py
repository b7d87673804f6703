"""A gRPC server as every process of the mesh runs it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence
from types import TracebackType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection as grpc_reflection

from services.runtime.channels import (
    KEEPALIVE_TIME_MS,
    MAX_MESSAGE_BYTES,
    Options,
    message_options,
    peer_options,
)
from services.runtime.identity import MAX_METADATA_BYTES
from services.runtime.interceptor import Context, ErrorInterceptor
from services.runtime.peers import MeshPeersOnly
from services.runtime.startup import StartupError, parse_listen
from services.runtime.tls import Tls

__all__ = ["Context", "MeshServer"]

STOP_GRACE_S = 5.0
# What grpc may take beyond its grace to end the calls it aborts.
STOP_MARGIN_S = 1.0
# From a connection to its first HTTP/2 frame. Before that nobody has shown a certificate.
HANDSHAKE_TIMEOUT_MS = 10_000
# How much of the server somebody outside may take who means no good.
CALLER_OPTIONS = (
    # Both: between them gRPC refuses at random.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", 4096),
    # Its channel connects again by itself.
    ("grpc.max_connection_idle_ms", 30 * 60_000),
    # Some are peers, whose pings between calls would count as an attack.
    ("grpc.keepalive_permit_without_calls", 1),
)

logger = logging.getLogger(__name__)


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        *message_options(max_message_bytes),
        # With SO_REUSEPORT a second server would share the port in silence.
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ]


class MeshServer:
    """An async context manager around a grpc.aio.Server.

    Make it in a running event loop, add servicers to `.server`, then enter it: it
    is bound and answering, and health says NOT_SERVING until `set_serving(True)`.
    Entering raises StartupError when the port is taken.

    With `tls` only services of the mesh get in, unless it is `for_callers`: then its
    port asks nobody for a certificate, and `mtls_listen` is one more that wants one from
    our CA, whosever it is.

    `local_address`: a unix socket besides, for peers on this host; never with `tls`.
    """

    def __init__(
        self,
        listen: str,
        *,
        service_names: Sequence[str],
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: Tls | None = None,
        for_callers: bool = False,
        mtls_listen: str = "",
        local_address: str = "",
        reflection: bool = True,
    ) -> None:
        if mtls_listen and tls is None:
            raise StartupError(f"cannot listen on {mtls_listen} with mTLS: use --tls-dir")
        self._listen = listen
        self._mtls_listen = mtls_listen
        self._tls = tls
        self._for_callers = for_callers
        self._service_names = tuple(service_names)
        self._health = health.aio.HealthServicer()
        self._stopped = False
        self._local_address = local_address if tls is None else ""
        self.address = ""
        self.local_address = ""
        self.mtls_address = ""
        guards = [MeshPeersOnly()] if tls is not None and not for_callers else []
        self.server = grpc.aio.server(
            interceptors=[ErrorInterceptor(), *guards, *interceptors],
            options=[
                *server_options(max_message_bytes),
                *(CALLER_OPTIONS if for_callers else peer_options()),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        if reflection:
            grpc_reflection.enable_server_reflection(
                (*self._service_names, health.SERVICE_NAME, grpc_reflection.SERVICE_NAME),
                self.server,
            )

    async def __aenter__(self) -> MeshServer:
        await self.set_serving(False)
        self.address = await self._bind(self._listen, ask_clients=not self._for_callers)
        if self._mtls_listen:
            self.mtls_address = await self._bind(self._mtls_listen, ask_clients=True)
        if self._local_address:
            self.local_address = self._bind_local(self._local_address)
        await self.server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _bind(self, listen: str, *, ask_clients: bool) -> str:
        """Without TLS nobody can be asked."""
        host, port = parse_listen(listen)
        await _check_free(listen, host, port)
        try:
            if self._tls is None:
                bound_port = self.server.add_insecure_port(listen)
            else:
                credentials = self._tls.server_credentials(ask_clients=ask_clients)
                bound_port = self.server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {listen}: {error}") from error
        return f"{host}:{bound_port}"

    def _bind_local(self, address: str) -> str:
        """Empty where the system refuses: peers then use the port."""
        try:
            self.server.add_insecure_port(address)
        except RuntimeError as error:
            logger.warning("no unix socket for peers on this host: %s", error)
            return ""
        return address

    async def set_serving(self, serving: bool) -> None:
        """What health answers, for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", *self._service_names):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Take no new calls, let the others end until `grace_s`, then abort them."""
        if self._stopped:
            return
        self._stopped = True
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.ensure_future(self.server.stop(grace_s))
        # grpc.aio has hung here (grpc/grpc#40989): never wait for it without a deadline.
        done, _ = await asyncio.wait({stopping}, timeout=grace_s + STOP_MARGIN_S)
        if not done:
            stopping.cancel()
            logger.warning("the server did not stop within %.1f s; left behind", grace_s)


async def _check_free(listen: str, host: str, port: int) -> None:
    """Bind once ourselves: grpc would say neither why it cannot, nor keep its own log still."""
    loop = asyncio.get_running_loop()
    reason = "it has no address"
    try:
        found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such host"
        raise StartupError(f"cannot listen on {listen}: {reason}") from error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartupError(
                    f"cannot listen on {listen}: the port is in use; choose another"
                ) from error
            reason = error.strerror or str(error)
        else:
            return  # one of its addresses is enough
    raise StartupError(f"cannot listen on {listen}: {reason}")
