"""The records of files, which are read in blocks of neighbours from a store."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.sources.data_file import DataFile, file_versions

BLOCK_BYTES = 4 << 20  # of neighbouring records that are read at once


class RecordBlocks:
    """The records of files; of objects in blocks of neighbours, which are read at once.

    Args:
        files: the files.
        starts: of each file, the byte at which each record begins, ascending, (n,).
    """

    mixed_blocks = 8

    def __init__(self, files: Sequence[DataFile], starts: Sequence[IntArray]) -> None:
        self._files, self._bounds = files, list[IntArray]()
        first, blocks = 0, list[int]()
        for file, begins in zip(files, starts, strict=True):
            # The first record that begins in each 4 MiB.
            begin_block = np.flatnonzero(np.diff(begins // BLOCK_BYTES, prepend=-1))
            blocks += (first + begin_block).tolist()
            self._bounds.append(np.append(begins[begin_block], file.size))
            first += len(begins)
        self._size = first
        are_stored = any(file.is_stored for file in files)
        self.shuffle_blocks = blocks if are_stored and blocks else None
        self.file_versions = file_versions(files)
        self._read_last: dict[tuple[int, int], bytes | mmap.mmap] = {}

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read_last": {}}

    def read(self, file: int, start: int, stop: int) -> bytes:
        """Return bytes within a record of a file, by its number."""
        if not self._files[file].is_stored:
            return self._files[file].read(start, stop)[:]
        bounds = self._bounds[file]
        block = int(np.searchsorted(bounds, start, "right")) - 1
        begin = int(bounds[block])
        if (data := self._read_last.pop((file, block), None)) is None:
            data = self._files[file].read(begin, int(bounds[block + 1]))
        self._read_last[file, block] = data  # at the end, as the last block used
        for old in [*self._read_last][: -self.mixed_blocks - 1]:
            self._read_last.pop(old, None)
        return data[start - begin : stop - begin]
