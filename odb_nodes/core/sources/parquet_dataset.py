"""A map-style dataset of the rows of Parquet files."""

from __future__ import annotations

import operator
import os
import re
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np

from odb_nodes._support.checks import check_count, check_names, import_extra
from odb_nodes.core.sources.data_files import PARQUET, Paths, check_files, files_of, is_url, listed
from odb_nodes.core.sources.kept_index import stamp_of

_TRIES = 3  # to read a row group, as over a network
_WAIT_S = 0.5  # before the second try, and twice as long before the third
_PARTITION = re.compile(r"(?<=/)([^/=?&]+)=([^/]*)(?=/)")  # a folder of a hive-partitioned table
_NULL = "__HIVE_DEFAULT_PARTITION__"


class ParquetDataset:
    """The rows of Parquet files, as dicts of Python values: a map-style dataset.

    A row group is decoded as a whole. So an `ODBDataLoader` shuffles the row groups, and then the
    rows of `mixed_blocks` of them at a time, which each worker keeps in memory.

    Args:
        paths: a file, a folder, or a pattern such as `"data/*.parquet"` or `"{00..99}.parquet"`; or
            several of these, in order. A folder stands for its `.parquet`, `.parq` and `.pq` files,
            and those in its folders named `key=value`; `"data/**"` for all below it. Or URLs that
            fsspec opens, as `"s3://bucket/{00..99}.parquet"`; `"filecache::s3://..."` keeps them on
            a local disk.
        columns: the columns to read. Default: all, and each file must have the same. Folders
            named `key=value` in the path of a file are columns of strings (hive partitions).
        mixed_blocks: row groups whose rows are shuffled together.

    Raises:
        ImportError: pyarrow is not installed, or fsspec for a URL.
        FileNotFoundError: a file does not exist, or a folder or pattern has none.
        TypeError: `columns` is no list.
        ValueError: a file comes twice, is no Parquet file or is cut, or lacks a column, or has more
            than the first without `columns`; or a folder has further Parquet files, in subfolders.
    """

    draws_random_numbers: ClassVar[bool] = False

    def __init__(
        self, paths: Paths, columns: Sequence[str] | None = None, *, mixed_blocks: int = 4
    ) -> None:
        self._files = list[str]()
        for path in listed(paths):
            self._files += [path] if is_url(path) else map(str, files_of(path, PARQUET))
        check_files(self._files)
        self.mixed_blocks = check_count("mixed_blocks", mixed_blocks)
        """How many blocks of `shuffle_blocks` are mixed at a time."""
        if columns is not None and not check_names("columns", columns):
            raise ValueError("`columns` must name at least 1 column, but is empty.")
        self._columns = None if columns is None else [*columns]
        self._reads_all = columns is None
        self._partitions = [*map(_partitions_of, self._files)]
        self._metadata: list[Any] = []
        self._stamps: list[tuple[int, int]] = []
        self._groups: list[tuple[int, int]] = []  # of each block: file number, row group number
        rows = [0]
        for number, file in enumerate(self._files):
            metadata = _read(
                _metadata_of, file, f"{file} is no Parquet file, or is cut", ValueError
            )
            self._check_columns(file, metadata, self._partitions[number])
            self._metadata.append(metadata)
            self._stamps.append(_stamp_of(file))
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                rows.append(metadata.row_group(group).num_rows)
        self._starts = np.cumsum(rows)
        self._read_last: dict[int, dict[str, Any]] = {}  # columns of blocks

    @property
    def shuffle_blocks(self) -> list[int]:
        """The first row of each row group: a `ShardedSampler` shuffles these, then their rows."""
        starts: list[int] = self._starts[:-1].tolist()
        return starts

    @property
    def data_id(self) -> str:
        """Identity of the data, for states: the files, their sizes and columns."""
        files = [os.path.basename(file) for file in self._files]
        content = repr((files, [size for size, _ in self._stamps], self._columns))
        if any(self._partitions):  # files of different folders often have equal names
            content += repr(self._partitions)
        return f"{len(files)} files, CRC-32 {zlib.crc32(content.encode())}"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            IndexError: there is none.
            OSError: its row group could not be read in 3 tries, or the file has changed.
        """
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"there is no row {index}: the files have {len(self)}.")
        block = int(np.searchsorted(self._starts, index, "right")) - 1
        if (columns := self._read_last.pop(block, None)) is None:
            columns = self._columns_of(block)
        self._read_last[block] = columns  # at the end, as the last block used
        for old in [*self._read_last][: -self.mixed_blocks - 1]:
            self._read_last.pop(old, None)
        row = index - int(self._starts[block])
        values = {name: column[row].as_py() for name, column in columns.items()}
        return values | self._partitions[self._groups[block][0]]

    @property
    def column_names(self) -> list[str]:
        """The columns of all files, including columns that are not read."""
        schemas = [metadata.schema.to_arrow_schema().names for metadata in self._metadata]
        return [name for name in schemas[0] if all(names.count(name) == 1 for names in schemas)]

    def column_of(self, block: int, name: str) -> Any:
        """Return one of `column_names` of a block of `shuffle_blocks`, as Arrow holds it."""
        return self._columns_of(block, [name])[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read_last": {}}

    def _columns_of(self, block: int, columns: Sequence[str] = ()) -> dict[str, Any]:
        """Return columns of a block; by default, the columns of the rows."""
        number, group = self._groups[block]
        file, first, end = self._files[number], self._starts[block], self._starts[block + 1]
        problem = f"row group {group} of {file} (rows {first}..{end - 1}) cannot be read"
        names = columns or self._columns or ()
        names = [name for name in names if name not in self._partitions[number]]
        read = partial(_row_group, self._metadata[number], group, names)
        remedy = "Put it back, or make the dataset anew."
        try:
            if _stamp_of(file) != self._stamps[number]:
                raise OSError(
                    f"{problem}: the file was cut or replaced since the dataset was made, or its "
                    f"time was changed. {remedy}"
                )
            table = _read(read, file, problem, OSError)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{problem}: the file is gone. {remedy}") from error
        return {name: table[name].combine_chunks() for name in table.column_names}

    def _check_columns(self, file: str, metadata: Any, partitions: dict[str, Any]) -> None:
        """Check the columns of a file, and drop partitions that are not read."""
        names = metadata.schema.to_arrow_schema().names
        for name in [*partitions]:
            if name in names or name not in (self._columns or partitions):
                del partitions[name]
        names += partitions
        if self._columns is None:
            self._columns = names
        if self._reads_all and (more := [name for name in names if name not in self._columns]):
            raise ValueError(
                f"{file} has columns {more}, which {self._files[0]} has not: they would be left "
                "out. Pass the `columns` that all files have."
            )
        for name in self._columns:
            if (count := names.count(name)) != 1:
                raise ValueError(
                    f"{file} has {count or 'no'} column{'s' * (count > 1)} {name!r}: it has "
                    f"{names}. Pass `columns` that all files have, once."
                )


def _partitions_of(file: str) -> dict[str, str | None]:
    """Return the values of the folders named `key=value` above a file."""
    folders = f"/{os.path.dirname(file).replace(os.sep, '/')}/"
    pairs = [map(unquote, pair) for pair in _PARTITION.findall(folders)]
    return {name: None if value == _NULL else value for name, value in pairs}


def _stamp_of(file: str) -> tuple[int, int]:
    """Return size and time of a local file; -1 for a URL, which is not checked."""
    return (-1, -1) if is_url(file) else stamp_of(os.stat(file))


def _open(file: str) -> Any:
    if not is_url(file):
        return open(file, "rb")
    return import_extra("fsspec", "parquet").open(file, "rb").open()


def _read(read: Callable[[Any], Any], file: str, problem: str, kind: type[Exception]) -> Any:
    """Open a file and call `read` with it; over a network, try several times."""
    tries = _TRIES if is_url(file) else 1
    for attempt in range(tries):
        try:
            with _open(file) as opened:
                return read(opened)
        except (FileNotFoundError, ImportError):
            raise
        except Exception as error:  # of pyarrow, fsspec, or what fsspec uses
            if attempt + 1 == tries:
                tried = f" in {tries} tries" if tries > 1 else ""
                raise kind(f"{problem}{tried}: {error}") from error
        time.sleep(_WAIT_S * 2**attempt)
    raise AssertionError("there is a last try")


def _metadata_of(opened: Any) -> Any:
    return import_extra("pyarrow.parquet", "parquet").read_metadata(opened)


def _row_group(metadata: Any, group: int, columns: Sequence[str] | None, opened: Any) -> Any:
    parquet = import_extra("pyarrow.parquet", "parquet").ParquetFile(opened, metadata=metadata)
    return parquet.read_row_group(group, columns=columns, use_threads=False)
