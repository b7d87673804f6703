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

from services.core import config as mesh_config
from services.core.ledger import Segment
from services.core.settings import DelaySettings, MeshConfig
from services.runtime.allocator import keep_freed_memory
from services.runtime.garbage import spare_what_is_there
from services.runtime.leaving import leave
from services.runtime.startup import StartupError
from worker.arena import ArenaLayout, BlockArena
from worker.bubbles import LEAST_GAP_S, Gap, ShortGaps, judge
from worker.engines import open_engine
from worker.engines.contract import Engine, EngineFailure, Work
from worker.link import CoreLink, LinkClosed
from worker.messages import (
    Cancel,
    Command,
    Compute,
    CoreLoad,
    Failed,
    Fetch,
    FirstToken,
    FreeOutbox,
    LoadingEnded,
    MoreCredit,
    Progress,
    Ready,
    Settings,
    Stage,
    StagedBlock,
    Started,
    Submit,
    Taken,
    TokenLogprobs,
    Verified,
)
from worker.outbox import Outbox
from worker.pool import BlockPool
from worker.prefix_cache import PrefixCache, TokenNames
from worker.reports import Counters, PendingReport, first_token_times
from worker.roles import Role
from worker.sampling import sample
from worker.scheduler import Scheduler, StepBudget
from worker.sequence import Sequence
from worker.speculation import Speculation
from worker.steps import Ended, Kinds, Steps
from worker.transfers import Transfers

# An engine that moves KV by itself tells no event.
TRANSFER_POLL_S = 0.001
# Between two looks at everything while nothing runs: one takes a millisecond for each ten
# thousand blocks, and whoever comes then waits for its end.
CHECK_INTERVAL_S = 1.0


class EngineCore:
    """Receive, schedule, run, publish."""

    def __init__(
        self, engine: Engine, arena: BlockArena, config: MeshConfig, link: CoreLink
    ) -> None:
        self._engine = engine
        self._info = engine.info
        self._arena = arena
        self._link = link
        self._pool = BlockPool(arena.pool, arena.generations)
        self._cache = PrefixCache(engine.info, self._pool, TokenNames(engine.info))
        self._budget = StepBudget(
            max_step_s=config.worker.max_step_ms / 1e3,
            max_batch_tokens=config.worker.max_batch_tokens,
        )
        self._scheduler = Scheduler(engine.info, self._cache, self._budget)
        self._steps = Steps(engine)
        self._speculation = Speculation(
            engine.info,
            max_draft=config.worker.max_draft_tokens,
            max_batch_tokens=config.worker.max_batch_tokens,
        )
        self._delay_ms: DelaySettings = config.debug.delay_ms
        self._outbox = Outbox(engine, arena, early_blocks=config.worker.handoff_export_blocks)
        self._transfers = Transfers(engine.transport)
        self._counters = Counters()
        self._pending = PendingReport()
        self._short_gaps = ShortGaps()
        self._checked_s = -CHECK_INTERVAL_S

    def run(self) -> None:
        """Until the front closes the link."""
        moved = False
        while True:
            self._obey(self._link.receive(wait_s=0 if moved else self._patience_s()))
            self._pending.transfers += self._transfers.settle()
            # Of an engine that computes by itself: it is not to wait for what we say of it.
            if self._end_steps() and self._is_slot_due():
                self._publish()
                self._settle()
            self._admit()
            self._join_all()
            for kinds in self._steps.free():
                self._begin(kinds)
            moved = self._end_steps()
            self._publish()
            moved = self._settle() or moved

    def _patience_s(self) -> float | None:
        """How long to wait for the front with nothing else to do."""
        wait_s = self._steps.wait_s()
        if self._transfers.any:
            return TRANSFER_POLL_S if wait_s is None else min(wait_s, TRANSFER_POLL_S)
        return wait_s

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Submit():
                    self._scheduler.add(command)
                    _delay(self._delay_ms.worker_prefill_queue)
                case Cancel():
                    self._cancel(command.request_id)
                case Stage():
                    self._stage(command)
                case Compute() | LoadingEnded() | FirstToken() | MoreCredit():
                    sequence = self._scheduler.find(command.request_id)
                    if sequence is not None:
                        if isinstance(command, LoadingEnded):
                            self._transfers.give_up(sequence)
                        was_held = sequence.held
                        sequence.advise(command)
                        if was_held and not sequence.held:
                            sequence.wait(time.monotonic())
                case Fetch():
                    sequence = self._scheduler.find(command.request_id)
                    if sequence is not None and sequence.started:
                        self._transfers.fetch(sequence, command.params)
                case Taken():
                    pass  # these engines say so themselves
                case FreeOutbox():
                    self._outbox.free(command.slots)
                case Settings():
                    self._budget.max_step_s = command.max_step_ms / 1e3
                    self._speculation.max_draft = command.max_draft_tokens
                    self._outbox.early_blocks = command.handoff_export_blocks
                    self._delay_ms = command.delay_ms

    def _stage(self, command: Stage) -> None:
        sequence = self._scheduler.find(command.request_id)
        if sequence is not None:
            sequence.flush = command.flush
        for block in command.blocks:
            if sequence is not None and sequence.wants(block, self._info.block_tokens):
                sequence.staged[block.block_index] = block
            else:
                self._pending.inbox_freed.append(block.inbox_slot)

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            if sequence.held:
                # Whoever brings its blocks must know which are here, and that there is room.
                self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        """Bring in what is cached of it, again where more has come since."""
        began_s, num_cached = time.monotonic(), sequence.num_cached
        sequence.phases.enter(Segment.KV_LOAD, began_s)
        blocks = self._cache.bring_in(sequence)
        if blocks:
            self._engine.append_blocks(sequence.slot, blocks)
        self._counters.prompt_tokens_cached += sequence.num_cached - num_cached
        if not sequence.started:
            sequence.started_s = began_s
            _delay(self._delay_ms.worker_kv_load)
            phases = tuple(sequence.phases.until(time.monotonic()))
            self._pending.started.append(Started(sequence.request_id, len(blocks), phases))
        # Of the blocks that came while it waited, the pool may have got some meanwhile.
        self._drop_passed(sequence)
        sequence.wait(time.monotonic())
        self._join(sequence)

    def _join_all(self) -> None:
        for sequence in self._scheduler.running():
            due = sequence.started and (sequence.staged or sequence.held)
            if due and not self._steps.holds(sequence):
                self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        """Bring staged blocks into the engine where they follow what is there."""
        run = sequence.ready_run(self._info.block_tokens)
        end = sequence.num_computed + sum(block.num_tokens for block in run)
        complete = end == sequence.num_input or not sequence.loading
        # Where an import costs as much as all that the slot then holds, it is one, unless
        # the inbox is full.
        waits = sequence.held and not self._info.kv_in_pool
        if run and (complete or sequence.flush or not waits):
            self._append(sequence, run)
        if sequence.held and complete and (sequence.prefilling or sequence.has_first_token):
            sequence.held = False
            sequence.wait(time.monotonic())
            sequence.end_if_answering(time.monotonic())

    def _append(self, sequence: Sequence, run: list[StagedBlock]) -> None:
        sequence.phases.enter(Segment.KV_LOAD, time.monotonic())
        token_bytes = self._info.token_bytes
        views = [
            self._arena.inbox[block.inbox_slot][: block.num_tokens * token_bytes] for block in run
        ]
        self._engine.append_blocks(sequence.slot, views)
        for block in run:
            del sequence.staged[block.block_index]
            sequence.num_computed += block.num_tokens
            sequence.num_cached += block.num_tokens
        self._pending.inbox_freed += [block.inbox_slot for block in run]
        self._drop_passed(sequence)
        sequence.wait(time.monotonic())

    def _drop_passed(self, sequence: Sequence) -> None:
        """Staged blocks whose tokens are in the slot already."""
        position = sequence.num_computed
        passed = [i for i in sequence.staged if i * self._info.block_tokens < position]
        self._pending.inbox_freed += [sequence.staged.pop(index).inbox_slot for index in passed]

    def _begin(self, kinds: Kinds) -> None:
        if kinds.decodes and (answering := self._scheduler.answering()):
            self._speculation.propose(answering)
        planned = self._scheduler.plan(self._start, decodes=kinds.decodes, prompts=kinds.prompts)
        prompts = [item for item in planned if item.sequence.prefilling]
        began_s = time.monotonic()
        for item in prompts:
            item.sequence.phases.enter(Segment.PREFILL, began_s)
            item.sequence.batch_size = item.sequence.batch_size or len(planned)
        if any(item.work.wants_logits for item in prompts):
            _delay(self._delay_ms.worker_prefill)
        gap = self._steps.begin(kinds, planned)
        if gap is not None:
            self._charge(gap)

    def _charge(self, gap: Gap) -> None:
        if gap.duration_s < LEAST_GAP_S:
            bubbles = self._short_gaps.add(gap)
        else:
            bubbles = judge(gap, self._scheduler.everyone())
        for bubble in bubbles:
            self._counters.add_bubble(bubble)
        self._pending.bubbles += bubbles

    def _end_steps(self) -> bool:
        """Whether any has ended."""
        ended = self._steps.ended()
        for step in ended:
            self._end(step)
        return bool(ended)

    def _is_slot_due(self) -> bool:
        """Somebody waits for a slot that is as good as free."""
        return self._scheduler.num_waiting > 0 and any(
            each.finished or each.cancelled for each in self._scheduler.running()
        )

    def _end(self, step: Ended) -> None:
        """Count what went through the engine, and take its answers."""
        self._budget.observe(
            num_prompt=step.num_prompt,
            num_decoding=step.num_decoding,
            step_s=step.ended_s - step.began_s,
        )
        self._counters.add_step(step)
        if not step.num_prompt:
            self._speculation.observe(
                step.num_decoding, step.num_drafted, step.ended_s - step.began_s
            )
        if step.num_drafted:
            self._verify(step)
            return
        for sequence, work in step.planned:
            if sequence.prefilling:
                self._advance_prompt(sequence, work, step.ended_s)
            else:
                sequence.num_computed += 1
                self._speculation.rest(sequence)
        answering = [sequence for sequence, work in step.planned if work.wants_logits]
        if step.num_prompt and any(not each.has_first_token for each in answering):
            _delay(self._delay_ms.worker_sampling)
        sampled = sample(step.logits, [each.row for each in answering])
        for sequence, (token_id, logprobs) in zip(answering, sampled, strict=True):
            self._accept(sequence, token_id, logprobs, step)

    def _verify(self, step: Ended) -> None:
        """A step of answers, with drafts: what is sampled behind each token is the answer, and
        as far as a draft says the same, what follows is known too.
        """
        row = 0
        for sequence, work in step.planned:
            num_new = 0
            for drafted in (*sequence.draft, None):
                logits = step.logits[row + num_new : row + num_new + 1]
                [(token_id, logprobs)] = sample(logits, [sequence.row])
                self._accept(sequence, token_id, logprobs, step)
                num_new += 1
                if sequence.finished or sequence.answer[-1] != drafted:
                    break
            row += work.num_logits
            sequence.num_computed += num_new
            self._counters.decode_tokens_evaluated += num_new - 1
            if num_new < work.num_logits:
                self._engine.truncate(sequence.slot, sequence.num_computed)
            if sequence.draft:
                told = Verified(sequence.request_id, len(sequence.draft), num_new - 1)
                self._pending.verified.append(told)
            self._speculation.learn(sequence, num_new - 1, step.num_decoding)

    def _advance_prompt(self, sequence: Sequence, work: Work, ended_s: float) -> None:
        sequence.num_computed += len(work.tokens)
        sequence.num_evaluated += len(work.tokens)
        self._drop_passed(sequence)
        if not work.wants_logits:
            sequence.phases.enter(Segment.PREFILL_QUEUE, ended_s)
            _delay(self._delay_ms.worker_between_steps)
            sequence.end_if_answering(time.monotonic())
        if sequence.loading or sequence.for_another:
            self._pending.progress.append(Progress(sequence.request_id, sequence.num_computed))

    def _accept(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, step: Ended
    ) -> None:
        first = params = None
        if not sequence.has_first_token:
            first = first_token_times(sequence, step.ended_s, time.monotonic())
        finish = sequence.finish_after(token_id, self._info)
        sequence.answer.append(token_id)
        if finish or sequence.for_another:
            sequence.finished = True
            if finish or sequence.submit.offer:
                self._outbox.forgive(sequence)
            if not finish and sequence.submit.offer:
                params = self._transfers.offer(sequence, token_id)
        self._pending.tokens.append(
            (sequence.request_id, token_id, finish, logprobs, first, step.began_s, params)
        )

    def _publish(self) -> None:
        events = self._pool.take_events()
        if self._pending.tokens:
            _delay(self._delay_ms.worker_from_core)
        report = self._pending.take(events, self._load())
        if report is not None:
            self._link.send(report)

    def _settle(self) -> bool:
        """After the tokens are out: export and keep what was computed, free what has ended.

        True when a slot has become free.
        """
        running = self._scheduler.running()
        for sequence in running:
            if sequence.for_another:
                self._export(sequence)
        due = [each for each in running if self._cache.due(each)]
        for sequence in due:
            self._keep(sequence)
        ended = [each for each in running if self._is_over(each)]
        for sequence in ended:
            self._release(sequence)
        if due or ended:
            self._publish()
        return bool(ended)

    def _export(self, sequence: Sequence) -> None:
        if not self._outbox.num_due(sequence):
            return
        is_idle = not self._steps.holds(sequence)
        if is_idle:
            sequence.phases.enter(Segment.TRANSFER, time.monotonic())
        for exported in self._outbox.export(sequence):
            self._pending.exported += exported
            self._publish()  # another worker waits for it; what is kept is for later
        if is_idle:
            sequence.wait(time.monotonic())

    def _is_over(self, sequence: Sequence) -> bool:
        if not (sequence.finished or sequence.cancelled):
            return False
        if sequence.cancelled:
            return not self._steps.holds(sequence)
        # Another worker may not yet have got all its KV.
        return not (self._outbox.owes(sequence) or sequence.transferring)

    def _cancel(self, request_id: int) -> None:
        sequence = self._scheduler.find(request_id)
        if sequence is None:
            return  # it had ended before the front's cancel arrived
        sequence.cancelled = True
        if not self._steps.holds(sequence):
            self._release(sequence)

    def _keep(self, sequence: Sequence) -> None:
        """Export the full blocks that the pool lacks."""
        first, places = self._cache.keep(sequence)
        if places:
            self._engine.export_blocks(sequence.slot, first, places)

    def _release(self, sequence: Sequence) -> None:
        if sequence.finished and self._cache.due(sequence, ending=True):
            self._keep(sequence)
        self._scheduler.remove(sequence.request_id)
        if sequence.slot >= 0:
            self._transfers.give_up(sequence)
            self._engine.clear(sequence.slot)
        self._pending.inbox_freed += [block.inbox_slot for block in sequence.staged.values()]
        self._pending.released.append(sequence.request_id)
        if self._scheduler.idle:
            self._check_integrity()

    def _check_integrity(self) -> None:
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_INTERVAL_S:
            self._checked_s = now_s
            self._scheduler.check_integrity()

    def _load(self) -> CoreLoad:
        return self._counters.load(
            self._scheduler,
            self._pool,
            num_outbox_blocks=self._outbox.num_used,
            prefill_tokens_per_s=self._budget.prefill_tokens_per_s,
            drafts=self._speculation.counts,
        )


def _delay(delay_ms: float) -> None:
    if delay_ms > 0:
        time.sleep(delay_ms / 1e3)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m worker.core", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket to the front")
    parser.add_argument("--memory-fd", type=int, required=True, help="memory shared with it")
    parser.add_argument("--cores-shared-by", type=int, default=1)
    parser.add_argument("--role", type=Role, default=Role.BOTH, choices=list(Role))
    options = parser.parse_args(arguments)
    keep_freed_memory()
    # Ctrl-C reaches the whole foreground group; the front decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    connection = socket.socket(fileno=options.fd)
    config = mesh_config.from_json(sys.stdin.read())  # as JSON; the front keeps it off ps
    if config.worker.engine == "tensorrt_llm":  # it has a loop of its own
        from worker.engines.trtllm.start import serve

        return serve(connection, config, role=options.role)
    link = CoreLink(connection)
    try:
        engine = open_engine(config, cores_shared_by=options.cores_shared_by)
    except StartupError as error:
        link.send(Failed(str(error)))
        return 3
    try:
        layout = ArenaLayout(
            block_bytes=engine.info.block_bytes,
            num_pool=engine.info.num_blocks,
            num_inbox=config.worker.num_inbox_blocks,
            num_outbox=config.worker.num_outbox_blocks,
        )
        arena = BlockArena(options.memory_fd, layout)
        core = EngineCore(engine, arena, config, link)
        spare_what_is_there()
        link.send(Ready(engine.info, layout))
        core.run()
    except LinkClosed:
        return 0
    except EngineFailure as error:
        print(f"engine core: {error}", file=sys.stderr)
        return 1
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    leave(main())
