"""Workers with a KV store: engine core, front and tier, as a worker's node has them."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np

from firsttoken.control.v1 import control_pb2
from services.control.node import ControlNode
from services.core import config as mesh_config
from services.core.keys import extend_keys, root_key
from services.core.sampling import Sampling
from services.core.settings import MeshConfig
from services.core.tokens import pack
from services.runtime.membership import ControlClient
from services.runtime.tasks import end_tasks
from worker.front import EngineFront
from worker.messages import FirstTokenTimes, Source, Token
from worker.requests import Prompt
from worker.tier import KvLoad, KvTier

BLOCK_TOKENS = 16
# Of a prompt: 25 full blocks, and 3 tokens that are always computed.
NUM_TOKENS = 403
NUM_BLOCKS = 25


def config_of(
    *, kvstore: dict[str, Any] | None = None, simulated: dict[str, Any] | None = None, **worker: Any
) -> MeshConfig:
    timing = {
        "prefill_tokens_per_s": 4000,
        "decode_step_ms": 1,
        "num_blocks": 400,
        "kv_bytes_per_token": 256,
    }
    return mesh_config.parse(
        {
            "mesh": {"block_tokens": BLOCK_TOKENS},
            "kvstore": {"capacity_mb": 4} | (kvstore or {}),
            "worker": {
                "engine": "simulated",
                "num_slots": 4,
                "max_context_tokens": 2048,
                "simulated": timing | (simulated or {}),
            }
            | worker,
        }
    )


# Whether loading pays is a matter of the machine: where it is not the matter, load always.
CONFIG = config_of(kv_load="always")


def prompt_of(
    name: int, num_tokens: int = NUM_TOKENS, *, max_tokens: int = 20, tenant: str = ""
) -> Prompt:
    token_ids = np.random.default_rng(name).integers(100, 1000, num_tokens).astype(np.uint32)
    root = root_key(model="test", block_tokens=BLOCK_TOKENS, tenant=tenant)
    keys = (root, *extend_keys(root, pack(token_ids), BLOCK_TOKENS))
    return Prompt(token_ids, keys, Sampling(max_tokens=max_tokens, seed=1), False, ())


class Answer(NamedTuple):
    token_ids: list[int]
    first: FirstTokenTimes
    load: KvLoad
    seconds: float


class Worker(NamedTuple):
    front: EngineFront
    tier: KvTier

    async def generate(self, prompt: Prompt, *, tenant: str = "") -> Answer:
        began_s = time.monotonic()
        may_load = self.tier.may_load(len(prompt.token_ids), prompt.prefix_keys)
        source = Source.HOLD if may_load else Source.COMPUTE
        with self.front.submit(prompt, source=source) as stream:
            outcomes: list[KvLoad] = []
            load = asyncio.create_task(
                self.tier.load(
                    stream,
                    len(prompt.token_ids),
                    prompt.prefix_keys,
                    tenant=tenant,
                    on_outcome=outcomes.append,
                )
            )
            try:
                tokens: list[Token] = []
                while not tokens or not tokens[-1].finish:
                    tokens += (await stream.next()).tokens
            finally:
                await end_tasks([load])
        first = tokens[0].first
        assert first is not None
        [outcome] = outcomes
        self.tier.settle(outcome, first)
        ids = [token.token_id for token in tokens]
        return Answer(ids, first, outcome, time.monotonic() - began_s)

    async def settled(self) -> None:
        """Nothing runs, nothing is on its way in or out."""

        def idle() -> bool:
            stats = self.tier.stats
            inbox = self.front.inbox
            return (
                stats.num_loads == stats.num_slots == stats.num_writing == 0
                and self.front.num_held == 0
                and inbox.num_free == inbox.num_slots
            )

        try:
            await until(idle)
        except TimeoutError:
            raise AssertionError(f"something is left: {self.tier.stats}") from None


@asynccontextmanager
async def working(config: MeshConfig, control: str) -> AsyncIterator[Worker]:
    member = control_pb2.Member(
        id=f"worker-{uuid.uuid4().hex[:8]}",
        role=control_pb2.MEMBER_ROLE_WORKER,
        state=control_pb2.MEMBER_STATE_READY,
        address="127.0.0.1:1",
    )
    async with (
        ControlClient(control, member) as client,
        EngineFront(config, cores_shared_by=1) as front,
        KvTier(front, client) as tier,
    ):
        worker = Worker(front, tier)
        yield worker
        await worker.settled()


async def fill(control: ControlNode, *names: int, config: MeshConfig = CONFIG) -> list[list[int]]:
    """Answers of a worker that is gone afterwards; what it computed is in the store."""
    async with working(config, control.address) as worker:
        return [(await worker.generate(prompt_of(name))).token_ids for name in names]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def core_pid() -> int:
    """Of the only engine core that this process has started."""
    [pid] = [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_our_core(name)]
    return pid


def _is_our_core(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as command:
            parent = int(stat.read().rpartition(")")[2].split()[1])
            return parent == os.getpid() and "worker.core" in command.read()
    except OSError:
        return False
