"""Memory for KV blocks."""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np

from worker.engines.contract import Bytes


def open_block_memory(num_blocks: int, block_bytes: int) -> Bytes:
    """Zeroed bytes of shape (num_blocks, block_bytes).

    Every page is mapped at once: the first write to a page costs ten times what
    later ones do, and would fall between two tokens of somebody's answer. On Linux
    they lie in a memfd: it can be handed to another process on this host, and is
    gone with the last process that holds it, a SIGKILL included.
    """
    size = num_blocks * block_bytes
    if sys.platform == "linux":
        fd = os.memfd_create("firsttoken-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(fd, size, flags=flags)  # duplicates the descriptor
        finally:
            os.close(fd)
    else:
        mapped = mmap.mmap(-1, size)
    return np.frombuffer(mapped, dtype=np.uint8).reshape(num_blocks, block_bytes)
