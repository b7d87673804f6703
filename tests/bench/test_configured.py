from __future__ import annotations

import json

import pytest

from services.bench import configured
from services.cli import bench_config
from services.core.tenants import Tenants


@pytest.mark.parametrize("num_keys", [10, 600])
def test_a_configuration_has_so_many_keys_and_its_last_tenant_is_known(num_keys: int) -> None:
    config, api_key = configured.configuration(num_keys)
    tenant = Tenants(config).by_key(api_key)

    assert tenant is not None
    assert tenant.name == f"tenant-{len(config.tenants) - 1}"
    assert num_keys <= len(config.tenants) * (len(configured.SETTINGS) + 1) < num_keys + 6


async def test_requests_and_pushes_are_measured() -> None:
    document = await bench_config.measure(num_requests=8, num_turns=1, num_pushes=1, num_keys=(10,))

    assert json.loads(json.dumps(document)) == document
    assert [row["way"] for row in document["load"]] == ["proxied", "http"]
    for row in document["load"]:
        assert row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0
        assert row["router_cpu_us"] > 0
    [push] = document["push"]
    names = ("control", "tokenizer", "worker", "router", "gateway")
    assert all(push[f"{name}_{when}_ms"] > 0 for name in names for when in ("quiet", "push"))
