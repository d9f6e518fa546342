"""Facts of samples: named columns of integers, without their data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray

_COLUMNS = 6


class Facts:
    """Facts of samples, in named columns of one table. It never changes.

    Args:
        ordinal: numbers of the samples among all samples that the rank has pulled, (n,).
        tokens: lengths, (n,).
        targets: supervised tokens, (n,).
        patches: image patches, (n,).
        task: numbers of the tasks, if tasks decide groups, (n,).
        sharers: for each sample the number of ranks that share its data, and so can make it, (n,).
    """

    __slots__ = ("_table", "ordinal", "patches", "sharers", "targets", "task", "tokens")
    _table: IntArray
    ordinal: IntArray
    tokens: IntArray
    targets: IntArray
    patches: IntArray
    task: IntArray
    sharers: IntArray

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
        table = np.empty((_COLUMNS, len(ordinals)), dtype=np.int64)
        for row, column in enumerate((ordinals, tokens, targets, patches, task, sharers)):
            table[row] = column
        self._use(table)

    def _use(self, table: IntArray) -> None:
        self._table = table
        self.ordinal, self.tokens, self.targets, self.patches, self.task, self.sharers = table

    def __len__(self) -> int:
        return len(self.ordinal)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sample."""
        lengths: list[int] = self.tokens.tolist()
        return lengths

    def take(self, rows: npt.NDArray[np.intp] | IntArray | Sequence[int]) -> Facts:
        """Return the facts in these rows, in this order."""
        return _facts(self._table.take(np.asarray(rows, np.intp), axis=1))

    def without(self, rows: IntArray | Sequence[int]) -> Facts:
        """Return the facts of all other rows."""
        return _facts(np.delete(self._table, rows, axis=1))

    @staticmethod
    def joined(parts: Sequence[Facts]) -> Facts:
        """Return the facts of all parts, in their order."""
        return _facts(np.concatenate([NO_FACTS._table, *(part._table for part in parts)], axis=1))


class FactsByOrdinal:
    """Facts of waiting samples, by their ordinals."""

    def __init__(self) -> None:
        self._columns = ColumnsByOrdinal(_COLUMNS)

    def add(self, facts: Facts, oldest: int) -> None:
        """Put facts in; facts of samples before `oldest` are no longer needed."""
        self._columns.put(facts.ordinal, facts._table, oldest)

    def take(self, ordinals: IntArray) -> Facts:
        """Return the facts of samples that were put in."""
        return _facts(self._columns.take(ordinals))


class ColumnsByOrdinal:
    """A table of integers with a column for each ordinal of a range, which moves up."""

    def __init__(self, rows: int) -> None:
        self.table: IntArray = np.zeros((rows, 0), dtype=np.int64)
        """The columns, from ordinal `first` on; 0 for an ordinal that was not put in."""
        self.first = self.stop = 0
        """The range of ordinals."""

    @property
    def capacity(self) -> int:
        """Columns of the table."""
        return len(self.table[0])

    def put(self, ordinals: IntArray, columns: IntArray, oldest: int) -> None:
        """Write columns of ascending ordinals; ordinals before `oldest` are no longer needed."""
        if not len(ordinals):
            return
        first = int(ordinals[0])
        stop = int(ordinals[-1]) + 1
        if first < self.first or stop > self.first + self.capacity:
            self._make_room(min(first, oldest), max(stop, self.stop))
        self.stop = max(stop, self.stop)
        is_dense = stop - first == len(ordinals)
        if is_dense:
            self.table[:, first - self.first : stop - self.first] = columns
        else:
            self.table[:, ordinals - self.first] = columns

    def take(self, ordinals: IntArray) -> IntArray:
        """Return the columns of ordinals, (rows, n)."""
        return self.table.take(ordinals - self.first, axis=1)

    def _make_room(self, first: int, stop: int) -> None:
        table = np.zeros((len(self.table), 2 * (stop - first) + _SPARE), dtype=np.int64)
        kept_from = max(first, self.first)
        if kept_from < self.stop:
            kept = self.table[:, kept_from - self.first : self.stop - self.first]
            table[:, kept_from - first : self.stop - first] = kept
        self.table, self.first = table, first


_SPARE = 32  # columns beyond twice the needed number


def _facts(table: IntArray) -> Facts:
    facts = object.__new__(Facts)
    facts._use(table)
    return facts


NO_FACTS = _facts(np.empty((_COLUMNS, 0), dtype=np.int64))
