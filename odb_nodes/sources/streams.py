"""Streams of Hugging Face `datasets`, as an `IterableSource` can resume and share them out."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from odb_nodes._compat import datasets as hf_datasets


def is_stream(dataset: Any) -> bool:
    """Tell whether something is an `IterableDataset` of `datasets`."""
    library = sys.modules.get("datasets")
    kind = getattr(library, "IterableDataset", None)
    return isinstance(kind, type) and isinstance(dataset, kind)


class Stream:
    """A stream that begins each epoch anew; it resumes by reading again what came before.

    Attributes:
        split: whether each rank reads shards of its own.
    """

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        if world_size > 1 and hf_datasets.is_split(dataset):
            raise ValueError(
                "the stream was split over ranks already (`split_dataset_by_node`), and would be "
                "split again. Pass it unsplit, or say `sharded=True` (`rank=0, world_size=1` for "
                "an `IterableSource`)."
            )
        self._stages = hf_datasets.stages_of(dataset)
        self._shards = int(dataset.num_shards)
        self.split = (
            world_size > 1
            and self._shards % world_size == 0
            and hf_datasets.consists_of(self._stages, hf_datasets.SPLIT_BY_SHARDS)
        )
        if self.split:
            dataset = hf_datasets.split_over_ranks(dataset, rank, world_size)
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        # A state that was loaded once would be applied to every iteration of its epoch.
        self.dataset.load_state_dict(None)
        return iter(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.dataset.set_epoch(epoch)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the order of the stream."""
        states = [json.dumps(one, default=str) for one in hf_datasets.shuffle_states(self._stages)]
        return {
            "num_shards": self._shards,
            "shuffle_seed": zlib.crc32(" ".join(states).encode()) if states else None,
        }


class RestorableStream(Stream):
    """A stream that resumes from its own state, without reading again."""

    _pending: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        pending, self._pending = self._pending, None
        self.dataset.load_state_dict(pending)
        return iter(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration, as text: it may hold integers of 128 bits."""
        return {"json": json.dumps(self.dataset.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on from a state."""
        self._pending = json.loads(state["json"])


def as_stream(dataset: Iterable[Any], rank: int, world_size: int) -> Stream | None:
    """Return the `Stream` of a dataset; `None` for anything but an `IterableDataset`."""
    if not is_stream(dataset):
        return None
    stages = hf_datasets.stages_of(dataset)
    restorable = (
        hf_datasets.consists_of(stages, hf_datasets.RESTORABLE) and hf_datasets.restores_exactly()
    )
    return (RestorableStream if restorable else Stream)(dataset, rank, world_size)
