"""A node with a call that does not end: see test_process.py."""

from __future__ import annotations

import argparse
import asyncio
import sys
from types import TracebackType
from typing import Any

import grpc

from services.runtime.process import add_options, read_options, run_node
from services.runtime.server import MeshServer


class StubbornNode:
    def __init__(self) -> None:
        self.address = ""

    async def __aenter__(self) -> StubbornNode:
        self._server = MeshServer("127.0.0.1:0", service_names=[])
        methods: dict[str, Any] = {"GetConfig": grpc.unary_unary_rpc_method_handler(self.hold)}
        handler = grpc.method_handlers_generic_handler(
            "firsttoken.control.v1.ControlService", methods
        )
        self._server.server.add_generic_rpc_handlers([handler])
        await self._server.__aenter__()
        self.address = self._server.address
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        print("stopping", flush=True)
        await self._server.stop(grace_s=600)

    async def hold(self, request: bytes, context: object) -> bytes:
        print("held", flush=True)
        await asyncio.Event().wait()
        return b""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_options(parser, control=False)
    sys.exit(run_node(StubbornNode, read_options("stubborn", parser.parse_args())))
