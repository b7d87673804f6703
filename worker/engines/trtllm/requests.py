"""What the engine is asked, from what the mesh is asked."""

from __future__ import annotations

import secrets

from worker.engines.contract import EngineInfo
from worker.engines.trtllm import api
from worker.messages import Submit


def sampling_params(
    submit: Submit, info: EngineInfo, *, num_answered: int, num_input: int
) -> api.SamplingParams:
    """A fresh object for each request: `context_only` sets max_tokens of the caller's to 1.

    `num_answered`: tokens of the answer that are part of the input of `num_input` tokens.
    """
    wanted = submit.sampling
    assert wanted.max_tokens is not None
    greedy = wanted.temperature == 0
    # Without a tokenizer it knows no end but what it is told, and takes no stop strings.
    ends = () if wanted.ignore_eos else info.eos_token_ids
    stops = sorted({*ends, *wanted.stop_token_ids})
    return api.SamplingParams(
        end_id=info.eos_token_ids[0] if info.eos_token_ids else -1,
        pad_id=info.eos_token_ids[0] if info.eos_token_ids else 0,
        stop_token_ids=stops or None,
        ignore_eos=wanted.ignore_eos,
        max_tokens=min(wanted.max_tokens - num_answered, info.max_context_tokens - num_input),
        temperature=None if greedy else wanted.temperature,
        top_k=1 if greedy else wanted.top_k or None,
        top_p=None if greedy else wanted.top_p,
        min_p=None if greedy else wanted.min_p or None,
        seed=wanted.seed,
        repetition_penalty=_unless(wanted.repetition_penalty, 1.0),
        presence_penalty=_unless(wanted.presence_penalty, 0.0),
        frequency_penalty=_unless(wanted.frequency_penalty, 0.0),
        logprobs=None if wanted.logprobs is None else max(1, wanted.logprobs),
        detokenize=False,
        include_stop_str_in_output=False,
        return_perf_metrics=True,
    )


def cache_salt(submit: Submit) -> str:
    """Who may share its KV: the root of its keys stands for model, tenant and salt.

    Without keys nobody may.
    """
    return submit.prefix_keys[0].hex() if submit.prefix_keys else secrets.token_hex(16)


def _unless(value: float, default: float) -> float | None:
    return None if value == default else value
