"""One hand-off after the other."""

from __future__ import annotations

import random

from services.core import config
from tests.conftest import MeshFactory

BLOCK_TOKENS, PROMPT_TOKENS = 16, 64
CONFIG = config.parse(
    {
        "mesh": {"block_tokens": BLOCK_TOKENS},
        "worker": {
            "engine": "simulated",
            "max_batch_tokens": BLOCK_TOKENS,
            "handoff_min_tokens": PROMPT_TOKENS,
            "simulated": {"prefill_tokens_per_s": 1e5, "decode_step_ms": 0.1},
        },
    }
)


async def test_none_is_taken_for_lost_that_has_come(mesh_of: MeshFactory) -> None:
    """However the word of the last blocks taken meets the call's end: else the router would not
    ask that prefill worker for a while."""
    ends: set[tuple[bool, str]] = set()
    async with mesh_of(CONFIG, num_prefill_workers=1, with_kvstore=True) as mesh:
        for _ in range(150):
            prompt = [random.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
            path = (await mesh.client.complete(prompt, max_tokens=1)).kv_path
            ends.add((path.handed_off, path.reason))

    assert ends == {(True, "the prompt was long enough")}
