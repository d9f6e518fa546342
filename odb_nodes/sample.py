"""A processed sample with what grouping needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from odb_nodes.checks import check_count
from odb_nodes.errors import SampleError

__all__ = [
    "IGNORE_INDEX",
    "Observation",
    "Sample",
    "Skipped",
    "SourceItem",
    "SourcedSample",
    "flat",
    "observe_sample",
]

IGNORE_INDEX = -100
"""Label of a token that is not supervised: the default of `torch.nn.CrossEntropyLoss`."""


class Sample(NamedTuple):
    """A processed sample and its cost.

    Attributes:
        data: what processing returned; handed to the collate function as it is.
        tokens: its length, unpadded.
        targets: supervised tokens after the causal shift.
        patches: image patches, 0 for text.
    """

    data: Any
    tokens: int
    targets: int
    patches: int = 0

    @property
    def source(self) -> str:
        """Name of the source that it comes from, "" where sources have none."""
        return ""

    def of_source(self, name: str) -> Sample:
        """Return this sample under the name of its source; before one that it has already."""
        sample = SourcedSample(*self)
        sample.name = f"{name}/{self.source}" if self.source else name
        return sample


class SourcedSample(Sample):
    """A sample that knows its source. Beside the fields, so it unpacks and compares as any other.

    Attributes:
        name: of the source.
    """

    name: str

    @property
    def source(self) -> str:
        """Name of the source that it comes from."""
        return self.name

    def _replace(self, **fields: Any) -> Sample:  # type: ignore[override]
        changed = Sample(*self)._replace(**fields)
        return changed.of_source(self.name)


class SourceItem(NamedTuple):
    """An item, and the name of the source that it comes from."""

    source: str
    item: Any


@dataclass(frozen=True)
class Skipped:
    """What processing returns for a sample that is to be left out of the epoch, and counted.

    Attributes:
        reason: a word or two; samples are counted by it, see `WindowBucketer.skipped_samples`.
        message: which sample it is, and what is wrong with it; shown for the first of each reason.

    Raises:
        TypeError: one of them is no string.
    """

    reason: str
    message: str = ""

    def __post_init__(self) -> None:
        for name in ("reason", "message"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(
                    f"`{name}` of `Skipped` must be a string, but is {value!r:.100} instead. Pass "
                    '`Skipped("empty", "which sample, and what is wrong with it.")`.'
                )

    @property
    def why(self) -> str:
        """Reason and message as a sentence."""
        return f"({self.reason}){': ' if self.message else ''}{self.message or '.'}"

    def of_source(self, name: str) -> Skipped:
        """Return this with the name of the source in its message."""
        return replace(
            self, message=f"source {name!r}{': ' if self.message else '.'}{self.message}"
        )


class Observation(NamedTuple):
    """What an `observe` function may return: `None` leaves a field to the default."""

    tokens: int
    targets: int | None = None
    patches: int | None = None


Observe = Callable[[Any], int | Observation | tuple[int, ...]]


def observe_sample(data: Any, observe: Observe | None = None) -> Sample | Skipped:
    """Return `data` with its length, supervised tokens and patches; `Skipped` as it is.

    Args:
        data: a processed sample, or a `SourceItem` of one. By default a mapping whose `input_ids`
            are a list, an array or a tensor, (L,) or (1, L); `labels` likewise, where present.
        observe: data -> tokens, or -> `Observation`. Default: tokens is L; targets is the number of
            `labels[1:]` that are not -100, or tokens - 1 without labels; patches is the sum of the
            products of `image_grid_thw`'s rows, or else the first dimension of `pixel_values`.

    Raises:
        SampleError: there is no length, or it is not an integer of at least 1.
    """
    if isinstance(data, SourceItem):
        try:
            sample = observe_sample(data.item, observe)
        except SampleError as error:
            raise SampleError(f"of source {data.source!r}: {error}") from error
        return sample.of_source(data.source)
    if isinstance(data, Skipped):
        return data
    seen = Observation(_length_of(data)) if observe is None else observe(data)
    if not isinstance(seen, tuple):
        seen = Observation(seen)
    try:
        tokens, targets, patches = Observation(*seen)
        tokens = check_count("tokens", tokens)
        if targets is None:
            targets = _count_targets(data, tokens)
        if patches is None:
            patches = _count_patches(data)
        return Sample(
            data, tokens, check_count("targets", targets, 0), check_count("patches", patches, 0)
        )
    except (TypeError, ValueError) as error:
        raise SampleError(
            f"the observation of a sample is not valid: {error} "
            f"The sample is {_describe(data)}. Leave it out of the data, return `Skipped` from its "
            "processing, or pass an `observe` that returns its length in tokens."
        ) from error


def _length_of(data: Any) -> int:
    ids = data["input_ids"] if isinstance(data, Mapping) and "input_ids" in data else None
    if ids is None:
        raise SampleError(
            f"a sample has no length: it is {_describe(data)}. Return a mapping with `input_ids`, "
            "or pass an `observe` that returns its length in tokens."
        )
    return len(flat("input_ids", ids))


def flat(name: str, values: Any) -> Any:
    """Return `values`, (L,) or (1, L), as something of length L."""
    if isinstance(values, (np.ndarray, torch.Tensor)):
        if values.ndim == 1:
            return values
        if values.ndim == 2 and values.shape[0] == 1:
            return values[0]
        raise SampleError(
            f"`{name}` must have shape (L,) or (1, L), but has {tuple(values.shape)} instead."
        )
    try:
        if isinstance(values, str):
            raise TypeError
        nested = len(values) > 0 and hasattr(values[0], "__len__") and type(values[0]) is not str
    except TypeError:
        raise SampleError(
            f"`{name}` must be a list, an array or a tensor, but is {values!r} instead."
        ) from None
    if not nested:
        return values
    if len(values) != 1:
        raise SampleError(f"`{name}` must have shape (L,) or (1, L), but holds {len(values)} rows.")
    return values[0]


def _count_targets(data: Any, tokens: int) -> int:
    labels = data.get("labels") if isinstance(data, Mapping) else None
    if labels is None or not hasattr(labels, "__len__") or getattr(labels, "ndim", 1) == 0:
        return tokens - 1
    row = flat("labels", labels)
    if isinstance(row, torch.Tensor):
        row = row.numpy(force=True)
    if isinstance(row, np.ndarray):
        return int(np.count_nonzero(row[1:] != IGNORE_INDEX))
    return sum(label != IGNORE_INDEX for label in row[1:])


def _count_patches(data: Any) -> int:
    if not isinstance(data, Mapping):
        return 0
    if (grid := data.get("image_grid_thw")) is not None:
        return int(np.asarray(grid).reshape(-1, 3).prod(axis=1).sum())
    pixels = data.get("pixel_values")
    return 0 if pixels is None else len(pixels)


def _describe(data: Any) -> str:
    if isinstance(data, Mapping):
        return f"a `{type(data).__name__}` with keys {sorted(map(str, data))}"
    return f"{str(data)[:60]!r} of type `{type(data).__name__}`"
