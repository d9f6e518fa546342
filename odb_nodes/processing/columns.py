"""The data of a chunk's samples: columns that are collated as they are, or what a worker keeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odb_nodes._core.content import is_plain_tensor, is_simple_tensor
from odb_nodes.processing.transport import PageFile, Pages, split_parts, unpack
from odb_nodes.sample import StoredData
from odb_nodes.sample_block import IntArray

_JOINED_BYTES = 64 << 10  # of a value, on average: a longer one has a buffer of its own


RowsLike = tuple[list[int], dict[Any, npt.NDArray[Any]]]
"""Where rows begin, and the values of all columns that have such rows."""


class Column:
    """1-d arrays, or tensors, of one dtype, joined."""

    __slots__ = ("are_tensors", "offsets", "values")

    def __init__(self, values: npt.NDArray[Any], offsets: list[int], are_tensors: bool) -> None:
        # `offsets`: where each row begins, and the end of the last one: n + 1 numbers.
        self.values, self.offsets, self.are_tensors = values, offsets, are_tensors

    def __reduce__(self) -> Any:
        return Column, (self.values, self.offsets, self.are_tensors)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Any:
        value = self.values[self.offsets[row] : self.offsets[row + 1]]
        return torch.from_numpy(value) if self.are_tensors else value

    def kept(self, rows: Sequence[int], offsets: list[int]) -> Column:
        """Return some rows in a buffer of their own, where they have these offsets."""
        own, values = self.offsets, self.values
        arrays = [values[own[row] : own[row + 1]] for row in rows]
        return Column(np.concatenate(arrays), offsets, self.are_tensors)


class DataColumns(Sequence[Any]):
    """The data of samples, in order: dicts with the same keys by column, others as they are.

    Where there are no such `keys`, the data themselves are the only column.
    """

    __slots__ = ("_rows_like", "columns", "keys")

    def __init__(self, keys: tuple[Any, ...] | None, columns: Sequence[Column | list[Any]]) -> None:
        self.keys, self.columns = keys, columns
        self._rows_like: dict[Any, RowsLike | None] = {}

    @classmethod
    def of(cls, data: Sequence[Any]) -> DataColumns:
        """Return data as columns: short arrays are copied into them."""
        if {*map(type, data)} == {dict}:
            keys = tuple(data[0])
            if keys and all(tuple(one) == keys for one in data):
                return cls(keys, _columns_of([[one[key] for one in data] for key in keys]))
        return cls(None, [[*data]])

    @property
    def are_apart(self) -> bool:
        """Whether most bytes are arrays or tensors that are not joined: each is freed alone."""
        joined = sum(one.values.nbytes for one in self.columns if isinstance(one, Column))
        rest = [value for one in self.columns if isinstance(one, list) for value in one]
        return sum(getattr(value, "nbytes", 0) for value in rest if _is_dense(value)) > joined

    def __reduce__(self) -> Any:
        return DataColumns, (self.keys, self.columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, row: Any) -> Any:
        if self.keys is None:
            return self.columns[0][row]
        if isinstance(row, slice):
            return [self[at] for at in range(len(self))[row]]
        return {key: column[row] for key, column in zip(self.keys, self.columns, strict=True)}

    def column(self, key: Any) -> Column | list[Any] | None:
        """Return the values of a key; `None` where the data have none."""
        if self.keys is None or key not in self.keys:
            return None
        return self.columns[self.keys.index(key)]

    def rows_like(self, key: Any) -> RowsLike | None:
        """Return the columns whose rows are as long as those of a key, and where they begin.

        `None` where the rows of that key are not joined.
        """
        if key not in self._rows_like:
            column, found = self.column(key), None
            if isinstance(column, Column):
                alike = {
                    name: one.values
                    for name, one in zip(self.keys or (), self.columns, strict=True)
                    if isinstance(one, Column) and one.offsets is column.offsets
                }
                found = column.offsets, alike
            self._rows_like[key] = found
        return self._rows_like[key]

    def kept(self, rows: IntArray) -> DataColumns:
        """Return some rows in buffers of their own."""
        found, places = list[Column | list[Any]](), rows.tolist()
        known: dict[int, list[int]] = {}  # the new offsets, by those of old
        for column in self.columns:
            if isinstance(column, list):  # An array may lie in the memory of the whole chunk.
                held = [column[row] for row in places]
                found.append([one.copy() if type(one) is np.ndarray else one for one in held])
                continue
            own = column.offsets
            if (offsets := known.get(id(own))) is None:
                lengths = (own[row + 1] - own[row] for row in places)
                offsets = known[id(own)] = [*accumulate(lengths, initial=0)]
            found.append(column.kept(places, offsets))
        return DataColumns(self.keys, found)


def _columns_of(columns: Sequence[list[Any]]) -> list[Column | list[Any]]:
    found: list[Column | list[Any]] = []
    offsets: list[int] = []  # mostly the same for all
    for values in columns:
        if (joined := _joined(values)) is None:
            found.append(values)
            continue
        bounds = [*accumulate(map(len, values), initial=0)]
        offsets = offsets if offsets == bounds else bounds
        found.append(Column(joined, offsets, type(values[0]) is torch.Tensor))
    return found


def _is_dense(value: Any) -> bool:
    return type(value) is np.ndarray or (type(value) is torch.Tensor and is_simple_tensor(value))


def _joined(values: list[Any]) -> npt.NDArray[Any] | None:
    """Join short 1-d arrays or tensors of the same type and dtype; `None` where they are not."""
    kind, first = type(values[0]), values[0]
    joinable = kind is np.ndarray or (
        kind is torch.Tensor
        and all(type(value) is kind and is_plain_tensor(value) for value in values)
    )
    if not joinable or any(
        type(value) is not kind or value.ndim != 1 or value.dtype != first.dtype for value in values
    ):
        return None
    if sum(value.nbytes for value in values) > _JOINED_BYTES * len(values):
        return None
    if kind is np.ndarray:
        return None if first.dtype.hasobject else np.concatenate(values)
    return torch.cat(values).numpy()


_numbers = count()


class StoredChunk:
    """The data of samples, packed as a worker has sent them."""

    def __init__(self, content: PageFile | Pages) -> None:
        self.number = next(_numbers)  # what workers know it by
        self.content = content  # what to send to a worker that shall know it
        self._data: list[Any] | None = None
        self.workers_holding: set[Any] = set()  # the workers that know it

    def __del__(self) -> None:
        for worker in self.workers_holding:
            worker.forget(self.number)

    def tell(self, worker: Any) -> None:
        """Note that a worker is sent the content, which it is to forget when this is gone."""
        self.workers_holding.add(worker)
        if isinstance(self.content, PageFile):
            worker.leases[self.number] = self.content.lease

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
