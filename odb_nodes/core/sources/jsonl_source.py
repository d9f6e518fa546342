"""Source node: the records of JSON Lines files."""

from __future__ import annotations

import copy
import gzip
import json
import weakref
import zlib
from array import array
from bisect import bisect_right
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_bool, check_integer
from odb_nodes._support.processes import may_be_empty, resolve_rank
from odb_nodes._support.progress import SlowProgress
from odb_nodes.core.contract import EpochNode
from odb_nodes.core.contract.node import ItemLocation
from odb_nodes.core.sample import ItemKey
from odb_nodes.core.sources.data_file import DataFile, of_each
from odb_nodes.core.sources.data_files import JSON_LINES, Paths, open_files
from odb_nodes.core.sources.kept_index import Index, index_of
from odb_nodes.core.sources.record_blocks import RecordBlocks
from odb_nodes.core.sources.sharded_sampler import ShardedOrder
from odb_nodes.errors import SampleError, StateError

_OFFSET_BITS = 40  # of a key
_MOST_OPEN = 64  # files: opening one takes long on a network's disk
_INDEXED_BYTES = 1 << 20  # at a time
_CUT = (EOFError, gzip.BadGzipFile, zlib.error)  # of a compressed file that is cut or damaged

_BOM = "\ufeff".encode()


class JsonlSource(ShardedOrder[Any]):
    """Yields this rank's records of JSON Lines files, shuffled anew in every epoch.

    The records of all files are read in the order that a `ShardedSampler` gives a list of them. A
    record is a line that is not blank.

    State: epoch and position. Memory: 8 bytes a record, and one record. All files are read once
    when the source is made, to find where records begin. Of a file of 64 MiB or more that is kept
    in a hidden file beside it, or else in `~/.cache/odb_nodes`, and read there until size or time
    of the file change.

    Of an object store, neighbouring records are read together, 4 MiB at a time. These blocks are
    shuffled, and then the records of 8 of them at a time.

    A file whose name ends in `.gz` is decompressed while it is read, so it needs `shuffle=False`,
    and restoring decompresses up to the position.

    Args:
        paths: a file, a folder, or a pattern such as `"data/*.jsonl"` or `"{00..99}.jsonl"`; or
            several of these, in order. A folder stands for its `.jsonl` and `.ndjson` files, and
            those with `.gz` behind that; `"data/**"` for those below it too. Files of a folder or
            of a pattern with `*` are sorted by name. Or URLs that fsspec opens, as
            `"s3://bucket/*.jsonl"`. UTF-8.
        rank: this rank. Default: from torch.distributed, or `RANK`.
        world_size: number of ranks. Default: from torch.distributed, or `WORLD_SIZE`.
        shuffle: whether to permute the records, differently in every epoch; otherwise they come
            file after file. `ODBDataLoader(shuffle=False)` overrides it.
        seed: seed of the order; the same on all ranks. An `ODBDataLoader` adds its own seed.

    Raises:
        FileNotFoundError: a file does not exist, or a folder or pattern has none.
        ValueError: there is no path; a file comes twice, or is a pipe or a device; a folder has
            further data, in subfolders or compressed otherwise; a file is compressed and `shuffle`
            is True; it cannot be decompressed; or all files are empty, unless each rank has its own
            files (`rank=0, world_size=1` in a job of several ranks).
    """

    retries_errors = True  # the user may correct the file meanwhile

    def __init__(
        self,
        paths: Paths,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._files = open_files(paths, JSON_LINES)
        compressed = [file for file in self._files if _is_compressed(file)]
        if check_bool("shuffle", shuffle) and compressed:
            raise ValueError(
                "`shuffle` must be False for compressed files, which can be read only in their "
                f"order, but is True, and {compressed[0]} is one. Decompress it to shuffle its "
                "records, or pass `shuffle=False`."
            )
        rank, world_size = resolve_rank(rank, world_size)
        names = [field.name for field in fields(LineIndex)]
        indices = of_each(lambda file: index_of(file, "lines1", names, _index_lines), self._files)
        self._index = [LineIndex(**index) for index in indices]
        self._ends = [*accumulate(map(len, self._index))]
        if not self._ends[-1] and not may_be_empty(world_size):
            raise ValueError(f"`paths` must hold a record, but {self._files[0]} is empty.")
        self._record_blocks = RecordBlocks(self._files, [index.starts for index in self._index])
        super().__init__(self._record_blocks, shuffle, seed, rank, world_size)
        self._open = _open_files(self)
        self._to_index: set[int] = set()  # files with a record that was not valid

    def copy(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
    ) -> JsonlSource:
        """Return a source over the same files, at their beginning, that shares no position."""
        source = copy.copy(self)  # instead of a new one: a subclass may take other arguments
        EpochNode.__init__(source)
        source._open = _open_files(source)
        source._to_index = set()
        source._index = [*self._index]
        if rank is not None and world_size is not None:
            source._rank, source._world_size = rank, world_size
        source._shuffle = self._shuffle if shuffle is None else shuffle
        source._seed += check_integer("seed", seed)
        source.begin_epoch()
        return source

    @property
    def paths(self) -> tuple[Path | str, ...]:
        """The files, in their order; URLs are strings."""
        return tuple(file.path for file in self._files)

    @property
    def num_records(self) -> int:
        """Number of records of all ranks."""
        return self._size

    def next(self) -> Any:
        """Return the next record of this rank."""
        (number,) = self._take(1)
        try:
            return self._record(number)
        except BaseException:
            self._position -= 1
            raise

    def item_key(self) -> ItemKey | None:
        """Return file and byte offset of the last record; nothing beyond 1 TiB of a file."""
        file, record = self._place(self._last)
        offset, _ = self._index[file].span(record)
        if offset >= 1 << _OFFSET_BITS:
            return None
        key = (file << _OFFSET_BITS) + offset
        return ItemKey("", key, self._world_size, self._epochs.cycle)

    @property
    def can_restore(self) -> bool:
        """Whether records can be read again by file and offset: not of compressed files."""
        plain = not any(map(_is_compressed, self._files))
        return plain and max(file.size for file in self._files) < 1 << _OFFSET_BITS

    def read(self, key: int) -> Any:
        """Return the record of a key, and stay where this source stands."""
        file, offset = key >> _OFFSET_BITS, key % (1 << _OFFSET_BITS)
        path = self._files[file] if file < len(self._files) else f"file {file}"
        record = self._index[file].record_at(offset) if file < len(self._files) else None
        error: Exception | None = None
        if record is not None:
            try:
                return self._record(self._ends[file] - len(self._index[file]) + record)
            except (SampleError, OSError) as failed:
                if self._files[file].is_stored:  # The store fails, or says what has changed.
                    raise
                error = failed
        raise StateError(
            f"there is no record at byte {offset} of {path}"
            f"{'' if error is None else f': {error}'}. Resume over the files that the state was "
            "saved on."
        ) from error

    def item_location(self) -> ItemLocation:
        """Return file and line of the last record."""
        file, record = self._place(self._last)
        return "line %d of %s", self._index[file].line(record), self._files[file].path

    def close(self) -> None:
        """Close the files that are open. The next record opens its own again."""
        _close_all(self._open)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only if it is equal."""
        files = [file.name for file in self._files]
        sizes_bytes = [file.size for file in self._files]
        return {"files": files, "sizes_bytes": sizes_bytes, **super().fingerprint()}

    def _place(self, number: int) -> tuple[int, int]:
        """Return the file of a record, and its number in it."""
        file = bisect_right(self._ends, number)
        return file, number - (self._ends[file] - len(self._index[file]))

    def _record(self, number: int) -> Any:
        file, record = self._place(number)
        if file in self._to_index:
            self._index_again(file)
        try:
            line = self._line(file, record)
        except SampleError:
            self.close()  # It may be put back before the next call.
            raise
        try:
            return json.loads(line.decode("utf-8-sig"))  # of bytes, it would guess the encoding
        except (ValueError, RecursionError) as error:
            self.close()
            if not self._files[file].is_stored:
                self._to_index.add(file)
            cause = f"{error}"
            if isinstance(error, json.JSONDecodeError):  # whose own line number is within the line
                cause = f"{error.msg} at character {error.pos + 1}"
            shown = line[:80].decode(errors="replace").strip()
            where = f"{self._files[file]}, line {self._index[file].line(record)}"
            raise SampleError(
                f"{where}, is not valid JSON in UTF-8: {cause}. It begins with "
                f"{shown!r}. Correct it. A loop may then iterate again, or resume, "
                "with `strict=False` if the size of the file has changed."
            ) from error

    def _line(self, file: int, record: int) -> bytes:
        """Return the line of a record."""
        path, index = self._files[file], self._index[file]
        start, stop = index.span(record)
        if path.is_stored and not _is_compressed(path):  # Each read checks the version.
            return self._record_blocks.read(file, start, stop).partition(b"\n")[0]
        # A line begins where another ends, which is not read of what cannot go back.
        before = 1 if start and not _is_compressed(path) else 0
        try:
            lines = self._opened(file)
            lines.seek(start - before)
            text = lines.read(stop - start + before)
        except _CUT as error:
            raise SampleError(
                f"{path}, line {index.line(record)}, cannot be decompressed: {error}. The file is "
                "cut or damaged: put it back whole, then iterate again."
            ) from error
        line, newline, blank = text[before:].partition(b"\n")
        is_whole = len(text) == stop - start + before and (newline or stop == index.size)
        if is_whole and text[:before] in (b"", b"\n") and not _text(blank):
            return line
        end = start - before + len(text)
        raise SampleError(
            f"{path} {f'ends at byte {end}' if end < stop else 'is another'}, in line "
            f"{index.line(record)}, but had {index.size} bytes when the source was made: it was "
            "cut or replaced, and records would be left out. Put it back, then iterate again; or "
            "make a new source, and begin an epoch."
        )

    def _opened(self, file: int) -> IO[bytes]:
        if file not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()  # the file open for the longest time
            self._open[file] = _open_lines(self._files[file], keeps=True)
        return self._open[file]

    def _index_again(self, file: int) -> None:
        """Find the lines of a file again, after the user has corrected it."""
        index = LineIndex(**_index_lines(self._files[file]))
        if len(index) != len(self._index[file]):
            raise SampleError(
                f"{self._files[file]} has {len(index)} records now, but had "
                f"{len(self._index[file])} when the source was made. Put it back, then iterate "
                "again; or make a new source, and begin an epoch."
            )
        self._index[file] = index
        self._to_index.remove(file)


def _open_files(source: JsonlSource) -> dict[int, IO[bytes]]:
    """Return a dict for the open files of a source, which closes them when the source is freed."""
    files: dict[int, IO[bytes]] = {}
    weakref.finalize(source, _close_all, files)
    return files


def _close_all(files: dict[int, IO[bytes]]) -> None:
    while files:
        files.popitem()[1].close()


# --- files ----------------------------------------------------------------------------------------


def _is_compressed(file: DataFile) -> bool:
    """Tell whether a file is decompressed while it is read."""
    return file.name.lower().endswith(".gz")


def _open_lines(file: DataFile, *, keeps: bool = False) -> IO[bytes]:
    """Open a file at its beginning, for the bytes of its text."""
    if not _is_compressed(file):
        return file.open(keeps=keeps)
    source: Any = file.open(keeps=keeps) if file.is_stored else file.path
    text: IO[bytes] = gzip.open(source)  # type: ignore[assignment]
    return text


def _text(lines: bytes) -> bytes:
    """Return lines without white space at the ends and marks of UTF-8."""
    return lines.replace(_BOM, b"").strip()


@dataclass(frozen=True)
class LineIndex:
    """The positions of the records of a file."""

    starts: IntArray  # the byte at which each record begins, ascending, (n,)
    blanks: IntArray  # the number of records before each blank line, ascending, (m,)
    size: IntArray  # bytes of the file's text

    def __len__(self) -> int:
        return len(self.starts)

    def span(self, record: int) -> tuple[int, int]:
        """Return the bytes at which a record and the next record begin."""
        is_last = record + 1 == len(self.starts)
        return int(self.starts[record]), int(self.size if is_last else self.starts[record + 1])

    def line(self, record: int) -> int:
        """Return the number of the line of a record, from 1."""
        return record + 1 + int(np.searchsorted(self.blanks, record, "right"))

    def record_at(self, offset: int) -> int | None:
        """Return the record that begins at a byte; `None` where none does."""
        record = int(np.searchsorted(self.starts, offset))
        begins_here = record < len(self.starts) and self.starts[record] == offset
        return record if begins_here else None


def _index_lines(path: DataFile) -> Index:
    """Return the positions of the records of a file: all lines that are not blank."""
    starts, blanks, offset = array("q"), array("q"), 0
    progress = SlowProgress(f"bytes of {path} read, to find its records", path.size)
    try:
        with _open_lines(path) as file:
            while lines := file.readlines(_INDEXED_BYTES):
                for line in lines:
                    if line.isspace() or (line.startswith(_BOM) and not _text(line)):
                        blanks.append(len(starts))
                    else:
                        starts.append(offset)
                    offset += len(line)
                progress.update(offset)
    except _CUT as error:
        raise ValueError(f"{path} cannot be decompressed: {error}. Put it back whole.") from error
    except MemoryError as error:
        raise ValueError(
            f"{path}, after byte {offset}, has a line that is too long for the memory. A record "
            "must be one line: is this JSON Lines?"
        ) from error
    return {
        "starts": np.frombuffer(starts, np.int64),
        "blanks": np.frombuffer(blanks, np.int64),
        "size": np.array(offset),
    }
