from __future__ import annotations

from services.bench import redis
from services.bench.redis_ways import WAYS


async def test_every_way_to_redis_is_measured_on_a_real_server() -> None:
    document = await redis.measure(seconds=0.02, num_rounds=1)
    tables = {name: rows for name, rows in document.items() if isinstance(rows, list)}

    assert document["default"] in WAYS
    for name, rows in tables.items():
        assert {row["way"] for row in rows} == set(WAYS) - {"lifo_pool" if name == "chain" else ""}
    assert all(row["gets_per_s"] > 0 for row in tables["get"])
    assert all(row["bytes_per_s"] > 0 for row in tables["chain"])
