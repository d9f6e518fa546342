"""Collate functions, which take samples, or samples and the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from odb_nodes.core.step_info import Batch, StepInfo

Collate = Callable[[list[Any]], Batch]
NewTensor = Callable[[tuple[int, ...], int, "np.dtype[Any]"], torch.Tensor]
"""Shape, value, dtype -> CPU tensor that is filled with the value."""


def takes_step(collate: Any) -> bool:
    """Tell whether a collate function takes the step, so that a batch may depend on other ranks."""
    return getattr(collate, "collate_step", None) is not None


def collate_group(collate: Any, samples: list[Any], info: StepInfo) -> Batch:
    """Return the batch of a step, by `collate_step(samples, info)` if the function has it."""
    batch: Batch = collate.collate_step(samples, info) if takes_step(collate) else collate(samples)
    return batch


def block_collate(collate: Any) -> Callable[..., Batch] | None:
    """Return the method `collate_block` of a collate function, unless a subclass disables it.

    A subclass that overrides `__call__` or `collate_step` alone would make other batches. The
    method takes the block, and a `NewTensor` that makes the tensors of the batch.
    """
    names = {"__call__", "collate_step", "collate_block"}
    for cls in type(collate).__mro__:
        if defined := names & vars(cls).keys():
            return collate.collate_block if "collate_block" in defined else None
    return None


def new_tensor(shape: tuple[int, ...], fill: int, dtype: np.dtype[Any]) -> torch.Tensor:
    """Return a tensor filled with a value."""
    return torch.from_numpy(np.full(shape, fill, dtype))  # half the time of `torch.full`


def copy_for_collate(data: Any) -> Any:
    """Return a sample that a collate function may change: a copy, if it is a dict.

    Some functions remove keys, and the sample may be collated again: in a filler step, or after an
    error.
    """
    return data.copy() if isinstance(data, dict) else data
