"""The least that grpc.aio costs: a server of raw bytes, with our channels' and servers' options.

`python -m services.bench.overhead_floor` serves; with `--pass-to HOST:PORT` it passes on what
another one streams, as a router does that looks at nothing.
"""

from __future__ import annotations

import argparse
import struct
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import grpc

from services.runtime.channels import open_channel, peer_options
from services.runtime.process import add_options, read_options, run_node
from services.runtime.resource import Resource
from services.runtime.server import Context, server_options

SERVICE = "firsttoken.bench.Floor"
_ASKED = struct.Struct("<II")


class Messages(NamedTuple):
    """What a stream is to be of."""

    number: int
    num_bytes: int

    def pack(self, request_bytes: int = _ASKED.size) -> bytes:
        return _ASKED.pack(*self).ljust(request_bytes, b".")

    @classmethod
    def unpack(cls, request: bytes) -> Messages:
        return cls(*_ASKED.unpack_from(request))


class FloorNode(Resource):
    """An async context manager: entered, it serves at `.address`."""

    def __init__(self, listen: str, *, pass_to: str = "") -> None:
        self._listen = listen
        self._pass_to = pass_to
        self.address = ""

    async def _open(self, stack: AsyncExitStack) -> None:
        server = grpc.aio.server(options=[*server_options(), *peer_options()])
        streams: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(_echo)}
        if self._pass_to:
            channel = await stack.enter_async_context(open_channel(self._pass_to))
            stream: Any = _Passing(channel).stream
        else:
            stream = _stream
        streams["Stream"] = grpc.unary_stream_rpc_method_handler(stream)
        handlers = grpc.method_handlers_generic_handler(SERVICE, streams)
        server.add_generic_rpc_handlers((handlers,))
        host, _, _ = self._listen.rpartition(":")
        self.address = f"{host}:{server.add_insecure_port(self._listen)}"
        await server.start()
        stack.push_async_callback(server.stop, 0)


async def _echo(request: bytes, context: Context) -> bytes:
    return request


async def _stream(request: bytes, context: Context) -> None:
    asked = Messages.unpack(request)
    message = b"." * asked.num_bytes
    for _ in range(asked.number):
        await context.write(message)


class _Passing:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = channel.unary_stream(f"/{SERVICE}/Stream")

    async def stream(self, request: bytes, context: Context) -> None:
        call = self._call(request)
        while (message := await call.read()) is not grpc.aio.EOF:
            await context.write(message)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.bench.overhead_floor")
    add_options(parser, control=False)
    parser.add_argument("--pass-to", default="", metavar="HOST:PORT")
    arguments = parser.parse_args()
    options = read_options("bench-floor", arguments)
    return run_node(lambda: FloorNode(options.listen, pass_to=arguments.pass_to), options)


if __name__ == "__main__":
    raise SystemExit(main())
