from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.bench import edge
from services.bench.http_stream import open_stream, post
from services.cli.plans import run_quiet_mesh
from services.runtime.startup import StartupError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = (b"data: {}\n\n", b"data: {}\n\n", b"data: [DONE]\n\n")


async def test_http_is_measured_beside_grpc() -> None:
    config = edge.ENGINES["simulated"].config
    mesh = run_quiet_mesh(config, num_workers=1, with_kvstore=False, with_gateway=True)
    async with mesh as running:
        document = await edge.measure(
            running.http,
            running.router,
            running.control,
            num_pairs=4,
            num_tokens=(1, 8),
            load_s=0.5,
        )

    assert json.loads(json.dumps(document)) == document
    assert document["engine"] == "simulated"
    assert document["ttft"]["pairs"] == 4
    assert document["ttft"]["http_p99_ms"] >= document["ttft"]["http_p50_ms"] > 0
    assert document["ttft"]["ratio_p50"] > 0
    rows = document["load"]
    assert [(row["concurrency"], row["tokens"]) for row in rows] == [
        (concurrency, tokens) for concurrency in edge.CONCURRENCY for tokens in (1, 8)
    ]
    for row in rows:
        assert row["requests"] >= row["concurrency"]
        # Role, text, end, and [DONE].
        assert row["events_per_answer"] >= 3
        assert row["mesh_cpu_us_per_request"] > row["gateway_cpu_us_per_request"] > 0
        assert row["client_cpu_us_per_request"] > 0
    assert [row["concurrency"] for row in document["gateway_cpu"]] == list(edge.CONCURRENCY)


async def test_a_mesh_without_a_gateway_is_refused() -> None:
    config = edge.ENGINES["simulated"].config
    async with run_quiet_mesh(config, num_workers=1, with_kvstore=False) as running:
        with pytest.raises(StartupError, match="must be one gateway"):
            await edge.measure(
                "http://127.0.0.1:1",
                running.router,
                running.control,
                num_pairs=1,
                num_tokens=(1, 2),
                load_s=0.1,
            )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def server(answer: bytes, *, piece: int, closes: bool = False) -> AsyncIterator[str]:
    """Gives every request this answer, so many bytes at a time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                for at in range(0, len(answer), piece):
                    writer.write(answer[at : at + piece])
                    await asyncio.sleep(0)
                if closes:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        host, port = listening.sockets[0].getsockname()
        yield f"http://{host}:{port}"


@pytest.mark.parametrize("piece", [1, 3, 7, 10_000])
async def test_an_answer_is_counted_however_it_comes(piece: int) -> None:
    answer = HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"
    async with server(answer, piece=piece) as url, open_stream(url) as stream:
        for _ in range(2):
            heard = await stream.ask(post(url, "/", b""))
            assert heard.num_events == 3
            assert heard.ttft_s > 0


async def test_an_answer_that_is_an_error_is_told() -> None:
    refusal = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
    async with server(refusal, piece=10_000) as url, open_stream(url) as stream:
        with pytest.raises(ConnectionError, match="503"):
            await stream.ask(post(url, "/", b""))


async def test_an_answer_that_breaks_off_is_told() -> None:
    answer = HEAD + chunk(EVENTS[0])
    async with server(answer, piece=10_000, closes=True) as url, open_stream(url) as stream:
        for _ in range(2):
            with pytest.raises(ConnectionError, match="closed"):
                await stream.ask(post(url, "/", b""))
