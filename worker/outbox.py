"""Exporting the KV of prompts that are computed for other workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.core.kvblocks import checksum
from worker.arena import BlockArena
from worker.engines.contract import Engine
from worker.messages import ExportedBlock
from worker.sequence import Sequence

# Bytes exported at once: the other worker takes them while the next are exported.
RUN_BYTES = 4 << 20


class Outbox:
    """Blocks in the outbox are on their way; `free` their slots when they have been read.

    `early_blocks`: as worker.handoff_export_blocks.
    """

    def __init__(self, engine: Engine, arena: BlockArena, *, early_blocks: int) -> None:
        self.early_blocks = early_blocks
        self._engine = engine
        self._info = engine.info
        self._memory = arena.outbox
        self._free = list(range(arena.layout.num_outbox))
        self._run_blocks = max(1, RUN_BYTES // engine.info.block_bytes)

    @property
    def num_used(self) -> int:
        return len(self._memory) - len(self._free)

    def free(self, slots: Iterable[int]) -> None:
        self._free += slots

    def owes(self, sequence: Sequence) -> bool:
        """There is KV left that another worker waits for."""
        return sequence.for_another and sequence.export_next < self._num_blocks(sequence)

    def forgive(self, sequence: Sequence) -> None:
        """Nobody needs its KV."""
        sequence.export_next = self._num_blocks(sequence)

    def num_due(self, sequence: Sequence) -> int:
        """Finished blocks that there is room for, here and there."""
        return min(self._num_due(sequence), len(self._free), sequence.export_credit)

    def export(self, sequence: Sequence) -> Iterator[list[ExportedBlock]]:
        """Those, in runs."""
        count = self.num_due(sequence)
        while count > 0:
            run = min(count, self._run_blocks)
            yield self._export(sequence, run)
            count -= run

    def _export(self, sequence: Sequence, count: int) -> list[ExportedBlock]:
        info, first = self._info, sequence.export_next
        slots = [self._free.pop() for _ in range(count)]
        sizes = [
            min(info.block_tokens, sequence.num_input - index * info.block_tokens)
            for index in range(first, first + count)
        ]
        sequence.export_next += count
        sequence.export_credit -= count
        exported = []
        for index, slot, size in zip(range(first, first + count), slots, sizes, strict=True):
            view = self._memory[slot][: size * info.token_bytes]
            self._engine.export_blocks(sequence.slot, index, [view])
            # Now that its bytes are in the processor's cache.
            digest = checksum(view)
            exported.append(ExportedBlock(sequence.request_id, index, size, slot, digest))
        return exported

    def _num_due(self, sequence: Sequence) -> int:
        if sequence.finished:
            return self._num_blocks(sequence) - sequence.export_next
        count = sequence.num_computed // self._info.block_tokens - sequence.export_next
        return count if self.early_blocks and count >= self.early_blocks else 0

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.num_input // self._info.block_tokens)
