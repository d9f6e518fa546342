"""The order of a dataset's samples in an epoch: permutations, also of blocks of samples."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray, int64_bytes
from odb_nodes._support.checks import check_count
from odb_nodes._support.hashing import hash_ints

_ORDERED = 1 << 18  # indices of a whole epoch's order computed at a time, in 40 bytes each
_ROUNDS = 6
_MIN_HALF_BITS = 4  # Tiny Feistel halves mix badly.
_MIXED_BLOCKS = 4
_TABLE_SIZE = 64  # Up to this size, most values of the smallest network are outside: use a table.


class Permutation:
    """A permutation of `range(size)`, decided by a seed and computed element by element.

    A balanced Feistel network over the next larger power of four. Results outside the range are
    encrypted again until they fall into it (Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002). Only integer arithmetic decides the result, and no library's version.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
        self._half = np.uint64(bits)
        self._mask = np.uint64((1 << bits) - 1)
        self._keys = [np.uint64(hash_ints(seed, index)) for index in range(_ROUNDS)]
        self._table: npt.NDArray[np.uint64] | None = None
        if size <= _TABLE_SIZE:
            self._table = self._encrypt(np.arange(1 << 2 * bits, dtype=np.uint64))

    def __call__(self, positions: IntArray) -> IntArray:
        """Return the elements at `positions`: (n,) int64 in `range(size)` -> (n,) int64."""
        elements = self._map(positions.astype(np.uint64))
        outside = np.flatnonzero(elements >= self._size)
        while outside.size:
            elements[outside] = self._map(elements[outside])
            outside = outside[elements[outside] >= self._size]
        return elements.astype(np.int64)

    def _map(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return self._encrypt(values) if self._table is None else self._table[values]

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        high, low = values >> self._half, values & self._mask
        for key in self._keys:
            mixed = (low ^ key) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
            high, low = low, high ^ ((mixed >> np.uint64(32)) & self._mask)
        return (high << self._half) | low


def epoch_order(size: int, seed: int, epoch: int, *, shuffle: bool) -> IntArray:
    """Return the order of an epoch whose samples are in no blocks, (size,)."""
    order = np.arange(size)
    if shuffle:
        permutation = Permutation(size, hash_ints(seed, epoch))
        for start in range(0, size, _ORDERED):
            part = order[start : start + _ORDERED]
            part[:] = permutation(part)
    return order


class BlockPermutation:
    """A permutation of `range(size)` that keeps the elements of a block close to each other.

    The blocks are permuted, and then the elements within each run of `mixed` blocks.
    """

    def __init__(self, size: int, starts: Sequence[int], mixed: int, seed: int) -> None:
        sizes = np.diff([*starts, size])
        order = Permutation(len(sizes), seed)(np.arange(len(sizes)))
        self._mixed, self._seed = mixed, seed
        self._starts = np.asarray(starts, np.int64)[order]
        self._ends = np.cumsum(sizes[order])  # of each block, among the positions

    def __call__(self, positions: IntArray) -> IntArray:
        """Return the elements at `positions`: (n,) int64 in `range(size)` -> (n,) int64."""
        elements = np.empty_like(positions)
        ends = self._ends
        mixes = np.searchsorted(ends, positions, "right") // self._mixed
        for mix in np.unique(mixes).tolist():
            first = mix * self._mixed
            is_in_mix = mixes == mix
            begin = int(ends[first - 1]) if first else 0
            end = int(ends[min(first + self._mixed, len(ends)) - 1])
            permutation = Permutation(end - begin, hash_ints(self._seed, mix))
            places = begin + permutation(positions[is_in_mix] - begin)
            blocks = np.searchsorted(ends, places, "right")
            elements[is_in_mix] = self._starts[blocks] + places - np.append(0, ends)[blocks]
        return elements


def shuffle_blocks(dataset: Any) -> tuple[list[int], int] | None:
    """Return the starts of a dataset's blocks, and how many are mixed; `None` without blocks."""
    if (starts := getattr(dataset, "shuffle_blocks", None)) is None:
        return None
    size = len(dataset)
    mixed = check_count("mixed_blocks", getattr(dataset, "mixed_blocks", _MIXED_BLOCKS))
    first = np.asarray(starts)
    are_integers = first.dtype.kind in "iu"
    bounds = np.append(first.astype(np.int64), size) if are_integers else first
    if not are_integers or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"`shuffle_blocks` must be the first index of each block, ascending from 0 to at most "
            f"{size}, the length of the dataset, but is {starts!r:.200} instead."
        )
    return bounds[:-1].tolist(), mixed


class DatasetOrder:
    """Orders the samples of a dataset, by blocks if it has an attribute `shuffle_blocks`."""

    def __init__(self, dataset: Any) -> None:
        self._blocks = shuffle_blocks(dataset)
        self._data_id: str | None = getattr(dataset, "data_id", None)
        self._file_versions: dict[str, str] = getattr(dataset, "file_versions", {})

    def permutation(self, size: int, seed: int) -> Permutation | BlockPermutation:
        """Return a permutation of `range(size)`."""
        if self._blocks is None:
            return Permutation(size, seed)
        starts, mixed = self._blocks
        return BlockPermutation(size, starts, mixed, seed)

    def of_epoch(self, size: int, seed: int, epoch: int, *, shuffle: bool) -> IntArray:
        """Return the samples of an epoch in their order, (size,)."""
        if self._blocks is None or not shuffle:
            return epoch_order(size, seed, epoch, shuffle=shuffle)
        return self.permutation(size, hash_ints(seed, epoch))(np.arange(size))

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the dataset and decides its orders."""
        fields: dict[str, Any] = {} if self._data_id is None else {"data_id": self._data_id}
        if self._blocks is not None:
            starts, mixed = self._blocks
            fields["blocks"] = f"{len(starts)}, CRC-32 {zlib.crc32(int64_bytes(starts))}"
            fields["mixed_blocks"] = mixed
        return fields | self._file_versions
