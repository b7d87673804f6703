"""The memory that a worker's front and core share: KV blocks, and where they come and go.

One memfd, started by the front and sized by the core, which alone knows how large a
block is. It is gone with the last process that holds it, a SIGKILL included, and
can be handed to other processes on this host.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import NamedTuple

import numpy as np

from worker.engines.contract import Bytes, Generations

_ALIGNMENT = 4096


class ArenaLayout(NamedTuple):
    """`pool`: blocks kept for reuse. `inbox`, `outbox`: blocks on their way in and out."""

    block_bytes: int
    num_pool: int
    num_inbox: int
    num_outbox: int

    @property
    def header_bytes(self) -> int:
        """The pool's generations, a whole number of pages."""
        return -(-self.num_pool * 8 // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_blocks(self) -> int:
        return self.num_pool + self.num_inbox + self.num_outbox

    @property
    def num_bytes(self) -> int:
        return self.header_bytes + self.num_blocks * self.block_bytes


class BlockArena:
    """A mapping of the memory. `pool`, `inbox` and `outbox` have shape (number, block_bytes).

    Every page is mapped at once: the first write to a page costs ten times what later
    ones do, and would fall between two tokens of somebody's answer.
    """

    def __init__(self, fd: int, layout: ArenaLayout) -> None:
        self.layout = layout
        if os.fstat(fd).st_size != layout.num_bytes:
            os.ftruncate(fd, layout.num_bytes)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        mapped = mmap.mmap(fd, layout.num_bytes, flags=flags)
        memory = np.frombuffer(mapped, dtype=np.uint8)
        # Bumped before a place in the pool is overwritten: a reader looks before and after.
        self.generations: Generations = memory[: layout.num_pool * 8].view(np.uint64)
        blocks = _blocks(memory, layout)
        self.pool: Bytes = blocks[: layout.num_pool]
        self.inbox: Bytes = blocks[layout.num_pool : layout.num_pool + layout.num_inbox]
        self.outbox: Bytes = outbox_of(memory, layout)


def outbox_of(memory: Bytes, layout: ArenaLayout) -> Bytes:
    """The outbox in `memory`, one dimension, of this or another worker."""
    return _blocks(memory, layout)[layout.num_pool + layout.num_inbox :]


def _blocks(memory: Bytes, layout: ArenaLayout) -> Bytes:
    return memory[layout.header_bytes :].reshape(layout.num_blocks, layout.block_bytes)


def new_memory() -> int:
    """A descriptor of empty memory; the caller closes it."""
    if sys.platform == "linux":
        return os.memfd_create("firsttoken-kv", os.MFD_CLOEXEC)
    import tempfile  # takes as long as the rest of this module's

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
