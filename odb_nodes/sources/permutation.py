"""A pseudo-random permutation of any size in constant memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from odb_nodes._core.hashing import hash_ints

_ROUNDS = 6
_MIN_HALF_BITS = 4  # Tiny Feistel halves mix badly.
_FEW = 64
"""A permutation of at most so many elements is computed at once, since most positions of the
smallest network lie outside of it."""


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
        self._few = self._walk() if size <= _FEW else None

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at `positions`: (n,) int64 in `range(size)` -> (n,) int64."""
        if self._few is not None:
            return self._few[positions]
        elements = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(elements >= self._size)
        while outside.size:
            elements[outside] = self._encrypt(elements[outside])
            outside = outside[elements[outside] >= self._size]
        return elements.astype(np.int64)

    def _walk(self) -> NDArray[np.int64]:
        """Return the elements at all positions: (size,) int64."""
        table = self._encrypt(np.arange(1 << 2 * _MIN_HALF_BITS, dtype=np.uint64)).tolist()
        elements = table[: self._size]
        for position, element in enumerate(elements):
            while element >= self._size:
                element = table[element]
            elements[position] = element
        return np.array(elements, dtype=np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            mixed = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & self._mask)
        return (left << self._half) | right
