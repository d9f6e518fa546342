"""The data of a chunk's samples as columns, which are collated as they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.content import is_plain_tensor, is_simple_tensor

_JOINED_BYTES = 64 << 10  # average bytes of a value; longer values have separate buffers


RowsLike = tuple[list[int], dict[Any, npt.NDArray[Any]]]
"""Offsets of rows, and the values of all columns with these offsets, by key."""


class Column:
    """1-d arrays or tensors of one dtype, joined into one array."""

    __slots__ = ("are_tensors", "offsets", "values")

    def __init__(self, values: npt.NDArray[Any], offsets: list[int], are_tensors: bool) -> None:
        # offsets: where each row begins, and where the last row ends, n + 1 numbers.
        self.values, self.offsets, self.are_tensors = values, offsets, are_tensors

    def __reduce__(self) -> Any:
        return Column, (self.values, self.offsets, self.are_tensors)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Any:
        value = self.values[self.offsets[row] : self.offsets[row + 1]]
        return torch.from_numpy(value) if self.are_tensors else value

    def take_rows(self, rows: Sequence[int], offsets: list[int]) -> Column:
        """Return a copy of some rows, which have these offsets in it."""
        arrays = [self.values[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        return Column(np.concatenate(arrays), offsets, self.are_tensors)


class DataColumns(Sequence[Any]):
    """The data of samples, in order, with a column for each key if all are dicts of the same keys.

    Otherwise `keys` is `None`, and the only column is a list of the data.
    """

    __slots__ = ("_rows_like", "columns", "keys")

    def __init__(self, keys: tuple[Any, ...] | None, columns: Sequence[Column | list[Any]]) -> None:
        self.keys, self.columns = keys, columns
        self._rows_like: dict[Any, RowsLike | None] = {}

    @classmethod
    def of(cls, data: Sequence[Any]) -> DataColumns:
        """Return data as columns, into which short arrays are copied."""
        if {*map(type, data)} == {dict}:
            keys = tuple(data[0])
            if keys and all(tuple(sample) == keys for sample in data):
                return cls(keys, _columns_of([[sample[key] for sample in data] for key in keys]))
        return cls(None, [[*data]])

    @property
    def are_apart(self) -> bool:
        """Whether most bytes are in arrays and tensors that are not joined, and so freed singly."""
        joined_bytes = separate_bytes = 0
        for column in self.columns:
            if isinstance(column, Column):
                joined_bytes += column.values.nbytes
            else:
                separate_bytes += sum(value.nbytes for value in column if _is_dense(value))
        return separate_bytes > joined_bytes

    def __reduce__(self) -> Any:
        return DataColumns, (self.keys, self.columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, row: Any) -> Any:
        if self.keys is None:
            return self.columns[0][row]
        if isinstance(row, slice):
            return [self[index] for index in range(len(self))[row]]
        return {key: column[row] for key, column in zip(self.keys, self.columns, strict=True)}

    def column(self, key: Any) -> Column | list[Any] | None:
        """Return the values of a key; `None` if the data lack it."""
        if self.keys is None or key not in self.keys:
            return None
        return self.columns[self.keys.index(key)]

    def rows_like(self, key: Any) -> RowsLike | None:
        """Return the offsets of the rows of a key, and all columns with the same offsets.

        `None` if the rows of that key are not joined.
        """
        if key not in self._rows_like:
            column = self.column(key)
            rows_like: RowsLike | None = None
            if isinstance(column, Column):
                values = {
                    name: other.values
                    for name, other in zip(self.keys or (), self.columns, strict=True)
                    if isinstance(other, Column) and other.offsets is column.offsets
                }
                rows_like = column.offsets, values
            self._rows_like[key] = rows_like
        return self._rows_like[key]

    def take_rows(self, rows: IntArray) -> DataColumns:
        """Return a copy of some rows."""
        columns: list[Column | list[Any]] = []
        row_numbers = rows.tolist()
        new_offsets: dict[int, list[int]] = {}  # by the identity of the old offsets
        for column in self.columns:
            if isinstance(column, list):  # An array may lie in the memory of the whole chunk.
                values = [column[row] for row in row_numbers]
                columns.append(
                    [value.copy() if type(value) is np.ndarray else value for value in values]
                )
                continue
            old = column.offsets
            if id(old) not in new_offsets:
                lengths = (old[row + 1] - old[row] for row in row_numbers)
                new_offsets[id(old)] = [*accumulate(lengths, initial=0)]
            columns.append(column.take_rows(row_numbers, new_offsets[id(old)]))
        return DataColumns(self.keys, columns)


def _columns_of(columns: Sequence[list[Any]]) -> list[Column | list[Any]]:
    joined_columns: list[Column | list[Any]] = []
    shared: list[int] = []  # Most columns have the same offsets, and share one list of them.
    for values in columns:
        joined = _joined(values)
        if joined is None:
            joined_columns.append(values)
            continue
        offsets = [*accumulate(map(len, values), initial=0)]
        if offsets != shared:
            shared = offsets
        joined_columns.append(Column(joined, shared, type(values[0]) is torch.Tensor))
    return joined_columns


def _is_dense(value: Any) -> bool:
    return type(value) is np.ndarray or (type(value) is torch.Tensor and is_simple_tensor(value))


def _joined(values: list[Any]) -> npt.NDArray[Any] | None:
    """Join short 1-d arrays or tensors of one type and dtype; `None` for any other values."""
    first = values[0]
    kind = type(first)
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
