"""How many decisions a router's core makes a second, by workers and by indexed blocks.

One core, no event loop and no call: the fleet, what is known of it and `kv_aware`, with
some requests under way at each worker. All prompts share their first block, most of a
prompt is cached somewhere, and its end is new.
"""

from __future__ import annotations

import gc
import hashlib
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from router.fleet import Announced, Fleet, Slot
from router.knowledge import Errand, Knowledge
from router.kv_aware import KvAware
from router.prompt import Prompt
from router.reports import LoadEvent, Report, SnapshotEvent
from services.core.settings import MeshConfig
from services.core.tokens import BYTES_PER_TOKEN

BLOCK_TOKENS = 64
CHAIN_BLOCKS, OWN_BLOCKS = 62, 2
PER_WORKER = 4
# Blocks that the index may hold, for each that is reported: it is not full.
INDEX_ROOM = 2
NUM_PROMPTS, NUM_ROUNDS = 2_000, 5
# Time between two decisions, on the clock that the core is told.
STEP_S = 1 / 20_000
WORKERS, BLOCKS = (4, 16, 64, 256), (1_000, 10_000, 100_000, 1_000_000)


class Row(NamedTuple):
    """`whole_us`: a request's choice and all that is noted of it until it has ended;
    `choose_us`: the choice alone. CPU time, medians of the rounds' means."""

    workers: int
    blocks: int
    choose_us: float
    whole_us: float

    @property
    def decisions_per_s(self) -> float:
        return 1e6 / self.whole_us


class _Running(NamedTuple):
    slot: Slot
    errand: Errand
    cached_tokens: int
    evaluated_tokens: int


def measure(
    *,
    workers: Sequence[int] = WORKERS,
    blocks: Sequence[int] = BLOCKS,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Blocks with the most but one of `workers`, workers with the most of `blocks`."""
    fixed = sorted(workers)[max(0, len(workers) - 2)]
    cells = [(fixed, count) for count in blocks]
    cells += [(count, max(blocks)) for count in workers if count != fixed]
    rows = []
    for num_workers, num_blocks in cells:
        tell(f"{num_workers} workers, {num_blocks} blocks …")
        rows.append(_measure(num_workers, num_blocks))
    rows.sort()
    return {
        "benchmark": "decisions",
        "prompt_blocks": CHAIN_BLOCKS + OWN_BLOCKS,
        "requests_per_worker": PER_WORKER,
        "index_room": INDEX_ROOM,
        "rows": [{**row._asdict(), "decisions_per_s": row.decisions_per_s} for row in rows],
    }


def _measure(num_workers: int, num_blocks: int) -> Row:
    bench = _Bench(num_workers, num_blocks)
    bench.run(bench.prompts(0))  # until as many run as are to
    chosen, whole = [], []
    # What is collected in between is what the bench itself has left.
    gc.collect()
    gc.disable()
    try:
        for number in range(1, NUM_ROUNDS + 1):
            prompts = bench.prompts(number)
            bench.choosing_s = 0.0
            began_s = time.thread_time()
            bench.run(prompts)
            took_s = time.thread_time() - began_s
            whole.append(took_s / len(prompts) * 1e6)
            chosen.append(bench.choosing_s / len(prompts) * 1e6)
    finally:
        gc.enable()
    bench.end()
    return Row(num_workers, num_blocks, statistics.median(chosen), statistics.median(whole))


class _Bench:
    def __init__(self, num_workers: int, num_blocks: int) -> None:
        self.choosing_s = 0.0
        self._now_s = 0.0
        self._chance = random.Random(num_workers * num_blocks)
        self._fleet = Fleet()
        self._fleet.update(
            Announced(f"worker-{n}", f"10.0.{n // 256}.{n % 256}:7000", True, 64, 1 << 20)
            for n in range(num_workers)
        )
        self._knowledge = Knowledge(INDEX_ROOM * num_blocks + NUM_PROMPTS)
        self._knowledge.update_workers(self._fleet.workers)
        self._strategy = KvAware(self._knowledge, step_tokens=MeshConfig().worker.max_batch_tokens)
        self._chains = list(_chains(num_blocks))
        self._running: deque[_Running] = deque()
        self._most = PER_WORKER * num_workers
        for number in range(num_workers):
            held = [key for chain in self._chains[number::num_workers] for key in chain]
            load = LoadEvent(prefill_tokens_per_s=20_000.0)
            snapshot = SnapshotEvent(tuple(dict.fromkeys(held)), load)
            assert self._knowledge.hear(f"worker-{number}", Report(0, "1", snapshot), 0.0)

    def prompts(self, round_number: int) -> list[Prompt]:
        num_tokens = (CHAIN_BLOCKS + OWN_BLOCKS) * BLOCK_TOKENS
        token_ids = bytes(num_tokens * BYTES_PER_TOKEN)
        made = []
        for number in range(NUM_PROMPTS):
            chain = self._chance.choice(self._chains)
            own = [_key(f"{round_number}/{number}/{block}") for block in range(OWN_BLOCKS)]
            keys = b"".join((_key("root"), *chain, *own))
            made.append(Prompt(token_ids, keys, BLOCK_TOKENS))
        return made

    def run(self, prompts: Sequence[Prompt]) -> None:
        fleet, clock = self._fleet, time.thread_time
        for prompt in prompts:
            if len(self._running) >= self._most:
                self._finish(self._running.popleft())
            self._now_s += STEP_S
            candidates = fleet.candidates(self._now_s)
            began_s = clock()
            choice = self._strategy.choose(candidates, prompt, self._now_s)
            self.choosing_s += clock() - began_s
            slot = fleet.take(choice.worker, prompt.num_tokens)
            errand = self._knowledge.begin(choice, prompt, self._now_s)
            predicted = choice.predicted_tokens or 0
            self._running.append(_Running(slot, errand, predicted, choice.uncached_tokens))

    def end(self) -> None:
        while self._running:
            self._finish(self._running.popleft())
        self._fleet.check_integrity()
        self._knowledge.check_idle()

    def _finish(self, running: _Running) -> None:
        running.errand.first_token(self._now_s)
        running.errand.finished(
            cached_tokens=running.cached_tokens,
            evaluated_tokens=running.evaluated_tokens,
            loaded_blocks=0,
            load_s=0.0,
            now_s=self._now_s,
        )
        running.errand.release(self._now_s)
        running.slot.release()


def _chains(num_blocks: int) -> Iterator[tuple[bytes, ...]]:
    shared = _key("shared")
    for number in range(max(1, num_blocks // (CHAIN_BLOCKS - 1))):
        own = (_key(f"chain {number}/{block}") for block in range(1, CHAIN_BLOCKS))
        yield (shared, *own)


def _key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
