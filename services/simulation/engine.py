"""What the simulated engine says of itself and of its steps, without a model."""

from __future__ import annotations

from services.core.settings import MeshConfig
from services.simulation.calls import blank_ids
from worker.engines.contract import EngineInfo, Work
from worker.engines.simulated import step_s
from worker.scheduler import StepBudget


def engine_info(config: MeshConfig) -> EngineInfo:
    timing = config.worker.simulated
    block_tokens = config.mesh.block_tokens
    return EngineInfo(
        name="simulated",
        model="virtual",
        fingerprint=b"virtual",
        vocabulary_size=1,
        eos_token_ids=(),
        num_slots=config.worker.num_slots,
        max_context_tokens=min(config.worker.max_context_tokens, timing.num_blocks * block_tokens),
        block_tokens=block_tokens,
        block_bytes=block_tokens * timing.kv_bytes_per_token,
        num_blocks=timing.num_blocks,
        kv_in_pool=True,
    )


def measured_budget(config: MeshConfig) -> StepBudget:
    """Of a worker that has warmed up: it takes requests when it has measured itself."""
    timing = config.worker.simulated
    budget = StepBudget(
        max_step_s=config.worker.max_step_ms / 1e3,
        max_batch_tokens=config.worker.max_batch_tokens,
    )
    prompt = Work(0, 0, blank_ids(StepBudget.FIRST_TOKENS), num_logits=0)
    decode = Work(0, 0, blank_ids(1), num_logits=1)
    budget.observe(
        num_prompt=StepBudget.FIRST_TOKENS, num_decoding=0, step_s=step_s(timing, [prompt])
    )
    budget.observe(num_prompt=0, num_decoding=1, step_s=step_s(timing, [decode]))
    return budget
