"""What the allocator of this process does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes
import sys

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of `malloc.h`
_LARGEST_BLOCKS = (1 << 30, 32 << 20)  # older versions of glibc refuse more than the latter


def keep_freed_memory(size_bytes: int) -> None:
    """Have glibc keep so much freed memory for the next allocations, large ones included.

    It returns large blocks to the system at once otherwise, and the first write to each page of the
    next one costs several times what the copy into it does.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_BLOCKS)
        mallopt(_M_TRIM_THRESHOLD, size_bytes)
