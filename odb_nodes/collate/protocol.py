"""What a collate function is."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol, runtime_checkable

from odb_nodes.step_info import StepInfo

Collate = Callable[[list[Any]], MutableMapping[str, Any]]


@runtime_checkable
class StepCollate(Protocol):
    """A collate function that also looks at the step: a batch may need what other ranks have."""

    def collate_step(self, samples: list[Any], info: StepInfo) -> MutableMapping[str, Any]:
        """Return the batch of `samples` for this step; takes the place of calling the function."""


def collate_group(collate: Collate, samples: list[Any], info: StepInfo) -> MutableMapping[str, Any]:
    """Return the batch of a step, from a collate function that looks at it or does not."""
    if isinstance(collate, StepCollate):
        return collate.collate_step(samples, info)
    return collate(samples)
