"""Samples that wait for the end of an epoch because their groups had no room."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray, int64_array, int64_state
from odb_nodes.core.planning.budget import TokenBudget
from odb_nodes.core.planning.pool import grouping_of

_NUMBERS, _TOKENS, _PATCHES, _WERE_IN_GROUP = range(4)


class LaterSamples:
    """Samples that come last in the epoch: they were longer than expected, or were put back.

    Their groups are formed by observed lengths, once all these samples are known. Without one
    group, the other samples form the same other groups, so a state has the samples alone.

    State: (4, n) integers: number, tokens and patches of each sample, and whether it was in a group
    before; 32 bytes a sample.
    """

    def __init__(self, table: IntArray | None = None) -> None:
        self._table = np.empty((4, 0), np.int64) if table is None else table
        self._groups: deque[IntArray] | None = None  # groups not returned yet

    def __len__(self) -> int:
        return len(self._table[0])

    @property
    def numbers(self) -> IntArray:
        """Numbers of the samples, (n,)."""
        numbers: IntArray = self._table[_NUMBERS]
        return numbers

    @property
    def tokens(self) -> IntArray:
        """Observed length of each, (n,)."""
        tokens: IntArray = self._table[_TOKENS]
        return tokens

    @property
    def are_grouped(self) -> bool:
        """Whether `next_group` has been called."""
        return self._groups is not None

    def add(
        self, numbers: IntArray, tokens: IntArray, patches: IntArray, *, were_in_group: bool = False
    ) -> None:
        """Add samples, (n,) each."""
        if len(numbers):
            new = np.stack((numbers, tokens, patches, np.full_like(numbers, were_in_group)))
            self._table = np.concatenate((self._table, new), axis=1)

    def remove(self, numbers: IntArray) -> None:
        """Remove samples."""
        self._table = self._table[:, ~np.isin(self.numbers, numbers)]

    def tokens_of(self, number: int) -> int:
        """Return the observed length of a sample."""
        return int(self.tokens[self.numbers == number][0])

    def were_in_group(self, numbers: IntArray) -> npt.NDArray[np.bool_]:
        """Return which samples were in a group before, (n,)."""
        return np.isin(numbers, self.numbers[self._table[_WERE_IN_GROUP] == 1])

    def next_group(self, budget: TokenBudget) -> IntArray | None:
        """Return the samples of the next group, (n,); `None` if there is none."""
        if self._groups is None:
            table = np.stack((self.tokens, np.arange(len(self)), self._table[_PATCHES]))
            table = table.take(np.lexsort((self.numbers, self.tokens)), axis=1)
            groups = grouping_of(budget).partition(table) if len(self) else []
            self._groups = deque(self.numbers[np.sort(group)] for group in groups)
        return self._groups.popleft() if self._groups else None

    def group_anew(self) -> None:
        """Form the groups of all samples again at the next `next_group`."""
        self._groups = None

    def part(self, are_in: npt.NDArray[np.bool_]) -> LaterSamples:
        """Return the samples where `are_in` is true."""
        return LaterSamples(self._table[:, are_in])

    def to_state(self) -> bytes | None:
        """Return the samples as bytes, for `from_states`."""
        return int64_state(self._table)

    @classmethod
    def from_states(cls, *states: bytes | None, samples: int | None = None) -> LaterSamples:
        """Return the samples of states; raise a `ValueError` if a state is damaged.

        samples: number of samples of the dataset.
        """
        tables = [int64_array(state).reshape(4, -1) for state in states]
        later = cls(np.concatenate(tables, axis=1))
        check_numbers(later.numbers, samples)
        return later


def check_numbers(numbers: IntArray, samples: int | None) -> IntArray:
    """Return `numbers`; raise a `ValueError` unless a dataset of `samples` samples has them."""
    if len(numbers) and (numbers.min() < 0 or (samples is not None and numbers.max() >= samples)):
        raise ValueError("it names a sample that does not exist.")
    return numbers
