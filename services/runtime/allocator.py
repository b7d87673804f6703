"""How the C library gives memory back."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
# The largest that glibc takes for any of its versions.
_LARGEST_BLOCK = 32 << 20
_TOP_PAD = 64 << 20
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """For processes that move megabytes again and again: reuse freed memory.

    By default glibc asks the kernel for each large block and gives it back at once, so
    that every message's pages are made anew. False where there is no such setting.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_BLOCK),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _TOP_PAD),
    )
    return all(mallopt(*setting) == 1 for setting in settings)
