from __future__ import annotations

from typing import Any

import pytest

from services.core.config import parse
from services.core.errors import InvalidArgument
from services.core.settings import WorkerSettings
from services.core.tensorrt import batch_size, max_prompt_tokens


def worker_of(engine: dict[str, Any], **worker: Any) -> WorkerSettings:
    config = parse({"worker": {"engine": "tensorrt_llm", "tensorrt_llm": engine, **worker}})
    return config.worker


def test_defaults_go_together() -> None:
    worker = worker_of({})

    assert batch_size(worker) > worker.num_slots
    assert worker.tensorrt_llm.host_cache_mb == 0
    assert worker.tensorrt_llm.capacity_policy == "guaranteed_no_evict"


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"tokens_per_block": 48}, r"tokens_per_block: must divide mesh\.block_tokens, 64"),
        ({"max_batch_size": 8}, r"max_batch_size: must be above worker\.num_slots, 8"),
        ({"max_num_tokens": 16, "max_batch_size": 17}, "max_num_tokens: must be at least"),
        ({"kv_tokens": 100}, "kv_tokens: must be 0 or at least"),
        ({"block_reuse": False}, "event_buffer: must be 0 without block_reuse"),
        ({"block_reuse": False, "host_cache_mb": 1}, "host_cache_mb: must be 0 without"),
        ({"speculation": "eagle"}, "speculation_model: must name a model for eagle"),
        ({"transport": "nixl", "transfer_buffer_tokens": 9}, "the longest prompt must fit"),
        ({"transport": "nixl", "transfer_timeout_ms": 10_000}, "gives a hand-off up first"),
        ({"transfer_timeout_ms": 500}, r"transfer_timeout_ms: must be in \[10000, 3600000\]"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_reason(
    engine: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        worker_of(engine)


def test_rules_of_an_engine_that_is_not_used_do_not_matter() -> None:
    parse({"worker": {"tensorrt_llm": {"tokens_per_block": 48}}})


@pytest.mark.parametrize(("chunked_prefill", "longest"), [(True, 2047), (False, 512)])
def test_only_chunked_prefill_takes_prompts_beyond_a_step(
    chunked_prefill: bool, longest: int
) -> None:
    engine = {"chunked_prefill": chunked_prefill, "max_num_tokens": 512}

    assert max_prompt_tokens(worker_of(engine)) == longest
