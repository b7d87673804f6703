"""L1: the memory of one node that holds KV blocks.

A memfd, new for each incarnation: workers on this host map it and copy blocks in and
out themselves. It is not populated: a page costs a microsecond when it is first
written, once in the arena's life and while nobody waits (blocks are stored behind the
answer), and populating tens of gigabytes would keep a node from starting for minutes.
"""

from __future__ import annotations

import os

import numpy as np

from services.core.kvblocks import (
    ArenaLayout,
    Block,
    Buffer,
    Bytes,
    Place,
    SlotHeader,
    checksum,
    clear_header,
    copy_block,
    payload,
    read_header,
    write_header,
)
from services.runtime.sharing import SharedMemory, create_memory


class Arena:
    """Slots of one size: that of the blocks here, and another when there are none.

    Generations are kept here and only told to the memory: others can write to that.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._fd = create_memory("firsttoken-l1", capacity_bytes)
        self._memory = SharedMemory(self._fd)
        self.capacity_bytes = capacity_bytes
        self.layout = ArenaLayout(0, 0)
        self._slots = self._memory.array.reshape(1, -1)
        # Of all slots there ever were: no two places are the same.
        self._last_generation = 0
        self._generations: dict[int, int] = {}

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def is_laid_out(self) -> bool:
        return self.layout.slot_bytes > 0

    def lay_out(self, num_bytes: int) -> None:
        """For blocks of this size, from now on. Only while no slot is in use."""
        assert self.has_room_for(num_bytes)
        self.layout = ArenaLayout.for_blocks(num_bytes, self.capacity_bytes)
        self._slots = self.layout.arena(self._memory.array)
        self._generations = {}

    def has_room_for(self, num_bytes: int) -> bool:
        return ArenaLayout.for_blocks(num_bytes, self.capacity_bytes).num_slots > 0

    def takes(self, num_bytes: int) -> bool:
        """Whether the layout is for blocks of this size."""
        return ArenaLayout.for_blocks(num_bytes, self.capacity_bytes) == self.layout

    def begin(self, slot: int) -> Place:
        """Nothing lies in the slot from now on; whoever still reads it will notice."""
        self._last_generation += 1
        self._generations[slot] = self._last_generation
        clear_header(self._slots, slot, self._last_generation)
        return self.place(slot)

    def place(self, slot: int) -> Place:
        return Place(slot, self._generations[slot])

    def write(self, slot: int, data: Buffer) -> None:
        """Releases the GIL, and may run in a thread."""
        source = np.frombuffer(data, dtype=np.uint8)
        np.copyto(payload(self._slots, slot, len(source)), source)

    def publish(self, slot: int, block: Block, digest: bytes) -> None:
        """The bytes are there: now the header."""
        write_header(self._slots, slot, SlotHeader(self._generations[slot], block, digest))

    def view(self, slot: int, num_bytes: int) -> Bytes:
        return payload(self._slots, slot, num_bytes)

    def verify(self, slot: int, num_bytes: int, digest: bytes) -> bool:
        """Releases the GIL, and may run in a thread."""
        return checksum(self.view(slot, num_bytes)) == digest

    def header_is_whole(self, slot: int, block: Block, digest: bytes) -> bool:
        """Whether the header in memory is the one that was written."""
        return read_header(self._slots, slot) == SlotHeader(self._generations[slot], block, digest)

    def copy(self, slot: int, block: Block, into: Bytes) -> str:
        """ "" or why the block cannot be had (see copy_block)."""
        return copy_block(self._slots, self.place(slot), block, into)

    def close(self) -> None:
        """Others keep what they have mapped. May be called twice."""
        self._slots = np.empty((0, 0), dtype=np.uint8)
        self._memory.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
