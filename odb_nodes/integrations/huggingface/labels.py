"""Gives labels the name that models take them by, as the default collator of transformers does."""

from __future__ import annotations

from typing import Any

import torch

from odb_nodes.collate import PaddingCollate


def rename_labels(batch: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """Return a batch whose `label` or `label_ids` is `labels`, as the default collator has it."""
    for key in ("label", "label_ids"):
        if key not in batch or key in taken or "labels" in batch:
            continue
        rest = {name: value for name, value in batch.items() if name != key}
        try:
            labels = torch.as_tensor(batch[key])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`{key}` of each sample must be a number, or lists of one length, to become the "
                f"`labels` of a batch, but is {batch[key]!r:.100}. Give one label per token as "
                "`labels`, or pass a `data_collator`."
            ) from error
        # As the stock collator makes them: the losses of models in fp32 take no fp64.
        rest["labels"] = labels.float() if labels.dtype == torch.float64 else labels
        return rest
    return batch


class RenamingCollate:
    """Pads as training does, with the labels by the name that models take; for evaluation."""

    def __init__(self, collate: PaddingCollate, taken: set[str]) -> None:
        self._collate, self._taken = collate, taken

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Return the batch of `samples`."""
        return rename_labels(self._collate(samples), self._taken)
