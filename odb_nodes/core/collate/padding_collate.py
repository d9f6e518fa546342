"""The collate function of padded groups: a row of the batch for each text sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from odb_nodes._support.arrays import INT64
from odb_nodes._support.checks import check_choice
from odb_nodes.core.collate.token_rows import GroupRows, TokenRows
from odb_nodes.core.planning.budget import Layout, Shape, fit_shape
from odb_nodes.core.sample import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class PaddingCollate(TokenRows):
    """Pads text samples into a batch; the default collate function of a padded budget.

    Keys with a value per token become (B, T) tensors, integers as int64. `attention_mask`, (B, T)
    int64, is added if samples have none. Numbers become (n,) tensors, and other values lists of n.
    B is n, the number of samples, unless there are `shapes`.

    Args:
        pad_token_id: the value that fills `input_ids`; `labels` are filled with -100, other keys
            with 0.
        token_keys: the keys with a value per token: a list, an array or a tensor, (L,) or (1, L).
        pad_to_multiple_of: tokens; T is a multiple of it. As in the `TokenBudget`.
        side: the side of a row that is padded, `"right"` or `"left"`. With `"left"`, the first
            label of each sample becomes -100, since padding would predict it.
        shapes: the only shapes (B, T) of batches, from `TokenBudget.shape_ladder()`; `()` for any.
            Rows without a sample are all padding. An oversize sample has a shape of its length.
    """

    draws_random_numbers: ClassVar[bool] = False
    side: Literal["right", "left"] = "right"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("side", self.side, ("right", "left"))

    @property
    def layout(self) -> Layout:
        """Layout of the budgets that it collates for."""
        return "padded"

    def batch_of(self, group: GroupRows) -> dict[str, Any]:
        """Return the batch of a group."""
        shape = self._shape(group.lengths)
        batch = {key: self.join(key, group, shape) for key in group.keys}
        if "attention_mask" not in batch:
            batch["attention_mask"] = self._attention_mask(group, shape)
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

    def place(
        self, key: str, joined: npt.NDArray[Any], rows: list[Any], lengths: list[int]
    ) -> None:
        """Write each row to the side of `joined` without padding. See `TokenRows.place`."""
        width = joined.shape[1]
        for target, row, length in zip(joined, rows, lengths, strict=False):
            if self.side == "right":
                target[:length] = row
            elif length:
                target[width - length :] = row
                if key == "labels":
                    target[width - length] = IGNORE_INDEX  # padding would predict it

    def _attention_mask(self, group: GroupRows, shape: Shape) -> torch.Tensor:
        rows, width = shape
        dtype = np.int16 if width < 2**15 else np.int64  # Numpy compares narrow numbers faster.
        stops = np.zeros((rows, 1), dtype)
        stops[: len(group.lengths), 0] = group.lengths
        mask = np.arange(width, dtype=dtype) < stops
        if self.side == "left":
            mask = mask[:, ::-1]
        tensor = group.new(shape, 0, INT64)
        tensor.numpy()[:] = mask
        return tensor
