"""What the tests with a real gateway share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import orjson

from services.core.settings import MeshConfig
from services.gateway.node import GatewayNode
from tests.conftest import Mesh, run_mesh
from tests.router.meshes import idle
from tests.runtime.waiting import eventually

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MODEL = "smollm2-135m-instruct"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


class Edge(NamedTuple):
    """A gateway in front of a mesh."""

    mesh: Mesh
    node: GatewayNode
    http: httpx.AsyncClient

    async def chat(self, **body: Any) -> dict[str, Any]:
        response = await self.http.post(CHAT, json=chat_body(**body))
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.http.post(COMPLETION, json={"prompt": "Once", **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def refused(self, path: str, body: Any, **headers: Any) -> Refused:
        return refusal(await self.http.post(path, json=body, headers=headers))

    async def chunks(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Of a stream that ends well."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        return read_events(response.content)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of those with these labels."""
        text = (await self.http.get("/metrics")).text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.partition("{")[0].partition(" ")[0] == name and all(w in line for w in wanted)
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.node.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def idle(self) -> None:
        """Wait until nothing runs, and see that nothing is still held."""
        gateway = self.node.gateway
        await eventually(lambda: not gateway.routers.num_calls, "the calls to end")
        # The request that asks is one itself.
        await eventually(self._only_we_ask, "the requests to end")
        await idle(self.mesh.router)

    async def _only_we_ask(self) -> bool:
        return await self.metric("firsttoken_gateway_requests_in_flight") == 1


class Refused(NamedTuple):
    status: int
    message: str
    type: str
    param: str | None
    code: str | None
    headers: httpx.Headers


def refusal(response: httpx.Response) -> Refused:
    return Refused(response.status_code, **response.json()["error"], headers=response.headers)


def open_http(node: GatewayNode) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=node.url, timeout=60.0, trust_env=False)


def chat_body(**body: Any) -> dict[str, Any]:
    return {"messages": HELLO, **body}


def read_events(stream: bytes) -> list[dict[str, Any]]:
    """Byte by byte: each event is one line of data and an empty one, the last is [DONE]."""
    assert stream.endswith(b"data: [DONE]\n\n"), stream[-200:]
    events = stream.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")
    assert events.pop() == b""
    assert all(each.startswith(b"data: {") and b"\n" not in each for each in events)
    return [orjson.loads(each.removeprefix(b"data: ")) for each in events]


def request_bytes(path: str, body: Any, headers: Sequence[str] = ()) -> bytes:
    """As any client would write it."""
    payload = orjson.dumps(body)
    lines = [
        f"POST {path} HTTP/1.1",
        "host: mesh",
        "content-type: application/json",
        f"content-length: {len(payload)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


@asynccontextmanager
async def run_edge(config: MeshConfig, **options: Any) -> AsyncIterator[Edge]:
    async with run_mesh(config, **options) as mesh, run_gateway(mesh) as edge:
        yield edge
        await edge.idle()


@asynccontextmanager
async def run_gateway(mesh: Mesh, **options: Any) -> AsyncIterator[Edge]:
    async with (
        GatewayNode(control=mesh.control.address, **options) as node,
        open_http(node) as http,
    ):
        await eventually(lambda: not node.gateway.problem, "the gateway to be ready")
        await eventually(lambda: mesh.router.mesh.roster.tokenizers)
        yield Edge(mesh, node, http)
