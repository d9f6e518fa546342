"""What the trainer and its worker processes tell one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odb_nodes.processing.chunk import ChunkResult
from odb_nodes.processing.collate_request import BatchResult, CollateRequest

__all__ = ["Message", "Reply"]


@dataclass(frozen=True)
class Message:
    """What the trainer tells a worker; the parts that belong to it follow.

    Attributes:
        generation: chunks of an older one are to be skipped.
        request: of a batch to make, if any.
        has_task: whether a chunk comes with it, as a part: its items may not be readable.
        forgotten: chunks that no further batch is made of.
        free: files of the worker that nobody reads any more.
    """

    generation: int
    request: CollateRequest | None
    has_task: bool
    forgotten: Sequence[int] = ()
    free: Sequence[int] = ()


@dataclass(frozen=True)
class Reply:
    """What a worker answers to a chunk or a request; the parts of the result come with it.

    Attributes:
        result: what became of it, without its parts.
        has_content: whether the last part is the content of the result.
        file: number of the file that the content is in; `NO_FILE` where it is in none.
        dropped: chunks that this worker has forgotten, and reads no more.
    """

    result: ChunkResult | BatchResult
    has_content: bool
    file: int
    dropped: Sequence[int]
