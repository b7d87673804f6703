"""That the figures are of what they say; not how good they are."""

from __future__ import annotations

from firsttoken.client import MeshClient
from services.bench import handoff, transports
from services.cli.plans import run_quiet_mesh


async def test_hand_offs_of_the_real_model_are_timed_beside_one_process() -> None:
    async with (
        run_quiet_mesh(
            handoff.CONFIG, num_workers=1, num_prefill_workers=1, with_kvstore=False
        ) as mesh,
        MeshClient(mesh.router) as client,
    ):
        document = await handoff.measure(client, mesh.control, prompt_tokens=(70,), num_rounds=1)

    assert min(document["wake_up_ms"].values()) > 0
    rows = document["handoffs"]
    assert {(row["transport"], row["export_blocks"]) for row in rows} == {
        (transport, export) for transport in handoff.TRANSPORTS for export in handoff.EXPORTS
    }
    for row in rows:
        assert row["ratio"] == row["gap_ms"] / row["in_process_ms"] > 0
        assert row["ttft_ms"] > row["gap_ms"]


async def test_transports_are_timed_beside_a_socket_and_memory() -> None:
    async with (
        run_quiet_mesh(
            transports.CONFIG, num_workers=1, num_prefill_workers=1, with_kvstore=False
        ) as mesh,
        MeshClient(mesh.router) as client,
    ):
        document = await transports.measure(client, mesh.control, num_rounds=1)

    times = document["median_ms"]
    assert set(times) == {"memcpy", "tcp", "in_process", *transports.TRANSPORTS}
    assert min(times.values()) > 0
    assert (
        document["shared_memory_end_to_end_of_memcpy"] == times["memcpy"] / times["shared_memory"]
    )
