from __future__ import annotations

import pytest

from firsttoken.client import MeshClient
from services.bench import migration
from services.cli.plans import run_quiet_mesh
from services.core.config import parse
from services.runtime.startup import StartupError

CONFIG = parse(
    {
        "worker": {"engine": "simulated", "num_slots": 2, "simulated": {"decode_step_ms": 20.0}},
        "kvstore": {"local_redis_mb": 0},
    }
)


async def test_workers_die_under_answers_that_stay_the_same() -> None:
    async with run_quiet_mesh(CONFIG, num_workers=2) as mesh, MeshClient(mesh.router) as client:
        document = await migration.measure(client, mesh.control, num_migrations=2)

    assert document["engine"] == "simulated"
    assert document["answers"] == document["migrations"] == document["equal"] == 2
    assert document["equal_by_way"] == {"greedy": 1, "seeded": 1}
    assert document["longest_stall_ms"] >= document["stall_ms"] > 0
    assert document["in_use_at_once"] == document["slots"] == 4
    assert not any(count for name, count in document.items() if name.startswith("left_"))


async def test_one_worker_alone_is_not_killed() -> None:
    async with run_quiet_mesh(CONFIG, num_workers=1) as mesh, MeshClient(mesh.router) as client:
        with pytest.raises(StartupError, match="must be two workers"):
            await migration.measure(client, mesh.control, num_migrations=1)
