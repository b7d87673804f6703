"""What a prompt costs where the router encodes it, and where the tokenizer service does.

One mesh whose engine takes next to no time, and one request at a time; who encodes is changed by
turns.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from firsttoken.client import Answer, MeshClient
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.bench.processes import cpu_s, family, list_members
from services.bench.settings import configure
from services.bench.tokenizing import SHARED_WORDS, make_chats
from services.core.config import parse
from services.core.settings import TOKENIZE
from services.encoding.template import ChatPrompt
from services.runtime.channels import open_channel

INSTANT = {"prefill_tokens_per_s": 1e9, "decode_step_ms": 0.0, "decode_step_ms_per_seq": 0.0}
ENGINE = {"engine": "simulated", "simulated": INSTANT, "max_context_tokens": 2 * SHARED_WORDS}
CONFIG = parse({"worker": ENGINE})
SETTING = "router.tokenize"
# For a vocabulary to be loaded, and for what is left of a turn.
SETTLE_S = 1.0
ROLES = {
    "router": control_pb2.MEMBER_ROLE_ROUTER,
    "tokenizer": control_pb2.MEMBER_ROLE_TOKENIZER,
}
# Of each prompt, before those that count: the shared one is then cached.
NUM_WARM_UP = 3


class Turn(NamedTuple):
    answers: list[Answer]
    cpu_s: Mapping[str, float]


async def measure(
    client: MeshClient, control: str, *, num_turns: int, requests_per_turn: int
) -> dict[str, Any]:
    """Of a mesh of CONFIG on this host. Raises StartupError."""
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        pids = {}
        for name, role in ROLES.items():
            [member] = await list_members(stub, role)
            pids[name] = family(member, control)[0]
    chats = make_chats(random.Random(2))
    turns: dict[tuple[str, str], list[Turn]] = {}
    for number in range(num_turns):
        # Whichever comes first in one turn comes last in the next.
        for who in TOKENIZE if number % 2 else reversed(TOKENIZE):
            await configure(control, {SETTING: who})
            await asyncio.sleep(SETTLE_S)
            for prompt, make in chats.items():
                await _turn(client, {}, make, NUM_WARM_UP)
                turns.setdefault((prompt, who), []).append(
                    await _turn(client, pids, make, requests_per_turn)
                )
    return {
        "requests": num_turns * requests_per_turn,
        "rows": [_row(prompt, who, done) for (prompt, who), done in sorted(turns.items())],
    }


async def _turn(
    client: MeshClient, pids: Mapping[str, int], make: Callable[[], ChatPrompt], count: int
) -> Turn:
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    answers = [await client.complete(make().messages, max_tokens=1) for _ in range(count)]
    return Turn(answers, {name: cpu_s(pid) - before[name] for name, pid in pids.items()})


def _row(prompt: str, who: str, turns: list[Turn]) -> dict[str, Any]:
    answers = [answer for turn in turns for answer in turn.answers]
    ttfts_ms = statistics.quantiles([answer.ttft_ms for answer in answers], n=20)
    return {
        "prompt": prompt,
        "encodes": who,
        "ttft_p50_ms": ttfts_ms[9],
        "ttft_p95_ms": ttfts_ms[18],
        "preprocess_p50_ms": statistics.median(each.ledger["preprocess"] for each in answers),
        "transfer_p50_ms": statistics.median(each.ledger["transfer"] for each in answers),
        **{
            f"{name}_cpu_us": sum(turn.cpu_s[name] for turn in turns) / len(answers) * 1e6
            for name in turns[0].cpu_s
        },
    }
