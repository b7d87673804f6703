from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from firsttoken.client import MeshClient
from services.bench import restart
from services.runtime.startup import StartupError
from tests.cli.running import SERVE, Run


@contextmanager
def up(*options: str, directory: Path) -> Iterator[Run]:
    edges = ("--no-gateway", "--no-observer")
    run = Run("up", *options, *edges, "--exec", SERVE, directory=directory)
    try:
        yield run
    finally:
        run.process.terminate()
        run.wait_until_gone(timeout_s=60)
        run.close()


async def test_what_killed_workers_and_their_kvstore_knew_comes_back_out_of_redis(
    tmp_path: Path,
) -> None:
    """The real model. Loading is not left to what a busy machine measures."""
    settings = ("mesh.block_tokens=16", "worker.threads=1", "worker.kv_load=always")
    options = [part for setting in settings for part in ("--set", setting)]
    with up(*options, directory=tmp_path) as run:
        router, control = run.wait_until_serving()
        async with MeshClient(router) as client:
            document = await restart.measure(client, control, prompt_tokens=100, num_prompts=3)

    assert document["engine"] == "llamacpp"
    assert document["same_answers"]
    # Of 100 tokens, 6 full blocks.
    assert document["cached_tokens"] == 3 * 96
    assert document["loaded_blocks"] == document["redis_blocks_read"] == 3 * 6
    assert document["redis_bytes_read"] > 3 * 96 * 20_000


async def test_a_mesh_without_redis_is_left_alone(tmp_path: Path) -> None:
    options = ("--engine", "simulated", "--set", "kvstore.local_redis_mb=0")
    with up(*options, directory=tmp_path) as run:
        router, control = run.wait_until_serving()
        before = run.survivors()
        async with MeshClient(router) as client:
            with pytest.raises(StartupError, match="has no Redis"):
                await restart.measure(client, control, prompt_tokens=100, num_prompts=1)

        assert before.keys() <= run.survivors().keys()
