"""The engine core: one process, one thread, one loop.

Started by the worker's front as `python -m worker.core --fd N`. It ends when the
front does, and takes nothing with it: its KV memory is gone with the process.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import time
from collections import deque

from services.core import config as mesh_config
from services.core.config import DelaySettings, MeshConfig
from services.core.keys import extend_keys, storage_key
from services.core.tokens import pack
from services.runtime.startup import StartupError
from worker.engines import open_engine
from worker.engines.contract import Engine, EngineFailure
from worker.link import CoreLink, LinkClosed
from worker.memory import open_block_memory
from worker.messages import (
    Cancel,
    Command,
    CoreLoad,
    Failed,
    FirstTokenTimes,
    Ready,
    Settings,
    StepReport,
    Submit,
    Token,
)
from worker.pool import BlockPool, NewBlock
from worker.sampling import Row, Sampled, sample
from worker.scheduler import Planned, Scheduler, Sequence, StepBudget


class EngineCore:
    """Receive, schedule, run, publish."""

    def __init__(self, engine: Engine, config: MeshConfig, link: CoreLink) -> None:
        self._engine = engine
        self._info = engine.info
        self._link = link
        self._pool = BlockPool(open_block_memory(engine.info.num_blocks, engine.info.block_bytes))
        self._scheduler = Scheduler(engine.info, self._pool)
        self._budget = StepBudget(
            max_step_s=config.worker.max_step_ms / 1e3,
            max_batch_tokens=config.worker.max_batch_tokens,
        )
        self._delay_ms: DelaySettings = config.debug.delay_ms
        self._counters = _Counters()
        self._tokens: list[Token] = []
        self._released: list[int] = []

    def run(self) -> None:
        """Until the front closes the link."""
        while True:
            self._obey(self._link.receive(block=self._scheduler.idle))
            self._scheduler.admit()
            planned = self._scheduler.plan(self._budget, self._start)
            if planned:
                self._step(planned)
            self._publish()
            self._settle(planned)

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Submit():
                    self._scheduler.add(command)
                    _delay(self._delay_ms.worker_prefill_queue)
                case Cancel():
                    self._release(command.request_id)
                case Settings():
                    self._budget.max_step_s = command.max_step_ms / 1e3
                    self._delay_ms = command.delay_ms

    def _start(self, sequence: Sequence) -> None:
        """Bring in the longest cached chain, all but the last prompt token at most."""
        sequence.started_s = time.monotonic()
        chain = self._storage_keys(sequence.submit.prefix_keys[1:])
        usable = chain[: (sequence.num_prompt - 1) // self._info.block_tokens]
        length = self._pool.match(usable)
        if length:
            self._engine.import_blocks(sequence.slot, self._pool.read(usable[:length]))
        sequence.num_cached = sequence.num_computed = length * self._info.block_tokens
        self._counters.prompt_tokens_cached += sequence.num_cached
        _delay(self._delay_ms.worker_kv_load)
        sequence.loaded_s = time.monotonic()

    def _step(self, planned: list[Planned]) -> None:
        if any(item.sequence.prefilling and item.work.wants_logits for item in planned):
            _delay(self._delay_ms.worker_prefill)
        began_s = time.monotonic()
        logits = self._engine.evaluate([item.work for item in planned])
        ended_s = time.monotonic()
        num_prompt = self._count(planned, ended_s - began_s)
        self._budget.observe(
            num_prompt=num_prompt,
            num_decoding=sum(not item.sequence.prefilling for item in planned),
            step_s=ended_s - began_s,
        )
        for item in planned:
            item.sequence.num_computed += len(item.work.tokens)
        answering = [item.sequence for item in planned if item.work.wants_logits]
        rows = [Row(each.submit.sampling, each.submit.token_ids, each.answer) for each in answering]
        for sequence, sampled in zip(answering, sample(logits, rows), strict=True):
            self._accept(sequence, sampled)

    def _count(self, planned: list[Planned], step_s: float) -> int:
        """Count what goes through the engine; returns the prompt tokens among it."""
        num_prompt = 0
        for sequence, work in planned:
            if sequence.prefilling:
                sequence.num_evaluated += len(work.tokens)
                num_prompt += len(work.tokens)
            else:
                self._counters.decode_tokens_evaluated += len(work.tokens)
        self._counters.prompt_tokens_evaluated += num_prompt
        self._counters.add_step(step_s)
        return num_prompt

    def _accept(self, sequence: Sequence, sampled: Sampled) -> None:
        first = None
        if not sequence.answer:
            now_s = time.monotonic()
            first = FirstTokenTimes(
                prefill_queue_s=sequence.started_s - sequence.submit.submitted_s,
                kv_load_s=sequence.loaded_s - sequence.started_s,
                prefill_s=now_s - sequence.loaded_s,
                sampled_s=now_s,
                cached_tokens=sequence.num_cached,
                evaluated_prompt_tokens=sequence.num_evaluated,
            )
        finish = sequence.finish_after(sampled.token_id, self._info)
        sequence.answer.append(sampled.token_id)
        self._tokens.append(
            Token(sequence.request_id, sampled.token_id, finish, sampled.logprobs, first)
        )
        sequence.finished = bool(finish)

    def _publish(self) -> None:
        events = self._pool.take_events()
        if not (self._tokens or self._released or events.stored or events.evicted):
            return
        report = StepReport(
            tokens=self._tokens,
            released=self._released,
            stored=events.stored,
            evicted=events.evicted,
            load=self._load(),
        )
        self._tokens, self._released = [], []
        self._link.send(report)

    def _settle(self, planned: list[Planned]) -> None:
        """After the tokens are out: keep what was computed, free what has ended."""
        for sequence, work in planned:
            if sequence.finished or (work.wants_logits and len(sequence.answer) == 1):
                self._keep(sequence)
            if sequence.finished:
                self._release(sequence.request_id)
        self._publish()

    def _keep(self, sequence: Sequence) -> None:
        """Export the full blocks that the pool lacks."""
        if not sequence.submit.prefix_keys:
            return
        chain = self._chain(sequence)
        have = self._pool.match([block.storage_key for block in chain])
        places = self._pool.store(chain, have)
        if places:
            self._engine.export_blocks(sequence.slot, have, places)

    def _chain(self, sequence: Sequence) -> list[NewBlock]:
        """The full blocks in the slot, prompt and answer together."""
        prefix_keys = sequence.submit.prefix_keys
        num_keyed = (len(prefix_keys) - 1) * self._info.block_tokens
        rest = pack(sequence.submit.token_ids[num_keyed:]) + pack(sequence.answer)
        keys = [*prefix_keys[1:], *extend_keys(prefix_keys[-1], rest, self._info.block_tokens)]
        keys = keys[: sequence.num_computed // self._info.block_tokens]
        return [NewBlock(*pair) for pair in zip(self._storage_keys(keys), keys, strict=True)]

    def _storage_keys(self, prefix_keys: list[bytes] | tuple[bytes, ...]) -> list[bytes]:
        return [storage_key(key, self._info.fingerprint) for key in prefix_keys]

    def _release(self, request_id: int) -> None:
        sequence = self._scheduler.remove(request_id)
        if sequence is None:
            return  # it had ended before the front's cancel arrived
        if sequence.slot >= 0:
            self._engine.clear(sequence.slot)
        self._released.append(request_id)
        if self._scheduler.idle:
            self._scheduler.check_integrity()

    def _load(self) -> CoreLoad:
        counters = self._counters
        return CoreLoad(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks_cached=self._pool.num_cached,
            num_blocks_reserved=self._pool.num_reserved,
            num_blocks_total=self._pool.num_blocks,
            prompt_tokens_evaluated=counters.prompt_tokens_evaluated,
            decode_tokens_evaluated=counters.decode_tokens_evaluated,
            prompt_tokens_cached=counters.prompt_tokens_cached,
            num_steps=counters.num_steps,
            engine_busy_s=counters.engine_busy_s,
            longest_step_ms=max(counters.recent_steps_s, default=0.0) * 1e3,
            prefill_tokens_per_s=self._budget.prefill_tokens_per_s,
        )


class _Counters:
    """Counted since the core's start."""

    def __init__(self) -> None:
        self.prompt_tokens_evaluated = 0
        self.decode_tokens_evaluated = 0
        self.prompt_tokens_cached = 0
        self.num_steps = 0
        self.engine_busy_s = 0.0
        self.recent_steps_s: deque[float] = deque(maxlen=100)

    def add_step(self, step_s: float) -> None:
        self.num_steps += 1
        self.engine_busy_s += step_s
        self.recent_steps_s.append(step_s)


def _delay(delay_ms: float) -> None:
    if delay_ms > 0:
        time.sleep(delay_ms / 1e3)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m worker.core", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket to the front")
    parser.add_argument("--config", required=True, help="the configuration, as JSON")
    parser.add_argument("--cores-shared-by", type=int, default=1)
    options = parser.parse_args(arguments)
    # Ctrl-C reaches the whole foreground group; the front decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    link = CoreLink(socket.socket(fileno=options.fd))
    config = mesh_config.from_json(options.config)
    try:
        engine = open_engine(config, cores_shared_by=options.cores_shared_by)
    except StartupError as error:
        link.send(Failed(str(error)))
        return 3
    try:
        link.send(Ready(engine.info))
        EngineCore(engine, config, link).run()
    except LinkClosed:
        return 0
    except EngineFailure as error:
        print(f"engine core: {error}", file=sys.stderr)
        return 1
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
