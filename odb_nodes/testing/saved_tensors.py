"""Memory of a limited size on a CPU: counts the tensors that autograd saves for `backward`."""

from __future__ import annotations

import threading
from typing import Any, Literal, get_args

import torch
from torch.autograd.graph import saved_tensors_hooks

from odb_nodes._support.checks import check_choice, check_count

FailsIn = Literal["forward", "backward"]


class _Saved:
    """A tensor that autograd has saved. It counts until autograd releases it."""

    def __init__(self, tensor: torch.Tensor, meter: SavedTensorMeter) -> None:
        # Detached: a result refers to its node, and the node to this object: a cycle.
        self.tensor = tensor.detach()
        self._meter = meter
        self._storage = tensor.untyped_storage()
        meter._take(self._storage)

    def __del__(self) -> None:
        self._meter._release(self._storage)


class SavedTensorMeter:
    """Counts the bytes that autograd saves on a CPU, and fails above a limit as a GPU does.

    It is a `MemoryMeter`: use it to try and test code for a GPU without one. It measures within a
    `with` block, which may be entered several times:

        with SavedTensorMeter(64 * 2**20) as meter:
            train_step(batch)
        print(meter.peak_bytes())

    Tensors that share a storage count once, until autograd has released all of them. Weights count
    if autograd saves them; gradients and the optimizer's state do not. Within
    `torch.utils.checkpoint` without reentry only the inputs of a block count.

    Args:
        limit_bytes: most bytes that may be saved at one time.
        fails_in: pass in which a step above the limit raises `torch.OutOfMemoryError`: `"forward"`
            or `"backward"`.
        backward_point: with `"backward"`, number of saved tensors that the backward pass reads
            before it fails; at most, it fails at the last saved tensor.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(
        self, limit_bytes: int, *, fails_in: FailsIn = "forward", backward_point: int = 0
    ) -> None:
        self._limit_bytes = check_count("limit_bytes", limit_bytes, maximum=2**63 - 1)
        check_choice("fails_in", fails_in, get_args(FailsIn))
        self._fails_in = fails_in
        self._backward_point = check_count("backward_point", backward_point, 0)
        self._lock = threading.RLock()  # autograd may release tensors in another thread
        self._holders: dict[int, int] = {}  # address of a storage -> saved tensors that share it
        self._bytes = self._peak_bytes = 0
        self._saved = self._read = 0  # tensors, in this forward pass and its backward pass
        self._exceeded = False
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    @property
    def limit_bytes(self) -> int:
        """Most bytes that may be saved at one time."""
        return self._limit_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd has saved now."""
        return self._bytes

    def reset(self) -> None:
        """Begin a new measurement, from the bytes that are saved now."""
        self._peak_bytes = self._bytes
        self._begin_step()

    def peak_bytes(self) -> int:
        """Return the most bytes that were saved at one time since `reset`."""
        return self._peak_bytes

    def __enter__(self) -> SavedTensorMeter:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _begin_step(self) -> None:
        self._saved = self._read = 0
        self._exceeded = False

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if self._read and not self._holders:  # a step after one whose backward pass has ended
            self._begin_step()
        self._saved += 1
        return _Saved(tensor, self)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        self._read += 1
        if self._exceeded and self._read > min(self._backward_point, self._saved - 1):
            self._fail("backward")
        return saved.tensor

    def _take(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            address = storage.data_ptr()
            holders = self._holders.get(address, 0)
            self._holders[address] = holders + 1
            if holders == 0:
                self._bytes += storage.nbytes()
            self._peak_bytes = max(self._peak_bytes, self._bytes)
            if self._bytes > self._limit_bytes:
                if self._fails_in == "forward":
                    self._fail("forward")
                self._exceeded = True

    def _release(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            address = storage.data_ptr()
            self._holders[address] -= 1
            if self._holders[address] == 0:
                del self._holders[address]
                self._bytes -= storage.nbytes()

    def _fail(self, where: str) -> None:
        raise torch.OutOfMemoryError(
            f"out of memory in the {where} pass: {self._bytes} bytes are saved, but the limit is "
            f"{self._limit_bytes}."
        )
