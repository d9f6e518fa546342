"""The collate function of padded groups: text samples into a batch of a row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from odb_nodes.collate.token_rows import TokenRows, is_number
from odb_nodes.planning.budget import Shape, TokenBudget, fit_shape
from odb_nodes.sample import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class PaddingCollate(TokenRows):
    """Pads text samples into a batch; the default collate function of a padded budget.

    The keys with a value per token become (B, T) tensors, int64 where they are integers;
    `attention_mask`, (B, T) int64, is made where there is none. Numbers become (n,) tensors. Any
    other key becomes a list of n values. B is n, the number of samples, unless there are `shapes`.

    Args:
        pad_token_id: fills `input_ids`; `labels` are filled with -100, other keys with 0.
        token_keys: the keys with a value per token: a list, an array or a tensor, (L,) or (1, L).
        pad_to_multiple_of: tokens; T is a multiple of it. As in the `TokenBudget`.
        side: where the padding goes, `"right"` or `"left"`. On the left, the first label of each
            sample becomes -100: the causal shift would have it predicted from padding.
        shapes: the only (B, T) that batches have: `TokenBudget.shape_ladder()`. Rows without a
            sample are all padding. Only a sample wider than all of them has another shape. `()`:
            any.
    """

    side: Literal["right", "left"] = "right"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.side not in ("right", "left"):
            raise ValueError(f'`side` must be "right" or "left", but is {self.side!r} instead.')

    @classmethod
    def of(cls, budget: TokenBudget, **options: Any) -> PaddingCollate:
        """Return the collate function for the groups of a padded budget.

        Args:
            budget: of the groups.
            options: further arguments of `PaddingCollate`.
        """
        multiple, shapes = budget.pad_to_multiple_of, budget.shape_ladder()
        return cls(pad_to_multiple_of=multiple, shapes=shapes, **options)

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`.

        Raises:
            TypeError: a sample is no mapping with `input_ids`.
            ValueError: there are more samples than their shape has rows.
            SampleError: the samples differ in their keys; or a key with a value per token has
                another length than `input_ids`, values that are not numbers, or `input_ids` that
                are no integers.
        """
        lengths = self.lengths_of(samples)
        shape = self._shape(lengths)
        batch = {
            key: self._collate(key, [sample[key] for sample in samples], lengths, shape)
            for key in samples[0]
        }
        if "attention_mask" not in batch:
            batch["attention_mask"] = self._attention_mask(lengths, shape)
        return batch

    def _shape(self, lengths: list[int]) -> Shape:
        rows, width = fit_shape(len(lengths), max(lengths), self.shapes, self.pad_to_multiple_of)
        if len(lengths) > rows:
            raise ValueError(
                f"a group whose longest sample has {max(lengths)} tokens must have at most {rows} "
                f"samples, the rows of its shape, but has {len(lengths)} instead. Make `shapes` "
                "with `shape_ladder()` of the `TokenBudget` that forms the groups."
            )
        return rows, width

    def _collate(self, key: str, values: list[Any], lengths: list[int], shape: Shape) -> Any:
        if all(map(is_number, values)):
            return torch.as_tensor(np.asarray(values))
        return self._pad(key, values, lengths, shape) if key in self.token_keys else values

    def _pad(self, key: str, values: list[Any], lengths: list[int], shape: Shape) -> torch.Tensor:
        rows = self.rows_of(key, values, lengths)
        padded = self.blank(key, shape, rows)
        for target, row, length in zip(padded, rows, lengths, strict=False):
            if self.side == "right":
                target[:length] = row
            else:
                target[shape[1] - length :] = row
                if key == "labels" and length:
                    target[shape[1] - length] = IGNORE_INDEX  # padding would predict it
        return torch.from_numpy(padded)

    def _attention_mask(self, lengths: list[int], shape: Shape) -> torch.Tensor:
        mask = np.zeros(shape, dtype=np.int64)
        mask[: len(lengths)] = np.arange(shape[1]) < np.array(lengths)[:, None]
        if self.side == "left":
            mask = np.ascontiguousarray(mask[:, ::-1])
        return torch.from_numpy(mask)
