from __future__ import annotations

from firsttoken.client import MeshClient
from services.bench import backpressure
from services.cli.plans import run_quiet_mesh


async def test_a_decode_worker_that_stands_still_does_not_fill_a_prefill_worker() -> None:
    """The 100 prompts have 800 MiB of KV."""
    async with (
        run_quiet_mesh(
            backpressure.CONFIG, num_workers=1, num_prefill_workers=1, with_kvstore=False
        ) as mesh,
        MeshClient(mesh.router) as client,
    ):
        document = await backpressure.measure(client, mesh.control, num_requests=100, stopped_s=4.0)

    assert document["kv_mib_of_all"] == 800
    for row in document["transports"]:
        assert row["growth_mib"] < 80
        assert row["answered"] == 100
        assert row["handed_off"] > 0
