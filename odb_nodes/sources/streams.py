"""Streams of Hugging Face `datasets`, as an `IterableSource` can resume and share them out.

`datasets` itself is not imported here: who has such a stream has imported it.
"""

from __future__ import annotations

import importlib
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

_SPLIT_BY_SHARDS = {
    "ArrowExamplesIterable",
    "BufferShuffledExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "ShuffledDataSourcesArrowExamplesIterable",
    "ShuffledDataSourcesExamplesIterable",
}
"""Stages that give ranks with shards of their own all that one rank would get. Not `take`: it takes
of each."""

_RESTORABLE = _SPLIT_BY_SHARDS - {"BufferShuffledExamplesIterable"} | {
    "CyclingMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "RepeatExamplesIterable",
    "SkipExamplesIterable",
    "TakeExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}
"""Stages whose own state brings back all that comes after it. Not a shuffle buffer: `datasets`
fills it anew, so that what was in it is lost."""


def is_stream(dataset: Any) -> bool:
    """Tell whether something is an `IterableDataset` of `datasets`."""
    library = sys.modules.get("datasets")
    kind = getattr(library, "IterableDataset", None)
    return isinstance(kind, type) and isinstance(dataset, kind)


class Stream:
    """A stream that begins where it is told to, and by reading again where it cannot.

    Args:
        dataset: an `IterableDataset` of `datasets`.
        rank: this rank.
        world_size: ranks that share it; those get whole shards where that divides them evenly.

    Attributes:
        split: each rank reads shards of its own.

    Raises:
        ValueError: it was split over ranks already.
    """

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        if world_size > 1 and getattr(dataset, "_distributed", None) is not None:
            raise ValueError(
                "the stream was split over ranks already (`split_dataset_by_node`), and would be "
                "split again. Pass it unsplit, or say `sharded=True` (`rank=0, world_size=1` for "
                "an `IterableSource`)."
            )
        self._stages = list(_stages(getattr(dataset, "_ex_iterable", None)))
        kinds = {type(stage).__name__ for stage in self._stages}
        shards = int(dataset.num_shards)
        self.split = world_size > 1 and shards % world_size == 0 and kinds <= _SPLIT_BY_SHARDS
        if self.split:
            distributed = importlib.import_module("datasets.distributed")
            dataset = distributed.split_dataset_by_node(dataset, rank=rank, world_size=world_size)
        self.dataset = dataset
        self.restorable = kinds <= _RESTORABLE
        self._shards = shards

    def __iter__(self) -> Iterator[Any]:
        # It would go on from the state loaded last whenever that epoch is iterated.
        self.dataset.load_state_dict(None)
        return iter(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is of."""
        self.dataset.set_epoch(epoch)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the order of the stream."""
        generators = [
            json.dumps(stage.generator.bit_generator.state, default=str)
            for stage in self._stages
            if hasattr(stage, "generator")
        ]
        return {
            "num_shards": self._shards,
            "shuffle_seed": zlib.crc32(" ".join(generators).encode()) if generators else None,
        }


class RestorableStream(Stream):
    """A stream that goes on from its own state."""

    _pending: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        pending, self._pending = self._pending, None
        self.dataset.load_state_dict(pending)
        return iter(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration stands; as text, since it may hold integers of 128 bits."""
        return {"json": json.dumps(self.dataset.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on from a state."""
        self._pending = json.loads(state["json"])


def as_stream(dataset: Iterable[Any], rank: int, world_size: int) -> Stream | None:
    """Return a stream of `datasets` as one that can be resumed; `None` for anything else."""
    if not is_stream(dataset):
        return None
    stream = Stream(dataset, rank, world_size)
    return RestorableStream(dataset, rank, world_size) if stream.restorable else stream


def _stages(stage: Any) -> Iterator[Any]:
    """Yield the stages of a stream, from its end to its beginning. Feature-detected: not public."""
    if stage is None:
        return
    yield stage
    yield from _stages(getattr(stage, "ex_iterable", None))
    for source in getattr(stage, "ex_iterables", ()):
        yield from _stages(source)
