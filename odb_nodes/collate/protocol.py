"""Collate functions: of samples alone, or of samples and the step."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol, cast

import numpy as np
import torch

from odb_nodes.step_info import StepInfo

Collate = Callable[[list[Any]], MutableMapping[str, Any]]
NewTensor = Callable[[tuple[int, ...], int, "np.dtype[Any]"], torch.Tensor]
"""Shape, value, dtype -> tensor that is filled with the value, in the memory of the CPU."""


class StepCollate(Protocol):
    """A collate function that also takes the step, since a batch may depend on other ranks."""

    def collate_step(self, samples: list[Any], info: StepInfo) -> MutableMapping[str, Any]:
        """Return the batch of `samples` for this step; called in place of the function itself."""


def takes_step(collate: Any) -> bool:
    """Tell whether a collate function is a `StepCollate`."""
    # Not `isinstance` of the protocol, which is slow before Python 3.12.
    return getattr(collate, "collate_step", None) is not None


def collate_group(collate: Collate, samples: list[Any], info: StepInfo) -> MutableMapping[str, Any]:
    """Return the batch of a step, from a collate function of either kind."""
    if not takes_step(collate):
        return collate(samples)
    return cast(StepCollate, collate).collate_step(samples, info)


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
