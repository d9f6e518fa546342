"""How much memory a step of training took at its peak, and errors that say that it ran out."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch

from odb_nodes._core.checks import check_number
from odb_nodes._core.user_warning import warn_user

MOST_BYTES = 2**63 - 1
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
"""What a `RuntimeError` says where memory ran out, but torch raised no `OutOfMemoryError`."""


@runtime_checkable
class MemoryMeter(Protocol):
    """Measures the peak of memory between two moments.

    A meter that measures only within a `with` block is a context manager, too: what takes a meter
    enters it. So it can be entered more than once.

    Attributes:
        limit_bytes: most bytes that a peak may have.
    """

    @property
    def limit_bytes(self) -> int:
        """Most bytes that a peak may have."""

    def reset(self) -> None:
        """Begin a new measurement: the peak is what is taken now."""

    def peak_bytes(self) -> int:
        """Return the most bytes that were taken at one time since `reset`."""


class CudaMeter:
    """Measures what torch's allocator takes of one GPU.

    The limit is a share of what this process could have when the meter was made: the free memory of
    the device, and what the allocator has reserved. Other processes, the CUDA context and libraries
    beside torch are not in it; nor is what `torch.cuda.set_per_process_memory_fraction` refuses.

    The peak is that of *allocated* bytes. The allocator reserves more, since freed blocks do not
    always fit what comes next; `reserved_bytes` says how much. `share` leaves room for that.

    Args:
        device: the GPU; `None` for the current one.
        share: share of that memory that a peak may have, above 0 and at most 1.

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
        own_bytes = torch.cuda.memory_reserved(self._device)
        allowed_bytes = total_bytes * torch.cuda.get_per_process_memory_fraction(self._device)
        self._limit_bytes = int(share * min(free_bytes + own_bytes, allowed_bytes))

    @property
    def limit_bytes(self) -> int:
        """Most bytes that a peak may have."""
        return self._limit_bytes

    def reset(self) -> None:
        """Begin a new measurement of allocated and reserved bytes."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the peak of allocated bytes since `reset`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reserved_bytes(self) -> int:
        """Return the peak of reserved bytes since `reset`, never below `peak_bytes()`."""
        return torch.cuda.max_memory_reserved(self._device)


def warn_of_fragments(meter: MemoryMeter) -> None:
    """Warn where a GPU's allocator cannot use freed blocks for batches of other shapes."""
    settings = ",".join(os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)
    if isinstance(meter, CudaMeter) and not any(one in settings for one in UNFRAGMENTED):
        warn_user(
            f"Set {ALLOCATOR_SETTINGS[0]}=expandable_segments:True before Python starts: without "
            "it, a budget that was found with batches of some widths may not fit with others, "
            "since what they free is in pieces that do not fit."
        )


def check_meter(meter: Any, name: str = "meter") -> MemoryMeter:
    """Return the argument of that name, which must be a meter."""
    if isinstance(meter, type) or not isinstance(meter, MemoryMeter):
        raise TypeError(
            f"`{name}` must have `reset()`, `peak_bytes()` and `limit_bytes`, but is "
            f"{meter!r:.80} instead. On a GPU, pass `CudaMeter()`."
        )
    return meter


def measuring(meter: MemoryMeter | None) -> AbstractContextManager[Any]:
    """Return the block within which a meter, if there is one, measures."""
    return meter if isinstance(meter, AbstractContextManager) else nullcontext()


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
    return any(
        isinstance(one, (torch.OutOfMemoryError, MemoryError))
        or (isinstance(one, RuntimeError) and any(part in str(one) for part in MESSAGES))
        for one in _chain(error, with_contexts=False)
    )


def free_memory(error: BaseException | None = None, *, old_garbage: bool = True) -> None:
    """Free garbage, and the memory that torch's allocator caches.

    Args:
        error: an error that has been caught. The frames of its traceback, and of the errors that
            it was raised from, hold the tensors of the step that failed; their variables are
            cleared. The frames themselves stay, so a traceback can still be printed.
        old_garbage: whether to look for garbage among all objects of the process, which takes a
            tenth of a second or more, or among recent ones alone.
    """
    for one in _chain(error, with_contexts=True):
        traceback.clear_frames(one.__traceback__)
    gc.collect(2 if old_garbage else 1)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _chain(error: BaseException | None, *, with_contexts: bool) -> Iterator[BaseException]:
    """Yield an error and its causes, which may form a circle."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__] if with_contexts else [one.__cause__]
