"""Node: turns groups of samples into batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torchdata.nodes import BaseNode

from odb_nodes.errors import StateError
from odb_nodes.sample import IGNORE_INDEX, Sample, flat
from odb_nodes.state import seal, unseal
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo

Collate = Callable[[list[Any]], MutableMapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PaddingCollate:
    """Pads text samples into a batch; the default collate function.

    `input_ids`, and every key whose values are 1-d (or (1, L)) of the samples' own lengths, become
    (B, T) tensors; `attention_mask`, (B, T) int64, is made where there is none. Numbers become (B,)
    tensors. What is neither stays a list of B values.

    Args:
        pad_token_id: fills `input_ids`; `labels` are filled with -100, other keys with 0.
        pad_to_multiple_of: tokens; T is a multiple of it. As in the `TokenBudget`.
        side: where the padding goes, `"right"` or `"left"`.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int = 1
    side: Literal["right", "left"] = "right"

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise ValueError(f'`side` must be "right" or "left", but is {self.side!r} instead.')

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`.

        Raises:
            KeyError: a sample lacks a key that the first one has.
        """
        lengths = [len(_row(sample["input_ids"])) for sample in samples]
        batch = {
            key: self._collate_key(key, [sample[key] for sample in samples], lengths)
            for key in samples[0]
        }
        if "attention_mask" not in batch:
            batch["attention_mask"] = self._attention_mask(lengths)
        return batch

    def _collate_key(self, key: str, values: list[Any], lengths: list[int]) -> Any:
        first = values[0]
        if isinstance(first, (int, float, np.number)):
            return torch.as_tensor(np.asarray(values))
        if not isinstance(first, (list, np.ndarray, torch.Tensor)) or not all(map(_is_row, values)):
            return values
        rows = list(map(_row, values))
        if list(map(len, rows)) != lengths:
            return values
        fill = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX}.get(key, 0)
        padded = np.full((len(rows), self._width(lengths)), fill, dtype=rows[0].dtype)
        for target, row, length in zip(padded, rows, lengths, strict=True):
            if self.side == "right":
                target[:length] = row
            else:
                target[-length:] = row
        return torch.from_numpy(padded)

    def _attention_mask(self, lengths: list[int]) -> torch.Tensor:
        width = self._width(lengths)
        mask = np.arange(width) < np.array(lengths)[:, None]
        if self.side == "left":
            mask = mask[:, ::-1]
        return torch.from_numpy(mask.astype(np.int64))

    def _width(self, lengths: list[int]) -> int:
        return -(-max(lengths) // self.pad_to_multiple_of) * self.pad_to_multiple_of


def _is_row(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
    return bool(value) and not isinstance(value[0], (str, dict))


def _row(value: Any) -> Any:
    if type(value) is np.ndarray and value.ndim == 1:
        return value
    row = flat("a value", value)
    return row.numpy(force=True) if isinstance(row, torch.Tensor) else np.asarray(row)


class GroupCollator(BaseNode[MutableMapping[str, Any]]):
    """Yields a batch for each group, with its `StepInfo` inside: take it with `pop_step_info`.

    State: the source's, and the number of the step.

    Args:
        source: node that yields groups, `list[Sample]`: a `WindowBucketer`.
        collate_fn: the samples' data, `list[Any]` -> batch, a dict or another mutable mapping.
            Default: `PaddingCollate()`.
    """

    SOURCE_KEY = "source"
    STEP_KEY = "step"

    def __init__(self, source: BaseNode[list[Sample]], collate_fn: Collate | None = None) -> None:
        super().__init__()
        self.source = source
        self._collate = collate_fn or PaddingCollate()
        self._step = 0
        self._failure: Exception | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands."""
        super().reset(initial_state)
        self._failure = None
        if initial_state is None:
            self.source.reset(None)
            self._step = 0
            return
        keys = (self.SOURCE_KEY, self.STEP_KEY)
        state = unseal(initial_state, type(self).__name__, {}, keys)
        self.source.reset(state[self.SOURCE_KEY])
        self._step = state[self.STEP_KEY]

    def next(self) -> MutableMapping[str, Any]:
        """Return the next batch.

        Raises:
            TypeError: `collate_fn` did not return a mutable mapping. This, and whatever it raises,
                is raised again until the next reset, so that the group cannot pass unseen.
        """
        if self._failure is not None:
            raise self._failure
        group = next(self.source)
        try:
            batch = self._collate_group(group)
        except Exception as error:
            self._failure = error
            raise
        targets = sum(sample.targets for sample in group)
        batch[STEP_INFO_KEY] = StepInfo(
            step=self._step,
            local_samples=len(group),
            local_targets=targets,
            all_samples_this_step=len(group),
            all_targets=targets,
        )
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the source's state and the number of the next step.

        Raises:
            StateError: `collate_fn` raised. The source is past that group, so no state here would
                bring it back.
        """
        if self._failure is not None:
            raise StateError(
                f"there is no state after `collate_fn` failed at step {self._step}: its group "
                "would be lost. Load the last state saved before."
            ) from self._failure
        source = self.source.state_dict()
        return seal(type(self).__name__, {}, source=source, step=self._step)

    def _collate_group(self, group: list[Sample]) -> MutableMapping[str, Any]:
        batch = self._collate([sample.data for sample in group])
        if not isinstance(batch, MutableMapping):
            raise TypeError(
                "`collate_fn` must return a dict or another mutable mapping, which also carries "
                f"the `StepInfo`, but returned `{type(batch).__name__}` instead."
            )
        return batch
