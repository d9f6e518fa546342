"""Collate functions: of samples alone, or of samples and the step."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol, runtime_checkable

from odb_nodes.step_info import StepInfo

Collate = Callable[[list[Any]], MutableMapping[str, Any]]


@runtime_checkable
class StepCollate(Protocol):
    """A collate function that also takes the step, since a batch may depend on other ranks."""

    def collate_step(self, samples: list[Any], info: StepInfo) -> MutableMapping[str, Any]:
        """Return the batch of `samples` for this step; called in place of the function itself."""


def collate_group(collate: Collate, samples: list[Any], info: StepInfo) -> MutableMapping[str, Any]:
    """Return the batch of a step, from a collate function of either kind."""
    if isinstance(collate, StepCollate):
        return collate.collate_step(samples, info)
    return collate(samples)
