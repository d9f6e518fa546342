"""Errors that say that memory ran out, and giving back what they hold."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator

import torch

__all__ = ["ShapeTooLargeError", "free_memory", "is_out_of_memory"]

MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU, MPS, and errors of the CUDA runtime
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""What a `RuntimeError` says where memory ran out, but torch raised no `OutOfMemoryError`."""


class ShapeTooLargeError(RuntimeError):
    """A step of training with a batch of this shape does not fit into memory.

    Attributes:
        rows: rows of the batch.
        width: tokens of each row.
        patches: image patches of the batch.
    """

    def __init__(self, message: str, rows: int, width: int, patches: int) -> None:
        super().__init__(message)
        self.rows, self.width, self.patches = rows, width, patches


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, or one that it was raised `from`, says that memory ran out.

    It may be the memory of a device or of the host.
    """
    return any(map(_says_out_of_memory, _causes(error)))


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in MESSAGES)


def free_memory(error: BaseException | None = None, *, old_garbage: bool = True) -> None:
    """Give back memory that nothing needs any more: garbage, and what torch's allocator caches.

    Args:
        error: an error that has been caught. The frames of its traceback, and of the errors that
            it was raised from, hold the tensors of the step that failed; their variables are
            cleared. The frames themselves stay, so a traceback can still be printed.
        old_garbage: whether to look for garbage among all objects of the process, which takes a
            tenth of a second or more, or among recent ones alone.
    """
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
    gc.collect(2 if old_garbage else 1)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]
