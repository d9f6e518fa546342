"""Collate functions: of samples alone, or of samples and the step."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import torch

from odb_nodes.step_info import StepInfo

Collate = Callable[[list[Any]], MutableMapping[str, Any]]
NewTensor = Callable[[tuple[int, ...], int, "np.dtype[Any]"], torch.Tensor]
"""Shape, value, dtype -> tensor that is filled with the value, in the memory of the CPU."""


def takes_step(collate: Any) -> bool:
    """Tell whether a collate function also takes the step: a batch may depend on other ranks."""
    return getattr(collate, "collate_step", None) is not None


def collate_group(collate: Any, samples: list[Any], info: StepInfo) -> MutableMapping[str, Any]:
    """Return the batch of a step, by `collate_step(samples, info)` where a function has it."""
    batch: MutableMapping[str, Any] = (
        collate.collate_step(samples, info) if takes_step(collate) else collate(samples)
    )
    return batch


def block_collate(collate: Any) -> Callable[..., MutableMapping[str, Any]] | None:
    """Return the function that collates a block, where a class has one for its `__call__`.

    It takes the block, and a `NewTensor` that makes the tensors of the batch.
    """
    names = {"__call__", "collate_step", "collate_block"}
    first = next(names & vars(one).keys() for one in type(collate).__mro__ if names & {*vars(one)})
    return collate.collate_block if "collate_block" in first else None


def new_tensor(shape: tuple[int, ...], fill: int, dtype: np.dtype[Any]) -> torch.Tensor:
    """Return a tensor that is filled with a value."""
    return torch.from_numpy(np.full(shape, fill, dtype))  # half the time of `torch.full`


def owned(data: Any) -> Any:
    """Return the dict of a sample as one that a collate function may change.

    Some take keys out. The sample may come again: in a filler step, or where collation raised.
    """
    return data.copy() if isinstance(data, dict) else data
