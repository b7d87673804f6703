"""`kv_aware` beside a router that knows all, where routing is all there is: no time passes.

Both route one request after the other to workers with the same caches, and
a prompt is computed as soon as it is routed. The oracle looks into the caches; `kv_aware`
knows what workers report and what it sent them, as in a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from router.fleet import Announced, Fleet
from router.knowledge import Knowledge
from router.kv_aware import KvAware
from router.prompt import Prompt
from router.reports import Event, EvictedEvent, LoadEvent, Report, SnapshotEvent, StoredEvent
from services.bench import oracle
from services.bench.oracle import Routed
from services.core.block_cache import Cache
from services.core.keys import join_keys, root_key
from services.core.settings import MeshConfig
from services.core.tokens import BYTES_PER_TOKEN
from services.core.workload import Arrival, Workload

# None: unlimited.
SIZES: Sequence[int | None] = (None, 5_000)
PREFILL_TOKENS_PER_S = 20_000.0
# Of the router, for caches without a limit.
MOST_INDEXED = 1 << 24


class Row(NamedTuple):
    """`hit_rate`: of prompt tokens. Work: uncached tokens of the busiest and of the idlest
    worker, in means."""

    router: str
    # Of each worker; None: unlimited.
    num_blocks: int | None
    hit_rate: float
    work_max: float
    work_min: float
    # Of the oracle's hit rate.
    of_oracle: float


def measure(
    workload: Workload,
    *,
    num_workers: int,
    sizes: Sequence[int | None] = SIZES,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """`sizes`: blocks of each worker's cache. `tell` hears how far it is."""
    rows: list[Row] = []
    for num_blocks in sizes:
        tell(f"{'unlimited' if num_blocks is None else num_blocks} blocks a worker …")
        ideal = oracle.route(
            workload.arrivals,
            block_tokens=workload.block_tokens,
            num_workers=num_workers,
            num_blocks=num_blocks,
        )
        ours = route(workload, num_workers=num_workers, num_blocks=num_blocks)
        for name, routed in (("oracle", ideal), ("kv_aware", ours)):
            share = routed.hit_rate / ideal.hit_rate if ideal.hit_rate else 1.0
            figures = routed.hit_rate, routed.most_work, routed.least_work, share
            rows.append(Row(name, num_blocks, *figures))
    return {
        "benchmark": "offline",
        "workload": workload.name,
        "requests": workload.num_requests,
        "block_tokens": workload.block_tokens,
        "workers": num_workers,
        "rows": [row._asdict() for row in rows],
    }


def route(workload: Workload, *, num_workers: int, num_blocks: int | None) -> Routed:
    """By `kv_aware`. Time is that of the arrivals; it makes older work count less."""
    mesh = _Mesh(num_workers, num_blocks, workload.block_tokens)
    for arrival in workload.arrivals:
        mesh.serve(arrival)
    return mesh.routed()


class _Mesh:
    def __init__(self, num_workers: int, num_blocks: int | None, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._root = root_key(model="offline", block_tokens=block_tokens)
        self._caches = [Cache(num_blocks) for _ in range(num_workers)]
        self._sequences = [0] * num_workers
        self._uncached, self._requests = [0] * num_workers, [0] * num_workers
        self._prompt_tokens = 0
        self._fleet = Fleet()
        self._fleet.update(
            Announced(
                f"{number}", f"worker-{number}:0", True, 64, 1 << 30, num_blocks=num_blocks or 0
            )
            for number in range(num_workers)
        )
        most = MOST_INDEXED if num_blocks is None else MeshConfig().router.index_max_blocks
        self._knowledge = Knowledge(most)
        self._knowledge.update_workers(self._fleet.workers)
        self._strategy = KvAware(self._knowledge, step_tokens=MeshConfig().worker.max_batch_tokens)
        speed = LoadEvent(prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
        for number in range(num_workers):
            self._report(number, SnapshotEvent((), speed), 0.0)

    def serve(self, arrival: Arrival) -> None:
        now_s, num_tokens = arrival.at_s, arrival.prompt_tokens
        prompt = Prompt(
            token_ids=bytes(num_tokens * BYTES_PER_TOKEN),
            prefix_keys=join_keys([self._root, *arrival.chain]),
            block_tokens=self._block_tokens,
        )
        choice = self._strategy.choose(self._fleet.candidates(now_s), prompt, now_s)
        errand = self._knowledge.begin(choice, prompt, now_s)
        number = int(choice.worker.announced.id)
        num_cached = self._compute(number, arrival.chain, now_s)
        cached_tokens = num_cached * self._block_tokens
        errand.first_token(now_s)
        errand.finished(
            cached_tokens=cached_tokens,
            evaluated_tokens=num_tokens - cached_tokens,
            loaded_blocks=0,
            load_s=0.0,
            now_s=now_s,
        )
        errand.release(now_s)
        self._uncached[number] += num_tokens - cached_tokens
        self._requests[number] += 1
        self._prompt_tokens += num_tokens

    def _compute(self, number: int, chain: Sequence[bytes], now_s: float) -> int:
        """Returns how many blocks were there."""
        cache = self._caches[number]
        num_cached = cache.match(chain)
        evicted = cache.use(chain)
        if stored := tuple(chain[num_cached : cache.num_blocks]):
            self._report(number, StoredEvent(stored), now_s)
        if evicted:
            self._report(number, EvictedEvent(evicted), now_s)
        return num_cached

    def _report(self, number: int, event: Event, now_s: float) -> None:
        if not isinstance(event, SnapshotEvent):
            self._sequences[number] += 1
        report = Report(self._sequences[number], "1", event)
        assert self._knowledge.hear(str(number), report, now_s)

    def routed(self) -> Routed:
        self._knowledge.check_idle()
        cached = self._prompt_tokens - sum(self._uncached)
        return Routed(self._prompt_tokens, cached, tuple(self._uncached), tuple(self._requests))
