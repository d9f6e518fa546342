"""Peak memory of a training step, and out-of-memory errors."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch

from odb_nodes._support.checks import check_number
from odb_nodes._support.user_warning import warn_user

MOST_BYTES = 2**63 - 1
GIB = 2**30
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
UNFRAGMENTED = ("expandable_segments:True", "cudaMallocAsync")
MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU, MPS, and errors of the CUDA runtime
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Messages of a `RuntimeError` that means out of memory, though no `OutOfMemoryError`."""


@runtime_checkable
class MemoryMeter(Protocol):
    """Measures peak memory since its last `reset`.

    A meter that measures only within a `with` block is also a context manager. Functions that take
    a meter enter it, more than once.
    """

    @property
    def limit_bytes(self) -> int:
        """The most bytes that a peak may have."""

    def reset(self) -> None:
        """Set the peak to the memory in use now."""

    def peak_bytes(self) -> int:
        """Return the most bytes in use at any time since `reset`."""


class CudaMeter:
    """Measures the memory of torch's allocator on one GPU.

    The limit is a share of the memory available to this process when the meter is made: the free
    memory of the device plus the allocator's reserved bytes, within
    `torch.cuda.set_per_process_memory_fraction`. Memory of other processes, of the CUDA context and
    of libraries other than torch is not available.

    The peak counts *allocated* bytes. The allocator reserves more, since freed blocks do not always
    fit later tensors; `share` leaves room for that, and `reserved_bytes` measures it.

    Args:
        device: the GPU; `None` for the current GPU.
        share: share of the available memory that a peak may have, above 0 and at most 1.

    Raises:
        RuntimeError: torch sees no GPU.
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(self, device: torch.device | int | str | None = None, share: float = 0.9) -> None:
        check_number("share", share, "(0, 1]")
        if not torch.cuda.is_available():
            raise RuntimeError(
                "`CudaMeter` needs a GPU, but torch sees none. On a CPU, use "
                "`odb_nodes.testing.SavedTensorMeter`."
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        if device is not None:
            self._device = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
        if self._device.type != "cuda":
            raise ValueError(f"`device` must be a GPU, but is {device!r} instead.")
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        reserved_bytes = torch.cuda.memory_reserved(self._device)
        allowed_bytes = total_bytes * torch.cuda.get_per_process_memory_fraction(self._device)
        self._limit_bytes = int(share * min(free_bytes + reserved_bytes, allowed_bytes))

    @property
    def limit_bytes(self) -> int:
        """See `MemoryMeter`."""
        return self._limit_bytes

    def reset(self) -> None:
        """Begin a new measurement."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the peak of allocated bytes since `reset`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reserved_bytes(self) -> int:
        """Return the peak of reserved bytes since `reset`, never below `peak_bytes()`."""
        return torch.cuda.max_memory_reserved(self._device)


def warn_of_fragments(meter: MemoryMeter) -> None:
    """Warn if a GPU's allocator cannot reuse freed blocks for batches of other shapes."""
    settings = ",".join(os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)
    if isinstance(meter, CudaMeter) and not any(setting in settings for setting in UNFRAGMENTED):
        warn_user(
            f"Set {ALLOCATOR_SETTINGS[0]}=expandable_segments:True before Python starts: without "
            "it, a budget that fits in batches of the tried widths may not fit in others, since "
            "freed blocks are too small for them."
        )


def check_meter(meter: object, name: str = "meter") -> MemoryMeter:
    """Return the argument `name`, which must be a meter."""
    if isinstance(meter, type) or not isinstance(meter, MemoryMeter):
        raise TypeError(
            f"`{name}` must have `reset()`, `peak_bytes()` and `limit_bytes`, but is "
            f"{meter!r:.80} instead. On a GPU, pass `CudaMeter()`."
        )
    return meter


def measuring(meter: MemoryMeter | None) -> AbstractContextManager[Any]:
    """Return the context in which a meter measures; an empty one without a meter."""
    return meter if isinstance(meter, AbstractContextManager) else nullcontext()


class ShapeTooLargeError(RuntimeError):
    """A training step with a batch of this shape does not fit into memory.

    Attributes:
        rows: rows of the batch.
        width: tokens of each row.
        patches: image patches of the batch.
    """

    def __init__(self, message: str, rows: int, width: int, patches: int) -> None:
        super().__init__(message)
        self.rows, self.width, self.patches = rows, width, patches


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, or an error that it was raised `from`, means out of memory.

    It may be the memory of a device or of the host.
    """
    return any(
        isinstance(cause, (torch.OutOfMemoryError, MemoryError))
        or (isinstance(cause, RuntimeError) and any(part in str(cause) for part in MESSAGES))
        for cause in _chain(error, with_contexts=False)
    )


def free_memory(error: BaseException | None = None, *, old_garbage: bool = True) -> None:
    """Collect garbage, and release the memory that torch's allocator caches.

    Args:
        error: a caught error. Variables in the frames of its traceback, and of the errors that it
            was raised from, hold the tensors of the failed step: they are cleared. The traceback
            can still be printed.
        old_garbage: whether to collect among all objects of the process, which takes a tenth of a
            second or more, or among recent objects alone.
    """
    for cause in _chain(error, with_contexts=True):
        traceback.clear_frames(cause.__traceback__)
    gc.collect(2 if old_garbage else 1)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _chain(error: BaseException | None, *, with_contexts: bool) -> Iterator[BaseException]:
    """Yield an error and its causes, which may form a cycle."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            waiting.append(cause.__cause__)
            if with_contexts:
                waiting.append(cause.__context__)
