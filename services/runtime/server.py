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
from grpc_reflection.v1alpha import reflection

from services.runtime.channels import KEEPALIVE_TIME_MS, MAX_MESSAGE_BYTES, message_options
from services.runtime.interceptor import Context, ErrorInterceptor
from services.runtime.startup import StartupError

__all__ = ["Context", "MeshServer"]

STOP_GRACE_S = 5.0
# What grpc may take beyond its grace to end the calls it aborts.
STOP_MARGIN_S = 1.0

logger = logging.getLogger(__name__)


class MeshServer:
    """An async context manager around a grpc.aio.Server.

    Make it in a running event loop, add servicers to `.server`, then enter it: it
    is bound and answering, and health says NOT_SERVING until `set_serving(True)`.
    Entering raises StartupError when the port is taken.
    """

    def __init__(
        self,
        listen: str,
        *,
        service_names: Sequence[str],
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._listen = listen
        self._service_names = tuple(service_names)
        self._health = health.aio.HealthServicer()
        self._stopped = False
        self.address = ""
        self.server = grpc.aio.server(
            interceptors=[ErrorInterceptor(), *interceptors],
            options=[
                *message_options(max_message_bytes),
                # With SO_REUSEPORT a second server would share the port in silence.
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )

    async def __aenter__(self) -> MeshServer:
        await self.set_serving(False)
        self.address = await self._bind()
        await self.server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _bind(self) -> str:
        host, separator, port = self._listen.rpartition(":")
        if not separator or not port.isdecimal():
            raise StartupError(f"cannot listen on {self._listen!r}: must be host:port")
        await _check_free(self._listen, host, int(port))
        try:
            bound_port = self.server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {self._listen}: {error}") from error
        return f"{host}:{bound_port}"

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
    except OSError as error:
        raise StartupError(f"cannot listen on {listen}: {error.strerror}") from error
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
