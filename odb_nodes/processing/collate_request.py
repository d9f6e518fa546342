"""What a worker needs to make a batch: which samples, and under which random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from odb_nodes.step_info import StepInfo

__all__ = ["INLINE", "BatchMaker", "BatchResult", "CollateRequest"]

INLINE = -1
"""In place of a chunk's number: the sample comes with the request."""


class BatchMaker(Protocol):
    """Makes batches in a worker process; picklable where workers are not forked."""

    least_bytes: int
    """Of a sample, on the average of a chunk: where it has fewer, its data go to the trainer."""

    def __call__(self, samples: list[Any], key: int, info: StepInfo | None) -> Any:
        """Return the batch of samples, under the random numbers of a key."""


@dataclass(frozen=True)
class CollateRequest:
    """A batch to be made.

    Attributes:
        rows: of each sample, the number of its chunk and its place there; or `INLINE`, and its
            place among the samples that come with the request.
        chunks: numbers of the chunks that come with the request, since the worker lacks them.
        has_inline: whether samples come with it, after the chunks.
        key: what the random numbers are seeded by.
        info: the `StepInfo`, where the maker wants it.
    """

    rows: Sequence[tuple[int, int]]
    chunks: Sequence[int]
    has_inline: bool
    key: int
    info: StepInfo | None


@dataclass(frozen=True)
class BatchResult:
    """What became of a request.

    Attributes:
        content: the packed batch, its parts joined once it is sent; `None` where it could not be
            made.
        error: why not.
    """

    content: Any
    error: str = ""
