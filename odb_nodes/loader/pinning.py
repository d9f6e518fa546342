"""Collating into pinned memory."""

from __future__ import annotations

from typing import Any

import torch

from odb_nodes._compat.torch import pin_memory
from odb_nodes._core.seeds import declares_draws
from odb_nodes.collate.protocol import Collate, collate_group
from odb_nodes.step_info import StepInfo


class PinningCollate:
    """Pins what a collate function returns, for the device that is current when this is made."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate
        self._device = torch.cuda.current_device()  # A new thread begins with device 0.
        self.draws_random_numbers = declares_draws(collate)

    def pin(self, batch: Any) -> Any:
        """Return a batch pinned."""
        with torch.cuda.device(self._device):
            return pin_memory(batch)

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of `samples`, pinned."""
        return self.pin(self._collate(samples))

    def collate_step(self, samples: list[Any], info: StepInfo) -> Any:
        """Return the batch of `samples` for a step, pinned."""
        return self.pin(collate_group(self._collate, samples, info))
