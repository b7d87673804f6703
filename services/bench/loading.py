"""Load or recompute: what the decision costs beside always loading and always computing.

One worker decides (worker.kv_load is auto) and never sees what the other one measures,
which loads and computes in turn. The oracle is, at each point, the faster of its two
ways. L2 is throttled to several rates around the one at which both take as long.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import numpy as np

from firsttoken.common.v1 import common_pb2
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from kvstore.node import KvStoreNode
from services.bench.redis_ways import embedded_server
from services.control.node import ControlNode
from services.core import config as mesh_config
from services.core.keys import extend_keys, join_keys, root_key, split_keys, storage_key
from services.core.settings import MeshConfig
from services.core.tokens import pack
from services.runtime.channels import open_channel
from worker.node import WorkerNode
from worker.planner import STALE_AFTER_S

BLOCK_TOKENS = 16
# A prompt's last tokens, of no full block, are always computed.
REST_TOKENS = 4
LENGTHS = (64, 192)
# Of the rate at which loading the longest prompt takes as long as computing it.
RATIOS = (4.0, 2.0, 1.25, 0.8, 0.5)
# Requests that may decide wrongly after the rate has changed; they are reported apart.
NUM_ADAPTING = 2
SIMULATED = {"prefill_tokens_per_s": 500, "decode_step_ms": 1, "kv_bytes_per_token": 1024}
AUTO, ALWAYS, NEVER = "auto", "always", "never"


class Point(NamedTuple):
    bytes_per_s: float
    num_tokens: int


class Sample(NamedTuple):
    """One request, and how the worker explained what it did."""

    ttft_s: float
    path: common_pb2.KvPath


class Row(NamedTuple):
    """Medians of the time to first token at one point."""

    bytes_per_s: float
    prompt_tokens: int
    load_ms: float
    compute_ms: float
    auto_ms: float
    expected_load_ms: float
    expected_compute_ms: float
    # How often each way was taken.
    ways: Mapping[str, int]

    @property
    def oracle_ms(self) -> float:
        return min(self.load_ms, self.compute_ms)

    @property
    def regret_ms(self) -> float:
        """Being faster than the oracle, by doing both at once, makes up for nothing."""
        return max(0.0, self.auto_ms - self.oracle_ms)


async def measure(
    *,
    engine: str = "llamacpp",
    lengths: Sequence[int] = LENGTHS,
    ratios: Sequence[float] = RATIOS,
    num_rounds: int = 3,
    pause_s: float = STALE_AFTER_S,
    seed: int = 0,
) -> dict[str, Any]:
    """Two workers, a KV store and a Redis of its own.

    `lengths`: prompt tokens, in full blocks. `pause_s`: after each change of the rate, until
    what is known of L2 is out of date in the worker's own eyes.
    """
    async with _laboratory(engine, max(lengths)) as lab:
        await lab.prepare()
        crossover = await lab.find_crossover(max(lengths))
        rows, adapting = [], []
        rates = [ratio * crossover for ratio in ratios]
        random.Random(seed).shuffle(rates)
        for bytes_per_s in rates:
            await lab.throttle(bytes_per_s)
            await asyncio.sleep(pause_s)
            adapting += [await lab.sample(AUTO, max(lengths)) for _ in range(NUM_ADAPTING)]
            for num_tokens in lengths:
                rows.append(await _compare(lab, Point(bytes_per_s, num_tokens), num_rounds))
        stats = lab.decider.tier
    rows.sort(key=lambda row: (row.prompt_tokens, -row.bytes_per_s))
    return {
        "benchmark": "loading",
        "engine": engine,
        "rounds": num_rounds,
        "block_bytes": lab.block_bytes,
        "crossover_bytes_per_s": crossover,
        **summarize(rows),
        "adapting_ttft_ms": [sample.ttft_s * 1e3 for sample in adapting],
        # As the worker counts it: against its own estimates, all requests together.
        "own_regret": stats.regret_ms / stats.spent_ms if stats.spent_ms else 0.0,
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    oracle_ms = sum(row.oracle_ms for row in rows)
    return {
        "regret": sum(row.regret_ms for row in rows) / oracle_ms,
        # Against the oracle, 1 is as good: the way decided, and each way regardless.
        "auto_ratio": sum(row.auto_ms for row in rows) / oracle_ms,
        "load_ratio": sum(row.load_ms for row in rows) / oracle_ms,
        "compute_ratio": sum(row.compute_ms for row in rows) / oracle_ms,
        "loading_wins": sum(row.load_ms < row.compute_ms for row in rows),
        "computing_wins": sum(row.load_ms > row.compute_ms for row in rows),
        "points": [
            {**row._asdict(), "oracle_ms": row.oracle_ms, "regret_ms": row.regret_ms}
            for row in rows
        ],
    }


async def _compare(lab: _Laboratory, point: Point, num_rounds: int) -> Row:
    samples: dict[str, list[Sample]] = {AUTO: [], ALWAYS: [], NEVER: []}
    for number in range(num_rounds):
        # Each way first in turn: a machine becomes slower or faster meanwhile.
        modes = list(samples)
        for mode in modes[number % 3 :] + modes[: number % 3]:
            samples[mode].append(await lab.sample(mode, point.num_tokens))
    medians = {
        mode: statistics.median(sample.ttft_s for sample in each) * 1e3
        for mode, each in samples.items()
    }
    paths = [sample.path for sample in samples[AUTO]]
    return Row(
        *point,
        load_ms=medians[ALWAYS],
        compute_ms=medians[NEVER],
        auto_ms=medians[AUTO],
        expected_load_ms=statistics.median(path.expected_load_ms for path in paths),
        expected_compute_ms=statistics.median(path.expected_compute_ms for path in paths),
        ways=dict(Counter(map(_way, paths))),
    )


def _way(path: common_pb2.KvPath) -> str:
    ways = ("loaded and computed at once", "loaded", "computed")
    return next((way for way in ways if f" {way}:" in path.reason), "other")


@asynccontextmanager
async def _laboratory(engine: str, most_tokens: int) -> AsyncIterator[_Laboratory]:
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(embedded_server())
        config = _config(engine, most_tokens, str(redis))
        control = await stack.enter_async_context(ControlNode(config=config))
        store = await stack.enter_async_context(KvStoreNode(control=control.address))
        workers = [
            await stack.enter_async_context(WorkerNode(control=control.address, cores_shared_by=2))
            for _ in range(2)
        ]
        channels = {
            address: await stack.enter_async_context(open_channel(address))
            for address in (control.address, store.address, *(each.address for each in workers))
        }
        yield _Laboratory(config, control, store, workers, channels)


def _config(engine: str, most_tokens: int, redis_url: str) -> MeshConfig:
    # As many blocks as the prompt that pushes all others out.
    num_blocks = most_tokens // BLOCK_TOKENS + 1
    return mesh_config.parse(
        {
            "mesh": {"block_tokens": BLOCK_TOKENS},
            "kvstore": {"capacity_mb": 64, "redis_url": redis_url},
            "worker": {
                "engine": engine,
                "threads": 1,
                "num_slots": 1,
                "max_context_tokens": most_tokens + 64,
                "num_cache_blocks": num_blocks,
                "kv_load_timeout_ms": 60_000,
                # Its rest takes a block of the same pool.
                "simulated": {**SIMULATED, "num_blocks": num_blocks + 1},
            },
        }
    )


class _Laboratory:
    """The worker that decides, the one that is told, and what they load from.

    `prepare` first: then all prompts, which begin alike, lie in L2.
    """

    def __init__(
        self,
        config: MeshConfig,
        control: ControlNode,
        store: KvStoreNode,
        workers: Sequence[WorkerNode],
        channels: Mapping[str, Any],
    ) -> None:
        self.decider, self._told = workers
        self._config = config
        self._store = store
        self._control_stub = control_pb2_grpc.ControlServiceStub(channels[control.address])
        self._store_stub = kvstore_pb2_grpc.KvStoreServiceStub(channels[store.address])
        self._stubs = {
            worker.id: worker_pb2_grpc.WorkerServiceStub(channels[worker.address])
            for worker in workers
        }
        self._mode = AUTO
        most_tokens = config.worker.max_context_tokens - 64
        self._measured = _request(1, most_tokens)
        self._filler = _request(2, config.worker.num_cache_blocks * BLOCK_TOKENS)

    @property
    def block_bytes(self) -> int:
        return self._store.store.tier1.arena.layout.slot_bytes

    async def prepare(self) -> None:
        """Both workers have computed something, and all blocks are in the store."""
        await self._ask(self._told, self._measured)
        for worker in (self.decider, self._told):
            await self._ask(worker, self._filler)
        await self._at_rest()
        tier2 = self._store.store.tier2
        assert tier2 is not None
        await tier2.flush()

    async def find_crossover(self, num_tokens: int) -> float:
        """The bytes a second at which loading a prompt takes as long as computing it."""
        samples = [await self.sample(NEVER, num_tokens) for _ in range(3)]
        compute_s = statistics.median(sample.ttft_s for sample in samples)
        return num_tokens // BLOCK_TOKENS * self.block_bytes / compute_s

    async def throttle(self, bytes_per_s: float) -> None:
        await self._configure({"kvstore.debug_l2_bytes_per_s": f"{bytes_per_s:.0f}"})

    async def sample(self, mode: str, num_tokens: int) -> Sample:
        """One prompt whose blocks are in L2 alone."""
        worker = self.decider if mode == AUTO else self._told
        # Out of the worker's pool: others come in, out of L1 where they always are.
        await self._set_mode(AUTO if mode == AUTO else ALWAYS)
        await self._ask(worker, self._filler)
        await self._at_rest()
        fingerprint = bytes.fromhex(worker.fingerprint)
        keys = [storage_key(k, fingerprint) for k in split_keys(self._measured.prefix_keys)[1:]]
        await self._store_stub.Evict(
            kvstore_pb2.EvictRequest(storage_keys=join_keys(keys), tiers=[kvstore_pb2.TIER_L1])
        )
        await self._set_mode(mode)
        return await self._ask(worker, _cut(self._measured, num_tokens))

    async def _ask(self, worker: WorkerNode, request: worker_pb2.GenerateRequest) -> Sample:
        began_s, first_s, path = time.monotonic(), 0.0, common_pb2.KvPath()
        async for response in self._stubs[worker.id].Generate(request):
            first_s = first_s or time.monotonic()
            path = response.finished.kv_path
        return Sample(first_s - began_s, path)

    async def _at_rest(self) -> None:
        """What was computed is in the pools, and in the store."""
        for worker in (self.decider, self._told):
            while not worker.is_idle or worker.tier.num_writing:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def _set_mode(self, mode: str) -> None:
        if mode != self._mode:
            await self._configure({"worker.kv_load": mode})
            self._mode = mode

    async def _configure(self, changes: Mapping[str, str]) -> None:
        """Returns when every member has applied them."""
        changed = await self._control_stub.SetConfig(control_pb2.SetConfigRequest(changes=changes))
        while True:
            listed = await self._control_stub.ListMembers(control_pb2.ListMembersRequest())
            if all(m.generation == changed.configuration.generation for m in listed.members):
                return


def _request(name: int, num_tokens: int) -> worker_pb2.GenerateRequest:
    """Of random tokens: full blocks, and a few more."""
    source = np.random.default_rng(name)
    token_ids = pack(source.integers(100, 10_000, num_tokens + REST_TOKENS).astype(np.uint32))
    root = root_key(model="bench", block_tokens=BLOCK_TOKENS, salt=str(name))
    return worker_pb2.GenerateRequest(
        token_ids=token_ids,
        prefix_keys=join_keys([root, *extend_keys(root, token_ids, BLOCK_TOKENS)]),
        sampling=common_pb2.SamplingParams(max_tokens=1, temperature=0.0),
    )


def _cut(request: worker_pb2.GenerateRequest, num_tokens: int) -> worker_pb2.GenerateRequest:
    """Its first full blocks, and a few tokens more."""
    keys = split_keys(request.prefix_keys)[: 1 + num_tokens // BLOCK_TOKENS]
    return worker_pb2.GenerateRequest(
        token_ids=request.token_ids[: 4 * (num_tokens + REST_TOKENS)],
        prefix_keys=join_keys(keys),
        sampling=request.sampling,
    )
