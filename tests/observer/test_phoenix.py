"""Traces as a tool shows them that nobody here wrote: Arize Phoenix, read back through its API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from firsttoken.client import MeshError
from services.core import config
from services.core.settings import MeshConfig
from services.observer.model import Hop
from tests.conftest import MeshFactory
from tests.runtime.ports import free_port

PHOENIX = os.environ.get("FIRSTTOKEN_PHOENIX", "")
pytestmark = [
    pytest.mark.skipif(not PHOENIX, reason="FIRSTTOKEN_PHOENIX names no programs"),
    pytest.mark.timeout(600),
]

START_S = 400.0
TOLERANCE_S = 2e-6


class Phoenix(NamedTuple):
    endpoint: str
    http: httpx.AsyncClient

    async def spans(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            query: dict[str, str | int] = {"limit": 100, **({"cursor": cursor} if cursor else {})}
            response = await self.http.get("/v1/projects/default/spans", params=query)
            if response.status_code == 404:  # nothing has come yet
                return found
            page = response.json()
            found += page["data"]
            cursor = page["next_cursor"]
            if not cursor:
                return found

    async def wait_for(self, num_spans: int) -> list[dict[str, Any]]:
        for _ in range(300):
            if len(found := await self.spans()) >= num_spans:
                return found
            await asyncio.sleep(0.2)
        raise AssertionError(f"{len(found)} of {num_spans} spans came")


@asynccontextmanager
async def run_phoenix(directory: Path) -> AsyncIterator[Phoenix]:
    http_port, grpc_port = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        Path(PHOENIX) / "python",
        *("-m", "phoenix.server.main", "serve"),
        env={
            **os.environ,
            "PHOENIX_WORKING_DIR": str(directory),
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(http_port),
            "PHOENIX_GRPC_PORT": str(grpc_port),
            "PHOENIX_TELEMETRY_ENABLED": "false",
        },
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{http_port}"
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as http:
            async with asyncio.timeout(START_S):
                while not await _answers(http):
                    assert process.returncode is None, "Phoenix has ended"
                    await asyncio.sleep(0.5)
            yield Phoenix(f"http://127.0.0.1:{grpc_port}", http)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/healthz")).status_code == 200
    except httpx.TransportError:
        return False


def traced(endpoint: str) -> MeshConfig:
    return config.parse(
        {
            "telemetry": {"otlp_endpoint": endpoint},
            "worker": {"engine": "simulated", "handoff_min_tokens": 1},
        }
    )


async def test_every_span_is_there_with_its_parent_and_its_duration(
    mesh_of: MeshFactory, tmp_path: Path
) -> None:
    async with run_phoenix(tmp_path) as phoenix:
        settings = traced(phoenix.endpoint)
        async with mesh_of(settings, num_prefill_workers=1, with_observer=True) as mesh:
            for number in range(5):
                await mesh.client.complete(f"{number} hello " * 100, max_tokens=4)
            with pytest.raises(MeshError):
                await mesh.client.complete("")
        assert mesh.observer is not None
        hops = [hop for each in mesh.observer.books.requests for hop in each.hops]
        spans = await phoenix.wait_for(sum(1 + len(hop.parts) for hop in hops))

    by_id = {span["context"]["span_id"]: span for span in spans}
    assert len(spans) == sum(1 + len(hop.parts) for hop in hops)
    assert {hop.name for hop in hops} == {
        *("router.generate", "tokenizer.encode", "worker.generate", "worker.prefill")
    }
    for hop in hops:
        _check_hop(hop, by_id[hop.span_id])
        parts = [span for span in spans if span["parent_id"] == hop.span_id]
        told = sorted(_duration_s(span) for span in parts if span["name"] in _segments(hop))
        wanted = sorted(part.end_s - part.start_s for part in hop.parts)
        assert told == pytest.approx(wanted, abs=TOLERANCE_S)


def _check_hop(hop: Hop, span: dict[str, Any]) -> None:
    assert span["name"] == hop.name
    assert span["context"]["trace_id"] == hop.trace_id
    assert (span["parent_id"] or "") == hop.parent_span_id
    assert _duration_s(span) == pytest.approx(hop.ended_s, abs=TOLERANCE_S)
    assert span["status_code"] == ("ERROR" if hop.error else "UNSET")
    assert span["status_message"] == hop.error
    assert span["attributes"]["service.name"] == hop.service
    assert span["attributes"]["service.instance.id"] == hop.member_id


def _segments(hop: Hop) -> set[str]:
    return {str(part.segment) for part in hop.parts}


def _duration_s(span: dict[str, Any]) -> float:
    begin, end = (datetime.fromisoformat(span[name]) for name in ("start_time", "end_time"))
    return (end - begin).total_seconds()
