"""Collate functions: of samples alone, or of samples and the step."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

from odb_nodes.step_info import StepInfo

Collate = Callable[[list[Any]], MutableMapping[str, Any]]


class StepCollate(Protocol):
    """A collate function that also takes the step, since a batch may depend on other ranks."""

    def collate_step(self, samples: list[Any], info: StepInfo) -> MutableMapping[str, Any]:
        """Return the batch of `samples` for this step; called in place of the function itself."""


def collate_group(collate: Collate, samples: list[Any], info: StepInfo) -> MutableMapping[str, Any]:
    """Return the batch of a step, from a collate function of either kind."""
    # Not `isinstance` of the protocol, which is slow before Python 3.12.
    of_step: Any = getattr(collate, "collate_step", None)
    if of_step is None:
        return collate(samples)
    batch: MutableMapping[str, Any] = of_step(samples, info)
    return batch
