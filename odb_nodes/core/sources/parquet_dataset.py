"""A map-style dataset of the rows of Parquet files."""

from __future__ import annotations

import io
import operator
import os
import re
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np

from odb_nodes._support.checks import check_count, check_names, import_extra
from odb_nodes.core.sources.data_file import (
    CHANGED,
    REMEDY,
    DataFile,
    data_id_of,
    file_versions,
    of_each,
)
from odb_nodes.core.sources.data_files import PARQUET, Paths, open_files
from odb_nodes.core.sources.kept_index import Index, index_of

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
            fsspec opens, as `"s3://bucket/{00..99}.parquet"`.
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
        self._files = open_files(paths, PARQUET)
        self.mixed_blocks = check_count("mixed_blocks", mixed_blocks)
        """How many blocks of `shuffle_blocks` are mixed at a time."""
        if columns is not None and not check_names("columns", columns):
            raise ValueError("`columns` must name at least 1 column, but is empty.")
        self._columns = None if columns is None else [*columns]
        self._reads_all = columns is None
        self._partitions = [_partitions_of(str(file)) for file in self._files]
        self._metadata = of_each(_metadata_of, self._files)
        self._groups: list[tuple[int, int]] = []  # of each block: file number, row group number
        rows = [0]
        for number, (file, metadata) in enumerate(zip(self._files, self._metadata, strict=True)):
            self._check_columns(str(file), metadata, self._partitions[number])
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                rows.append(metadata.row_group(group).num_rows)
        self._starts = np.cumsum(rows)
        self.file_versions = file_versions(self._files)
        self._read_last: dict[int, dict[str, Any]] = {}  # columns of blocks

    @property
    def shuffle_blocks(self) -> list[int]:
        """The first row of each row group: a `ShardedSampler` shuffles these, then their rows."""
        starts: list[int] = self._starts[:-1].tolist()
        return starts

    @property
    def data_id(self) -> str:
        """Identity of the data, for states: files, sizes, columns, and versions of objects."""
        # Files of different folders often have equal names.
        partitions = [self._partitions] if any(self._partitions) else []
        return data_id_of(self._files, self._columns, *partitions)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            IndexError: there is none.
            OSError: its row group could not be read, or the file has changed.
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
        try:
            if not file.is_unchanged():
                raise OSError(CHANGED)
            table = _row_group(file, self._metadata[number], group, names)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{problem}: the file is gone. {REMEDY}") from error
        except Exception as error:  # of pyarrow, or the store
            kind = type(error) if isinstance(error, OSError) else OSError
            raise kind(f"{problem}: {error}") from error
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


def _metadata_of(file: DataFile) -> Any:
    """Return the metadata of a file. Those of an object are kept, as its index."""
    parquet = import_extra("pyarrow.parquet", "parquet")
    try:
        if not file.is_stored:
            with file.open() as opened:
                return parquet.read_metadata(opened)
        footer = index_of(file, "parquet1", ["footer"], _footer)["footer"]
        return parquet.read_metadata(io.BytesIO(footer.tobytes()))
    except (FileNotFoundError, PermissionError, ImportError):
        raise
    except Exception as error:  # of pyarrow, or the store
        if file.is_stored and isinstance(error, OSError):
            raise OSError(f"{file} cannot be read, or is no Parquet file: {error}") from error
        raise ValueError(f"{file} is no Parquet file, or is cut: {error}") from error


def _footer(file: DataFile) -> Index:
    parquet, metadata = import_extra("pyarrow.parquet", "parquet"), io.BytesIO()
    with file.open() as opened:
        parquet.read_metadata(opened).write_metadata_file(metadata)
    return {"footer": np.frombuffer(metadata.getvalue(), np.uint8)}


def _row_group(file: DataFile, metadata: Any, group: int, columns: Sequence[str]) -> Any:
    parquet = import_extra("pyarrow.parquet", "parquet")
    with file.open_places() as opened:
        # Of an object, the chunks of neighbouring columns are one request.
        rows = parquet.ParquetFile(opened, metadata=metadata, pre_buffer=file.is_stored)
        return rows.read_row_group(group, columns=columns, use_threads=False)
