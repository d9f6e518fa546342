"""What the allocator of this process does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes
import sys

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of `malloc.h`
_LARGEST_OF_OLD = 32 << 20  # bytes: older versions of glibc refuse more


def keep_freed_memory(size_bytes: int) -> None:
    """Have glibc keep so much freed memory for the next allocations, blocks of that size included.

    It returns large blocks to the system at once otherwise, and the first write to each page of the
    next one costs several times what the copy into it does. Larger blocks still are: one that lies
    below a block in use could not be returned, so each process would keep what it has used at most.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        any(mallopt(_M_MMAP_THRESHOLD, size) for size in (size_bytes, _LARGEST_OF_OLD))
        mallopt(_M_TRIM_THRESHOLD, size_bytes)
