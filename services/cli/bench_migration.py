"""The part `migration` of `firsttoken bench kv`, on a mesh of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from firsttoken.client import MeshClient
from services.bench import migration
from services.cli.plans import run_quiet_mesh
from services.cli.restarts import RestartPolicy

# Workers are killed as often as it takes.
_restarts = partial(RestartPolicy, max_crashes=10_000, max_delay_s=0.25)


async def measure(*, num_migrations: int = 20) -> dict[str, Any]:
    """With the real model."""
    async with (
        run_quiet_mesh(
            migration.CONFIG, num_workers=migration.NUM_WORKERS, restarts=_restarts
        ) as mesh,
        MeshClient(mesh.router) as client,
    ):
        return await migration.measure(client, mesh.control, num_migrations=num_migrations)
