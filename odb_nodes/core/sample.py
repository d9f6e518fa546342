"""A processed sample, and the costs that decide its group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

__all__ = [
    "COUNTED",
    "IGNORE_INDEX",
    "ItemKey",
    "LazyData",
    "LeftOut",
    "Observation",
    "Observe",
    "Sample",
    "Skipped",
    "SourceItem",
    "data_of",
]

IGNORE_INDEX = -100
"""Label of a token that is not supervised: the default of `torch.nn.CrossEntropyLoss`."""


CLASS_KEYS = ("label", "label_ids")
"""Keys of a sample that may hold a label of the whole sample, as in transformers' collators."""

COUNTED = ("labels", "tokens", "samples", "observed")
"""Kinds of targets: labels that are not -100; the tokens of a sample without labels; 1 for a sample
with one label; or the count that `observe` has returned."""


class LazyData(ABC):
    """Data of a sample that is loaded when it is needed."""

    __slots__ = ()

    @abstractmethod
    def load(self) -> Any:
        """Return the data."""


def data_of(sample: Sample) -> Any:
    """Return the data of a sample, loaded if it is a `LazyData`."""
    data = sample.data
    return data.load() if isinstance(data, LazyData) else data


class Sample(NamedTuple):
    """A processed sample and its cost.

    Attributes:
        data: the result of processing, for the collate function. If workers collate, a
            `LazyData`, which `data_of` loads.
        tokens: length in tokens, without the padding of a batch.
        targets: supervised tokens after the causal shift; 1 for a single label.
        patches: image patches, 0 for text.
        source: name of the sample's source, "" if sources have no names.
        counted: what `targets` counts, one of `COUNTED`, or "".
        key: number of the sample in its source, 63 bits, the same in every epoch; `None` if the
            source has no keys: see `ItemKey`.
        item: key of the item that the sample was made of. The nodes set this field and all fields
            below.
        digest: CRC-32 of data, tokens, targets and patches, which a restore compares, or `None`.
        task: name of the sample's task, if `observe` returned a name; see `task_name`.
        ordinal: number of the sample in the epoch of this rank, if the source cannot read by key.
        padding: number of padding tokens that the loader appended, for
            `PackedCollate.sample_multiple`.
    """

    data: Any
    tokens: int
    targets: int
    patches: int = 0
    source: str = ""
    counted: str = ""
    key: int | None = None
    item: ItemKey | None = None
    digest: int | None = None
    task: str = ""
    ordinal: int | None = None
    padding: int = 0

    @property
    def task_name(self) -> str:
        """Name of the sample's task: from `observe`, or else the name of its source."""
        return self.task or self.source

    def of_source(self, name: str) -> Sample:
        """Return a copy whose source name has `name` in front."""
        item = None if self.item is None else self.item.of_source(name)
        return self._replace(source=nested_name(name, self.source), item=item)

    @property
    def repeat(self) -> int:
        """Number of this occurrence of the sample in the epoch: see `ItemKey`."""
        return 0 if self.item is None else self.item.repeat


class ItemKey(NamedTuple):
    """Identifies an item of the data, on any rank and in any order.

    Attributes:
        source: name of its source, "" if sources have no names.
        key: its number in the source: the index in a map-style dataset; `(file << 40) + offset` in
            JSON Lines; the number of the item in the epoch for any other iterable.
        world_size: number of ranks that share the numbers; 1 if each rank has its own data.
        repeat: number of the occurrence if the item comes more than once in an epoch, from 0.
    """

    source: str
    key: int
    world_size: int
    repeat: int = 0

    def of_source(self, name: str) -> ItemKey:
        """Return a copy whose source name has `name` in front."""
        return self._replace(source=nested_name(name, self.source))


class LeftOut(NamedTuple):
    """A sample that no step holds.

    Attributes:
        key: number of the sample in its source, or `None`.
        source: name of its source.
        reason: the reason of its `Skipped`; "dropped" if it exceeds the budget; "excluded" if its
            key is excluded; "unemitted" if another rank has ended (`uneven="stop"`).
    """

    key: int | None
    source: str
    reason: str


def name_of(sample: Sample | Skipped | ItemKey) -> str:
    """Return source and key of a sample in brackets, after a space; "" if there are none."""
    parts = [f"source {sample.source!r}"] if sample.source else []
    if sample.key is not None:
        parts.append(f"key {sample.key}")
    return f" ({', '.join(parts)})" if parts else ""


def nested_name(name: str, within: str) -> str:
    """Return the name of source `within`, which is a part of source `name`."""
    return f"{name}/{within}" if within else name


class SourceItem(NamedTuple):
    """An item and the name of its source."""

    source: str
    item: Any


@dataclass(frozen=True)
class Skipped:
    """A processing result that leaves its sample out of the epoch and counts it.

    Attributes:
        reason: a word or two; samples are counted by it, see `WindowBucketer.skipped_samples`.
        message: the sample and the fault; shown for the first sample of each reason.
        key: number of the sample in its source; filled in by the nodes.
        source: name of its source; filled in by the nodes.

    Raises:
        TypeError: reason or message is not a string.
    """

    reason: str
    message: str = ""
    key: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("reason", "message"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(
                    f"`{name}` of `Skipped` must be a string, but is {value!r:.100} instead. Pass "
                    '`Skipped("empty", "which sample, and what is wrong with it.")`.'
                )

    @property
    def why(self) -> str:
        """Reason and message as a sentence."""
        return f"({self.reason}){': ' if self.message else ''}{self.message or '.'}"

    def of_source(self, name: str) -> Skipped:
        """Return a copy whose source name has `name` in front."""
        return replace(self, source=nested_name(name, self.source))


class Observation(NamedTuple):
    """The result of an `observe` function. A field that is `None` has its default.

    Attributes:
        tokens: length in tokens.
        targets: supervised tokens.
        patches: image patches.
        key: your number for the sample, 63 bits, not negative: an id of the data, or a number that
            one-to-many processing computes.
        task: name of the sample's task. Default: the name of its source.
    """

    tokens: int
    targets: int | None = None
    patches: int | None = None
    key: int | None = None
    task: str | None = None


Observe = Callable[[Any], int | Observation | tuple[int, ...]]
