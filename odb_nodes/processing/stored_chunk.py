"""The data of a chunk's samples where nobody in the trainer's process needs them."""

from __future__ import annotations

from itertools import count
from typing import Any

from odb_nodes.processing.shared_pages import PageFile, Pages, split_parts
from odb_nodes.processing.transport import unpack
from odb_nodes.sample import StoredData

__all__ = ["StoredChunk", "StoredRow"]

_numbers = count()


class StoredChunk:
    """The data of samples, packed as a worker has sent them."""

    def __init__(self, content: PageFile | Pages, samples: int) -> None:
        self._samples = samples
        self.number = next(_numbers)
        """What workers know it by."""
        self.content = content
        """What to send to a worker that shall know it."""
        self._data: list[Any] | None = None
        self.workers_holding: set[Any] = set()
        """The workers that know it."""

    def __del__(self) -> None:
        for worker in self.workers_holding:
            worker.forget(self.number)

    def tell(self, worker: Any) -> None:
        """Note that a worker is sent the content, which it is to forget when this is gone."""
        self.workers_holding.add(worker)
        if isinstance(self.content, PageFile):
            worker.leases[self.number] = self.content.lease

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, row: int) -> StoredRow:
        return StoredRow(self, row)

    def data(self) -> list[Any]:
        """Return the data of all its samples, which are unpacked once."""
        if self._data is None:
            self._data = [*unpack(split_parts(self.content))]
        return self._data


class StoredRow(StoredData):
    """The data of one sample of a chunk."""

    __slots__ = ("chunk", "row")

    def __init__(self, chunk: StoredChunk, row: int) -> None:
        self.chunk, self.row = chunk, row

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.row} of chunk {self.chunk.number})"

    def load(self) -> Any:
        """Return the data of the sample: the same object each time."""
        return self.chunk.data()[self.row]
