"""The collate function of packed groups: all text samples in one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_bool, check_type, keep_count
from odb_nodes.core.collate.token_rows import (
    GroupRows,
    TokenRows,
    is_number,
    length_of,
    of_group,
    token_array,
)
from odb_nodes.core.planning.budget import Layout, TokenBudget, fit_shape
from odb_nodes.core.sample import IGNORE_INDEX
from odb_nodes.errors import SampleError

_IMAGE_KEYS = ("pixel_values", "image_grid_thw")
KEPT = {
    "attention_mask": "be 1 throughout: a packed row hides no tokens of a sample",
    "position_ids": "count from 0: they tell where a sample begins",
}
_CHECKED_KEYS = (*_IMAGE_KEYS, *KEPT)


@dataclass(frozen=True, kw_only=True)
class PackedCollate(TokenRows):
    """Packs text samples into one row; the default collate function of a packed budget.

    Keys with a value per token become (1, T) tensors, integers as int64. `labels` are always among
    them, by default the `input_ids`; the first label of each sample is -100, so no token is
    predicted from another sample. `position_ids`, (1, T) int64, begin at 0 in each sample: models
    of transformers keep attention within samples by them. Padding has position 0 throughout.
    Numbers become (n,) tensors, and other values lists of n.

    Models of transformers take a batch unchanged: `model(**batch)`. Others find the samples by
    `cu_seq_lens_q` or `position_ids`.

    Args:
        pad_token_id: the value that fills `input_ids`; `labels` are filled with -100, other keys
            with 0.
        token_keys: the keys with a value per token: a list, an array or a tensor, (L,) or (1, L).
        pad_to_multiple_of: tokens; T is a multiple of it, as in the `TokenBudget`.
        shapes: the only shapes (1, T) of batches, from `TokenBudget.shape_ladder()`; `()` for any.
            An oversize sample has its own.
        max_samples: most samples of a group, which bounds the shape of `cu_seq_lens` too.
        model_arguments: whether to add further arguments of transformers' models: `cu_seq_lens_q`
            and `cu_seq_lens_k`, (n + 1,) int32, the starts of the samples and the end of the last
            one, with padding as one more sample; `max_length_q` and `max_length_k`, the longest in
            tokens; and `use_cache=False`, since with a cache samples attend to each other. With
            `shapes`, `cu_seq_lens` is filled up to `max_samples + 2` with empty samples; without
            `max_samples`, it and the lengths are left out.
        mask_dtype: dtype of an `attention_mask`, (1, 1, T, T), in which each token attends to the
            tokens of its sample up to itself, for models that ignore `position_ids`: `torch.bool`
            for "sdpa" (True: may attend), or the model's dtype for "eager" and "sdpa" (added to the
            scores). `None`: no mask.
        sample_multiple: tokens; `prepare` pads the end of each sample to a multiple of it, for
            context parallelism: 2 * its ranks. The padding counts against the budget, and has no
            labels. Your `observe` function must round up, too. `ODBDataLoader` counts it as
            padding: `StepInfo.local_tokens` excludes it.
    """

    draws_random_numbers: ClassVar[bool] = False
    max_samples: int | None = None
    model_arguments: bool = True
    mask_dtype: torch.dtype | None = None
    sample_multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_count(self, "sample_multiple")
        check_bool("model_arguments", self.model_arguments)
        if self.max_samples is not None:
            keep_count(self, "max_samples")
        dtype = self.mask_dtype
        check_type("mask_dtype", dtype, torch.dtype | None)
        if dtype is not None and not (dtype is torch.bool or dtype.is_floating_point):
            raise ValueError(
                f"`mask_dtype` must be `torch.bool` or a floating dtype, but is {dtype} instead."
            )

    @property
    def layout(self) -> Layout:
        """Layout of the budgets that it collates for."""
        return "packed"

    @classmethod
    def of(cls, budget: int | TokenBudget, **options: Any) -> PackedCollate:
        """Return the collate function for the groups of a budget. See `TokenRows.of`."""
        budget = TokenBudget.of(budget)
        return super().of(budget, max_samples=budget.max_samples, **options)

    def prepare(self, sample: Any) -> Any:
        """Return a sample with its values per token as (L,) arrays; see `TokenRows.prepare`.

        Raises:
            SampleError: a value per token is not valid, or the sample cannot be packed.
        """
        prepared = super().prepare(sample)
        if isinstance(prepared, Mapping):
            for key in _CHECKED_KEYS:
                if key in prepared:
                    self._check_packable(key, prepared[key])
            if self.sample_multiple > 1 and "input_ids" in prepared:
                prepared = self._filled_up(prepared)
        return prepared

    def _filled_up(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a sample whose tokens are a multiple of `sample_multiple`."""
        missing = -length_of(sample) % self.sample_multiple
        filled = {"labels": token_array("input_ids", sample["input_ids"]), **sample}
        for key in {*KEPT} & {*filled}:
            del filled[key]  # A packed row does not need them, and they lack the padding.
        for key in {*self.token_keys} & {*filled}:
            if not is_number(filled[key]):
                row = token_array(key, filled[key])
                padding = np.full(missing, self._fill_of(key), row.dtype)
                filled[key] = np.concatenate((row, padding))
        return filled

    def batch_of(self, group: GroupRows, shared: IntArray | None = None) -> dict[str, Any]:
        """Return the batch of a group.

        shared: for each row, (n,), the leading tokens that it leaves out, since it shares them with
        the row before it: see `RowsCollate`.
        """
        lengths = group.lengths
        total = sum(lengths)
        if self.sample_multiple > 1 and any(np.array(lengths) % self.sample_multiple):
            raise ValueError(
                f"each sample must have a multiple of `sample_multiple`, {self.sample_multiple} "
                f"tokens, but the samples have {lengths[:8]}: call `prepare` in processing, before "
                "samples are observed. `ODBDataLoader` does."
            )
        _, width = fit_shape(1, total, self.shapes, self.pad_to_multiple_of)
        starts = np.cumsum([0, *lengths])
        positions = np.zeros(width, dtype=np.int64)
        skipped = np.zeros(len(lengths), np.int64) if shared is None else shared
        positions[:total] = np.arange(total) - np.repeat(starts[:-1] - skipped, lengths)
        for key in group.keys:
            if key in _CHECKED_KEYS:
                for index, value in enumerate(group.values(key)):
                    try:
                        self._check_packable(key, value)
                    except SampleError as error:
                        raise of_group(error, index) from error
        batch = {
            key: self.join(key, group, (1, width))
            for key in group.keys
            if key not in ("attention_mask", "position_ids")
        }
        if "labels" not in batch:
            batch["labels"] = batch["input_ids"].clone()
            batch["labels"][:, total:] = IGNORE_INDEX
        # Otherwise a number, or a list, for each sample.
        if isinstance(batch["labels"], torch.Tensor) and batch["labels"].ndim > 1:
            batch["labels"][:, starts[:-1][np.diff(starts) > 0]] = IGNORE_INDEX
        batch["position_ids"] = torch.from_numpy(positions[None])
        if self.model_arguments:
            is_apart = shared is None  # `cu_seq_lens` cannot describe shared tokens.
            batch.update(self._model_arguments(starts, width) if is_apart else {"use_cache": False})
        if self.mask_dtype is not None:
            batch["attention_mask"] = _mask(_ends(starts, skipped, width), self.mask_dtype)
        return batch

    def place(
        self, _key: str, joined: npt.NDArray[Any], rows: list[Any], lengths: list[int]
    ) -> None:
        """Write the rows one after the other. See `TokenRows.place`."""
        np.concatenate(rows, out=joined[0, : sum(lengths)], casting="same_kind")

    def _check_packable(self, key: str, value: Any) -> None:
        """Reject images, and a mask or positions that a packed row cannot keep."""
        if key in _IMAGE_KEYS:
            raise SampleError(
                f"`PackedCollate` packs text alone, but a sample has `{key}`. Use "
                "`VisionLanguageCollate.of(budget, model=...)`."
            )
        if key not in self.token_keys or value is None:
            return
        row = token_array(key, value)
        expected = np.arange(len(row)) if key == "position_ids" else np.ones(len(row))
        if not np.array_equal(row, expected):
            raise SampleError(
                f"`{key}` must {KEPT[key]}; but is {row.tolist()!r:.80} instead. Leave the tokens "
                f"or `{key}` out in processing, or use the padded layout."
            )

    def _model_arguments(self, starts: IntArray, width: int) -> dict[str, Any]:
        bounds = starts.tolist()
        if width > bounds[-1]:
            bounds.append(width)
        longest = int(np.diff(bounds).max())
        if self.shapes:
            if self.max_samples is None:
                return {"use_cache": False}
            bounds += [width] * (self.max_samples + 2 - len(bounds))  # empty samples
            longest = width
        cu_seq_lens = torch.tensor(bounds, dtype=torch.int32)
        return {
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": longest,
            "max_length_k": longest,
            "use_cache": False,
        }


def _ends(starts: IntArray, shared: IntArray, width: int) -> IntArray:
    """Return `ends`, (T,): token j attends to token i if i <= j < ends[i]."""
    ends = np.arange(1, width + 1)  # Padding attends to itself alone.
    path = ends[:0]  # the tokens of the row, with those that it shares
    for start, stop, count in zip(starts[:-1], starts[1:], shared, strict=True):
        ends[path[count:]] = start
        path = np.concatenate((path[:count], np.arange(start, stop)))
    ends[path] = starts[-1]
    return ends


def _mask(ends: IntArray, dtype: torch.dtype) -> torch.Tensor:
    """Return the (1, 1, T, T) mask: token j attends to token i if i <= j < ends[i]."""
    tokens = torch.arange(len(ends))
    allowed = (tokens[:, None] < torch.from_numpy(ends)).tril()[None, None]
    if dtype is torch.bool:
        return allowed
    hidden = torch.zeros(allowed.shape, dtype=dtype)
    return hidden.masked_fill(~allowed, torch.finfo(dtype).min)
