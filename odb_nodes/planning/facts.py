"""What planning knows of samples: named columns of integers, and nothing of their data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from odb_nodes.planning.table import IntArray

_ORDINAL, _TOKENS, _TARGETS, _PATCHES, _TASK, _FLAGS, _ITEM = range(7)


class Facts:
    """Facts of samples, in named columns of one table. It never changes.

    Args:
        ordinal: number of each among the samples that the rank has pulled in the epoch, (n,).
        tokens: length of each, (n,).
        targets: supervised tokens of each, (n,).
        patches: image patches of each, (n,).
        task: number of the task of each, (n,).
        flags: bit mask of the modalities of each, (n,).
        item: which sample of the data each is, the same on every rank, (n,).
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
        task: npt.ArrayLike,
        flags: npt.ArrayLike,
        item: npt.ArrayLike,
    ) -> None:
        columns = (ordinal, tokens, targets, patches, task, flags, item)
        self._table = np.array(columns, dtype=np.int64)

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
    def flags(self) -> IntArray:  # noqa: D102
        column: IntArray = self._table[_FLAGS]
        return column

    @property
    def item(self) -> IntArray:  # noqa: D102
        column: IntArray = self._table[_ITEM]
        return column

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sample."""
        lengths: list[int] = self.tokens.tolist()
        return lengths

    def take(self, rows: IntArray | Sequence[int] | slice) -> Facts:
        """Return the facts of some rows, in the order of `rows`."""
        if isinstance(rows, slice):
            return _of(self._table[:, rows])
        return _of(self._table.take(np.asarray(rows, np.intp), axis=1))

    def without(self, rows: IntArray | Sequence[int]) -> Facts:
        """Return the facts of all other rows."""
        return _of(np.delete(self._table, rows, axis=1))

    def numbered_from(self, first: int) -> Facts:
        """Return the same samples with ordinals from `first` on."""
        table = self._table.copy()
        table[_ORDINAL] = np.arange(first, first + len(self))
        return _of(table)

    @staticmethod
    def joined(parts: Sequence[Facts]) -> Facts:
        """Return the facts of all parts, in their order."""
        return _of(np.concatenate([NO_FACTS._table, *(part._table for part in parts)], axis=1))


def _of(table: IntArray) -> Facts:
    facts = object.__new__(Facts)
    facts._table = table
    return facts


NO_FACTS = _of(np.empty((7, 0), dtype=np.int64))
