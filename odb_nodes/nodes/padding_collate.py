"""The default collate function: text samples into a padded batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal

import numpy as np
import torch

from odb_nodes.checks import check_count
from odb_nodes.errors import SampleError
from odb_nodes.planning.budget import round_up
from odb_nodes.sample import IGNORE_INDEX, flat

TOKEN_KEYS = (
    "input_ids",
    "labels",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "special_tokens_mask",
)


@dataclass(frozen=True, kw_only=True)
class PaddingCollate:
    """Pads text samples into a batch; the default collate function.

    The keys with a value per token become (B, T) tensors, int64 where they are integers;
    `attention_mask`, (B, T) int64, is made where there is none. Numbers become (B,) tensors. Any
    other key becomes a list of B values.

    Args:
        pad_token_id: fills `input_ids`; `labels` are filled with -100, other keys with 0.
        pad_to_multiple_of: tokens; T is a multiple of it. As in the `TokenBudget`.
        side: where the padding goes, `"right"` or `"left"`.
        token_keys: the keys with a value per token: a list, an array or a tensor, (L,) or (1, L).
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int = 1
    side: Literal["right", "left"] = "right"
    token_keys: tuple[str, ...] = TOKEN_KEYS

    def __post_init__(self) -> None:
        check_count("pad_to_multiple_of", self.pad_to_multiple_of)
        if self.side not in ("right", "left"):
            raise ValueError(f'`side` must be "right" or "left", but is {self.side!r} instead.')

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`.

        Raises:
            TypeError: a sample is no mapping with `input_ids`.
            ValueError: the samples differ in their keys, or a key with a value per token has
                another length than `input_ids`.
            SampleError: the values of such a key are not numbers, or `input_ids` no integers.
        """
        for index, sample in enumerate(samples):
            if not isinstance(sample, Mapping) or "input_ids" not in sample:
                raise TypeError(
                    "`PaddingCollate` takes mappings with `input_ids`, but sample "
                    f"{index} of the group is a `{type(sample).__name__}`. Pass a `collate_fn`."
                )
            if sample.keys() != samples[0].keys():
                raise ValueError(
                    f"the samples of a group must have the same keys, but have {sorted(sample)} "
                    f"and {sorted(samples[0])} instead."
                )
        lengths = [len(flat("input_ids", sample["input_ids"])) for sample in samples]
        batch = {
            key: self._collate(key, [sample[key] for sample in samples], lengths)
            for key in samples[0]
        }
        if "attention_mask" not in batch:
            batch["attention_mask"] = self._attention_mask(lengths)
        return batch

    def prepare(self, sample: Any) -> Any:
        """Return a sample with its values per token as (L,) arrays, which collating only copies.

        `ODBDataLoader` calls this in its workers: lists take long to convert. What is no mapping is
        returned as it is, and so is a sample that has nothing to convert.

        Raises:
            SampleError: values per token are not numbers, or `input_ids` no integers.
        """
        if not isinstance(sample, Mapping):
            return sample
        rows = {
            key: _row(key, value)
            for key in self.token_keys
            if (value := sample.get(key)) is not None and not _is_number(value)
        }
        converted = any(row is not sample[key] for key, row in rows.items())
        return {**sample, **rows} if converted else sample

    def _collate(self, key: str, values: list[Any], lengths: list[int]) -> Any:
        if all(map(_is_number, values)):
            return torch.as_tensor(np.asarray(values))
        return self._pad(key, values, lengths) if key in self.token_keys else values

    def _pad(self, key: str, values: list[Any], lengths: list[int]) -> torch.Tensor:
        rows = [_row(key, value) for value in values]
        if (found := list(map(len, rows))) != lengths:
            raise ValueError(
                f"`{key}` must have the lengths of `input_ids` ({lengths}), but has {found} "
                "instead. Leave it out of `token_keys` if it has no value per token."
            )
        fill = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX}.get(key, 0)
        dtype = np.result_type(*{row.dtype for row in rows})
        if dtype.kind in "iu":
            dtype = np.dtype(np.int64)  # what embeddings and losses take
        padded = np.full((len(rows), self._width(lengths)), fill, dtype=dtype)
        for target, row, length in zip(padded, rows, lengths, strict=True):
            if self.side == "right":
                target[:length] = row
            else:
                target[-length:] = row
        return torch.from_numpy(padded)

    def _attention_mask(self, lengths: list[int]) -> torch.Tensor:
        mask = np.arange(self._width(lengths)) < np.array(lengths)[:, None]
        if self.side == "left":
            mask = mask[:, ::-1]
        return torch.from_numpy(mask.astype(np.int64))

    def _width(self, lengths: list[int]) -> int:
        return round_up(max(lengths), self.pad_to_multiple_of)


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or getattr(value, "ndim", None) == 0


def _row(key: str, value: Any) -> Any:
    """Return values per token as an (L,) array."""
    if type(value) is np.ndarray and value.ndim == 1:
        row = value
    else:
        row = flat(key, value)
        try:
            row = row.numpy(force=True) if isinstance(row, torch.Tensor) else np.asarray(row)
        except (TypeError, ValueError):  # numpy lacks the dtype, or the list is ragged
            row = np.empty(0, object)
        if row.shape == (0,) and row.dtype == np.float64:
            row = row.astype(np.int64)  # an empty list says nothing of its kind
    if row.ndim != 1 or row.dtype.kind not in ("iu" if key == "input_ids" else "biuf"):
        rule = "integers" if key == "input_ids" else "numbers"
        raise SampleError(
            f"`{key}` must hold {rule}, one per token, but is {value!r:.200} instead. Convert it "
            "in processing, or pass a `collate_fn` of your own."
        )
    return row
