"""What front and core say to each other.

Both are the same program on the same machine, parent and child, so the messages
are pickled: one batch each way per engine step. Times are readings of
CLOCK_MONOTONIC, which the two processes share.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from services.core.config import DelaySettings
from services.core.sampling import Sampling
from worker.engines.contract import EngineInfo

# --- front to core


class Submit(NamedTuple):
    request_id: int
    token_ids: npt.NDArray[np.uint32]
    # The chain's root, then one key per full block; empty: no reuse.
    prefix_keys: tuple[bytes, ...]
    sampling: Sampling  # seed and max_tokens resolved by the front
    batch_class: bool
    submitted_s: float


class Cancel(NamedTuple):
    request_id: int


class Settings(NamedTuple):
    """What may change while the core runs."""

    max_step_ms: float
    delay_ms: DelaySettings


Command: TypeAlias = Submit | Cancel | Settings

# --- core to front


class Ready(NamedTuple):
    """The first message of a core: the engine is loaded."""

    info: EngineInfo


class Failed(NamedTuple):
    """The last message of a core that could not start."""

    message: str


class TokenLogprobs(NamedTuple):
    logprob: float
    # Likeliest first.
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class FirstTokenTimes(NamedTuple):
    """The core's part of TTFT, in seconds; exclusive, measured where each happened."""

    prefill_queue_s: float
    kv_load_s: float
    prefill_s: float
    # When the first token was sampled.
    sampled_s: float
    cached_tokens: int
    evaluated_prompt_tokens: int


class Token(NamedTuple):
    """One generated token of one request."""

    request_id: int
    token_id: int
    # "", "stop" (its id ends generation and is not part of the answer) or "length".
    finish: str
    logprobs: TokenLogprobs | None
    first: FirstTokenTimes | None


class CoreLoad(NamedTuple):
    """Fields as in firsttoken.worker.v1.Load."""

    num_running: int
    num_waiting: int
    num_blocks_cached: int
    num_blocks_reserved: int
    num_blocks_total: int
    prompt_tokens_evaluated: int
    decode_tokens_evaluated: int
    prompt_tokens_cached: int
    num_steps: int
    engine_busy_s: float
    longest_step_ms: float
    prefill_tokens_per_s: float


class StepReport(NamedTuple):
    """All that one turn of the loop produced."""

    tokens: list[Token]
    # Requests gone since the last report (finished or cancelled): their slot and KV are free.
    released: list[int]
    # Prefix keys, in order: blocks that entered and left the cache.
    stored: list[bytes]
    evicted: list[bytes]
    load: CoreLoad


Report: TypeAlias = Ready | Failed | StepReport
