"""Facts of samples: named columns of integers, without their data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray

_ORDINAL, _TOKENS, _TARGETS, _PATCHES, _TASK, _SHARERS = range(6)
_COLUMNS = 6


class Facts:
    """Facts of samples, in named columns of one table. It never changes.

    Args:
        ordinal: number of each among the samples that the rank has pulled in the epoch, (n,).
        tokens: length of each, (n,).
        targets: supervised tokens of each, (n,).
        patches: image patches of each, (n,).
        task: number of the task of each, where tasks decide groups, (n,). Default: 0.
        sharers: number of ranks that share the data of each sample, and so can make it, (n,).
    """

    __slots__ = ("_table",)
    _table: IntArray

    def __init__(
        self,
        *,
        ordinal: npt.ArrayLike,
        tokens: npt.ArrayLike,
        targets: npt.ArrayLike,
        patches: npt.ArrayLike,
        task: npt.ArrayLike = 0,
        sharers: npt.ArrayLike = 1,
    ) -> None:
        ordinals = np.asarray(ordinal, dtype=np.int64)
        self._table = np.empty((_COLUMNS, len(ordinals)), dtype=np.int64)
        columns = (ordinals, tokens, targets, patches, task, sharers)
        for row, column in enumerate(columns):
            self._table[row] = column

    def __len__(self) -> int:
        return len(self._table[0])

    @property
    def ordinal(self) -> IntArray:  # noqa: D102
        column: IntArray = self._table[_ORDINAL]
        return column

    @property
    def tokens(self) -> IntArray:  # noqa: D102
        column: IntArray = self._table[_TOKENS]
        return column

    @property
    def targets(self) -> IntArray:  # noqa: D102
        column: IntArray = self._table[_TARGETS]
        return column

    @property
    def patches(self) -> IntArray:  # noqa: D102
        column: IntArray = self._table[_PATCHES]
        return column

    @property
    def task(self) -> IntArray:  # noqa: D102
        column: IntArray = self._table[_TASK]
        return column

    @property
    def sharers(self) -> IntArray:  # noqa: D102
        column: IntArray = self._table[_SHARERS]
        return column

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sample."""
        lengths: list[int] = self.tokens.tolist()
        return lengths

    def take(self, rows: npt.NDArray[np.intp] | IntArray | Sequence[int]) -> Facts:
        """Return the facts of some rows, in the order of `rows`."""
        return _of(self._table.take(np.asarray(rows, np.intp), axis=1))

    def without(self, rows: IntArray | Sequence[int]) -> Facts:
        """Return the facts of all other rows."""
        return _of(np.delete(self._table, rows, axis=1))

    @staticmethod
    def joined(parts: Sequence[Facts]) -> Facts:
        """Return the facts of all parts, in their order."""
        return _of(np.concatenate([NO_FACTS._table, *(part._table for part in parts)], axis=1))


class FactsByOrdinal:
    """Facts of waiting samples, by their ordinals."""

    def __init__(self) -> None:
        self._columns = ColumnsByOrdinal(_COLUMNS)

    def add(self, facts: Facts, oldest: int) -> None:
        """Put facts in; facts of samples before `oldest` are no longer needed."""
        self._columns.put(facts.ordinal, facts._table, oldest)

    def take(self, ordinals: IntArray) -> Facts:
        """Return the facts of samples that were put in."""
        return _of(self._columns.take(ordinals))


class ColumnsByOrdinal:
    """A table of integers with a column for each ordinal of a range, which moves on."""

    def __init__(self, rows: int) -> None:
        self.table: IntArray = np.zeros((rows, 0), dtype=np.int64)
        """The columns, from ordinal `first` on; 0 where none was put."""
        self.first = self.stop = 0
        """The ordinals that it has columns of."""

    @property
    def capacity(self) -> int:
        """Columns of the table."""
        return len(self.table[0])

    def put(self, ordinals: IntArray, columns: IntArray, oldest: int) -> None:
        """Write the columns of some ordinals, ascending; those before `oldest` may be forgotten."""
        if not len(ordinals):
            return
        first, stop = int(ordinals[0]), int(ordinals[-1]) + 1
        if first < self.first or stop > self.first + self.capacity:
            self._make_room(min(first, oldest), max(stop, self.stop))
        self.stop = max(stop, self.stop)
        is_dense = stop - first == len(ordinals)
        if is_dense:
            self.table[:, first - self.first : stop - self.first] = columns
        else:
            self.table[:, ordinals - self.first] = columns

    def take(self, ordinals: IntArray) -> IntArray:
        """Return the columns of some ordinals, (rows, n)."""
        return self.table.take(ordinals - self.first, axis=1)

    def _make_room(self, first: int, stop: int) -> None:
        table = np.zeros((len(self.table), 2 * (stop - first) + _SPARE), dtype=np.int64)
        kept_from = max(first, self.first)
        if kept_from < self.stop:
            kept = self.table[:, kept_from - self.first : self.stop - self.first]
            table[:, kept_from - first : self.stop - first] = kept
        self.table, self.first = table, first


_SPARE = 32  # columns beside twice the number that is needed


def _of(table: IntArray) -> Facts:
    facts = object.__new__(Facts)
    facts._table = table
    return facts


NO_FACTS = _of(np.empty((_COLUMNS, 0), dtype=np.int64))
