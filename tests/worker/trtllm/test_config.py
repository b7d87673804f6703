"""What LLM() is built with, and what a machine says that cannot build one."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.config import parse
from services.core.settings import MeshConfig
from services.runtime.startup import StartupError
from tests.worker.trtllm import double
from tests.worker.trtllm.conftest import ROOT
from worker.front import EngineFront
from worker.roles import Role


def config_of(engine: dict[str, Any], **worker: Any) -> MeshConfig:
    return parse({"worker": {"engine": "tensorrt_llm", "tensorrt_llm": engine, **worker}})


def keywords(engine: dict[str, Any], role: Role = Role.BOTH, **worker: Any) -> dict[str, Any]:
    from worker.engines.trtllm.config import build_llm

    llm: Any = build_llm(config_of(engine, **worker), "weights", role=role)
    assert isinstance(llm, double.LLM)
    return llm.keywords


def test_defaults_are_the_safe_ones() -> None:
    built = keywords({})
    kv = built["kv_cache_config"]

    assert kv.host_cache_size is None
    assert kv.event_buffer_max_size
    assert built["scheduler_config"].capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
    assert built["otlp_traces_endpoint"] is None
    assert built["return_perf_metrics"]
    assert built["max_batch_size"] > 8
    assert built["cache_transceiver_config"] is None
    assert built["cuda_graph_config"].enable_padding


def test_settings_reach_the_engine() -> None:
    built = keywords(
        {
            "tensor_parallel_size": 4,
            "chunked_prefill": False,
            "cuda_graphs": False,
            "kv_dtype": "fp8",
            "host_cache_mb": 2,
            "speculation": "eagle",
            "speculation_model": "m",
            "kv_tokens": 4096,
        }
    )
    kv, speculation = built["kv_cache_config"], built["speculative_config"]

    assert built["tensor_parallel_size"] == 4
    assert not built["enable_chunked_prefill"]
    assert built["cuda_graph_config"] is None
    assert (kv.dtype, kv.host_cache_size, kv.max_tokens) == ("fp8", 2 << 20, 4096)
    assert (speculation.max_draft_len, speculation.speculative_model) == (4, "m")


@pytest.mark.parametrize(
    ("role", "disabled"), [(Role.PREFILL, True), (Role.BOTH, True), (Role.DECODE, False)]
)
def test_transfers_have_an_end_and_room_for_the_longest_prompt(role: Role, disabled: bool) -> None:
    built = keywords({"transport": "nixl"}, role)
    transfers = built["cache_transceiver_config"]

    assert transfers.backend == "NIXL"
    assert transfers.max_tokens_in_buffer == 2048
    assert transfers.kv_transfer_timeout_ms == 120_000
    assert built["disable_overlap_scheduler"] is disabled


async def refused(config: MeshConfig) -> str:
    with pytest.raises(StartupError) as caught:
        async with EngineFront(config, cores_shared_by=1):
            pass
    return str(caught.value)


async def test_a_machine_without_tensorrt_llm_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'protos'}")
    text = await refused(config_of({"weights": "w"}))

    assert "worker.engine is tensorrt_llm" in text
    assert "set worker.engine to llamacpp" in text


async def test_an_engine_that_cannot_be_built_says_why() -> None:
    text = await refused(config_of({"weights": double.UNREADABLE}))

    assert text == "TensorRT-LLM does not start: CUDA out of memory"


async def test_weights_that_it_does_not_read_are_named() -> None:
    assert "worker.tensorrt_llm.weights" in await refused(config_of({}))
