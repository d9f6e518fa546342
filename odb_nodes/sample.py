"""A processed sample, and what grouping needs to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

__all__ = [
    "COUNTED",
    "IGNORE_INDEX",
    "Observation",
    "Observe",
    "Sample",
    "Skipped",
    "SourceItem",
]

IGNORE_INDEX = -100
"""Label of a token that is not supervised: the default of `torch.nn.CrossEntropyLoss`."""


CLASS_KEYS = ("label", "label_ids")
"""Keys of a sample that may hold a label of the whole, which transformers' collators take too."""

COUNTED = ("labels", "tokens", "samples", "observed")
"""What the targets of a sample may be: labels that are not -100; tokens, where it has no labels; 1,
where it has one label as a whole; or what `observe` has returned."""


class Sample(NamedTuple):
    """A processed sample and its cost.

    Attributes:
        data: the result of processing; the collate function gets it as it is.
        tokens: length in tokens, without padding.
        targets: supervised tokens after the causal shift; 1 if it has one label as a whole.
        patches: image patches, 0 for text.
        source: name of the sample's source, "" if sources have no names.
        counted: what `targets` counts, one of `COUNTED`; "" where nobody has said.
    """

    data: Any
    tokens: int
    targets: int
    patches: int = 0
    source: str = ""
    counted: str = ""

    def of_source(self, name: str) -> Sample:
        """Return this sample with the name of its source, put before a name that it has already."""
        return self._replace(source=f"{name}/{self.source}" if self.source else name)


class SourceItem(NamedTuple):
    """An item and the name of its source."""

    source: str
    item: Any


@dataclass(frozen=True)
class Skipped:
    """A processing result that leaves its sample out of the epoch and counts it.

    Attributes:
        reason: a word or two that samples are counted by, see `WindowBucketer.skipped_samples`.
        message: the sample and what is wrong with it; shown for the first sample of each reason.

    Raises:
        TypeError: an attribute is not a string.
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
    """The result of an `observe` function; `None` leaves a field to the default."""

    tokens: int
    targets: int | None = None
    patches: int | None = None


Observe = Callable[[Any], int | Observation | tuple[int, ...]]
