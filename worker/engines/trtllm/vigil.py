"""What is known of the engine beside its answers: that it lives, what it holds, how it steps."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from services.core.settings import MeshConfig
from services.core.tensorrt import TensorRtSettings
from services.runtime.tasks import end_tasks
from worker.engines.contract import EngineInfo
from worker.engines.trtllm import api
from worker.engines.trtllm.health import Advice, Watchdog
from worker.engines.trtllm.kv_events import KvEvents, Submissions
from worker.engines.trtllm.statistics import Statistics
from worker.pool import PoolEvents

# get_stats_async and get_kv_cache_events_async end after this time without news: ask again.
POLL_S = 2.0
POLL_PAUSE_S = 0.02
WATCH_INTERVAL_S = 0.25


class EngineStalled(Exception):
    """It has died, or does not answer: only a new one will."""


class Vigil:
    """`on_news`: called when there is something to report. `num_active`: what should run."""

    def __init__(
        self,
        llm: api.LLM,
        info: EngineInfo,
        settings: TensorRtSettings,
        *,
        on_news: Callable[[], None],
        num_active: Callable[[], int],
    ) -> None:
        self._llm = llm
        self._info = info
        self._settings = settings
        self._on_news = on_news
        self._num_active = num_active
        self.submissions = Submissions(tokens_per_block=settings.tokens_per_block)
        self.events = KvEvents(
            self.submissions,
            tokens_per_block=settings.tokens_per_block,
            per_block=info.block_tokens // settings.tokens_per_block,
        )
        self.statistics = Statistics()
        self._news = PoolEvents([], [])
        self._watchdog = Watchdog(
            probe_interval_s=settings.probe_interval_s,
            stall_timeout_s=settings.stall_timeout_s,
            now_s=time.monotonic(),
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, and keep watch. Raises what ends it, or EngineStalled."""
        jobs = [work, self._follow_statistics(), self._watch()]
        if self._settings.event_buffer:
            jobs.append(self._follow_events())
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            done, _ = await asyncio.wait([*tasks, self._died], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            await end_tasks([*tasks, *self._tasks])

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that ends with the vigil, if not before."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hear(self) -> None:
        """A sign of life."""
        self._watchdog.hear(time.monotonic())

    def die(self, why: str) -> None:
        if not self._died.done():
            self._died.set_exception(EngineStalled(why))

    def probe(self) -> None:
        """Ask for a token: no check of the engine's own says whether it answers."""
        if self._watchdog.is_probing:
            return
        self._watchdog.probing(time.monotonic())
        self.spawn(self._ask_for_a_token())

    def take_events(self) -> PoolEvents:
        events, self._news = self._news, PoolEvents([], [])
        return events

    async def _follow_events(self) -> None:
        while True:
            async for event in self._llm.get_kv_cache_events_async(timeout=POLL_S):
                stored, evicted = self.events.apply(event)
                self._news.stored.extend(stored)
                self._news.evicted.extend(evicted)
                if stored or evicted:
                    self._on_news()
            await asyncio.sleep(POLL_PAUSE_S)

    async def _follow_statistics(self) -> None:
        while True:
            async for stats in self._llm.get_stats_async(timeout=POLL_S):
                self.statistics.add_step(stats)
                now_s = time.monotonic()
                self._watchdog.hear(now_s)
                num_active = self._num_active()
                self._watchdog.use(self.statistics.kv, num_active=num_active, now_s=now_s)
                self._on_news()
            await asyncio.sleep(POLL_PAUSE_S)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self._on_news()
            match self._watchdog.advise(time.monotonic()):
                case Advice.PROBE:
                    self.probe()
                case Advice.RESTART:
                    raise EngineStalled(
                        f"the engine has said nothing for {self._settings.stall_timeout_s:g} s"
                    )
                case Advice.NOTHING:
                    pass

    async def _ask_for_a_token(self) -> None:
        try:
            await ask_for_a_token(self._llm, self._info)
        except Exception as error:
            self.die(f"asked for a token, the engine failed: {error}")
        else:
            self.hear()


async def ask_for_a_token(llm: api.LLM, info: EngineInfo) -> None:
    token_id = info.eos_token_ids[0] if info.eos_token_ids else 0
    params = api.SamplingParams(
        end_id=token_id, pad_id=token_id, max_tokens=1, ignore_eos=True, detokenize=False
    )
    salt = secrets.token_hex(16)
    await llm.generate_async([token_id], sampling_params=params, cache_salt=salt).aresult()


async def count_blocks(llm: api.LLM, config: MeshConfig, info: EngineInfo) -> int:
    """The mesh's blocks that the engine has room for, once it has answered for the first time."""
    engine = config.worker.tensorrt_llm
    await ask_for_a_token(llm, info)
    async for stats in llm.get_stats_async(timeout=POLL_S):
        found = (stats.get("kvCacheStats") or {}).get("maxNumBlocks")
        if found:
            return int(found) * engine.tokens_per_block // info.block_tokens
    num_tokens = engine.kv_tokens or info.num_slots * info.max_context_tokens
    return num_tokens // info.block_tokens
