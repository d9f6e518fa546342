"""Internals of torch that we rely on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Pins tensors in any nesting of mappings, sequences and tuples, as torch's `DataLoader` does.
from torch.utils.data._utils.pin_memory import pin_memory


@contextmanager
def without_ddp_sync(model: DistributedDataParallel) -> Iterator[None]:
    """Within the block, forward and backward of a DDP model run no collective."""
    # `no_sync` alone would let the first forward broadcast the buffers once more.
    before = model.require_forward_param_sync
    model.require_forward_param_sync = False
    try:
        with model.no_sync():
            yield
    finally:
        model.require_forward_param_sync = before


class PinnedMemory:
    """Makes pinned memory for the device that is current when this object is made."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()  # A new thread begins with device 0.

    def pin(self, batch: Any) -> Any:
        """Return a batch whose tensors are pinned; pinned tensors are not copied."""
        with torch.cuda.device(self._device):
            return pin_memory(batch)

    def new(self, shape: tuple[int, ...], fill: int, dtype: np.dtype[Any]) -> torch.Tensor:
        """Return a pinned tensor filled with `fill`."""
        alike = torch.from_numpy(np.empty(0, dtype)).dtype
        with torch.cuda.device(self._device):
            return torch.full(shape, fill, dtype=alike, pin_memory=True)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module, such as DDP, that `torch.compile` was called on; or `model` itself."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded over ranks: FSDP, or parameters that are `DTensor`s."""
    loaded = sys.modules.get("torch.distributed.fsdp")  # not imported: no model uses it
    names = ("FullyShardedDataParallel", "FSDPModule")
    kinds = tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
    is_fsdp = any(isinstance(module, kinds) for module in model.modules())
    return is_fsdp or any(map(is_dtensor, model.parameters()))


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that `loss.backward()` gives gradients to, as far as its graph shows."""
    leaves = []
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        waiting += [parent for parent, _ in node.next_functions]
    return leaves


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, which is sharded over ranks."""
    loaded = sys.modules.get("torch.distributed.tensor")  # not imported: there is no `DTensor`
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def forget_step(scaler: torch.amp.GradScaler) -> None:
    """Reset the current step of a scaler, after the step of an optimizer has failed."""
    scaler._per_optimizer_states.clear()
