"""Source node: the records of JSON Lines files."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from odb_nodes._core.checks import check_bool
from odb_nodes._core.ranks import has_data_elsewhere, resolve_rank
from odb_nodes.contract import Count, EpochNode
from odb_nodes.contract.item_location import ItemLocation
from odb_nodes.errors import SampleError, StateError
from odb_nodes.sample import ItemKey
from odb_nodes.sources.jsonl_files import (
    CUT,
    check_files,
    count_records_of,
    files_of,
    is_compressed,
    open_lines,
)
from odb_nodes.sources.share import Share, ShareState

_OFFSET_BITS = 40  # of a key
_UNKNOWN = 2**63  # bytes of text in a compressed file

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(kw_only=True)
class JsonlState(ShareState):
    """Where a `JsonlSource` stands.

    Attributes:
        file: the number of the file; the number of files at the end.
        offset: bytes of that file that are read.
        line: lines of that file that are read.
        record: records that are read of all files, those of other ranks included.
    """

    file: Count = 0
    offset: Count = 0
    line: Count = 0
    record: Count = 0


class JsonlSource(EpochNode[Any, JsonlState]):
    """Yields this rank's records of JSON Lines files, file after file, in each epoch.

    Rank r takes every `world_size`-th record, from the r-th on, over all files together: the shards
    differ by at most one record and share none. A record is a line with anything but white space.

    State: file and byte offset, whatever the position: restoring seeks there. Memory: one line.
    A file whose name ends in `.gz` is decompressed while it is read; its offsets are those of the
    text, and restoring decompresses up to there.

    Args:
        paths: a file, a folder, or a pattern such as `"data/*.jsonl"`; or several in their order. A
            folder stands for its files that end in `.jsonl` or `.jsonl.gz`; these and those of a
            pattern are sorted by name. UTF-8.
        rank: this rank; by default that of torch.distributed, or of `RANK`.
        world_size: number of ranks; by default that of torch.distributed, or of `WORLD_SIZE`.
        count_records: whether to count the records at once, which reads all files. Otherwise their
            number, and so `num_samples` of a loader, is known when an epoch has ended; and ranks
            share out less at the end of an epoch, since they do not know what is left before.

    Raises:
        FileNotFoundError: a file does not exist, also where a link in a folder leads to it; or a
            folder or pattern has none.
        ValueError: there is no path; or all files are empty, unless this is one of several ranks
            that each have files of their own (`rank=0, world_size=1`).
    """

    STATE = JsonlState
    retries_errors = True  # the file may be mended meanwhile

    def __init__(
        self,
        paths: Paths,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        count_records: bool = False,
    ) -> None:
        super().__init__()
        given = [paths] if isinstance(paths, (str, bytes, os.PathLike)) else paths
        is_list = isinstance(given, Sequence)
        if not is_list or not all(isinstance(one, (str, os.PathLike)) for one in given):
            raise TypeError(
                "`paths` must be a path, a string or `pathlib.Path`, or a list of them, but is "
                f"{paths!r:.200} instead."
            )
        found = [files_of(path) for path in given]
        self._paths = [file for files in found for file in files]
        if not self._paths:
            raise ValueError("`paths` must name at least 1 file, but is empty.")
        check_files(self._paths, expanded=any(len(files) > 1 for files in found))
        self._sizes = [path.stat().st_size for path in self._paths]
        self._rank, self._world_size = resolve_rank(rank, world_size)
        if not any(self._sizes) and not has_data_elsewhere(self._world_size):
            raise ValueError(f"`paths` must hold a record, but {self._paths[0]} is empty.")
        self._open: IO[bytes] | None = None
        self._mended: set[int] = set()  # files whose size may be another since
        self._at, self._share = JsonlState(), Share(self._rank, self._world_size)
        self._last = 0, 0  # file and offset of the last record
        self._records: int | None = None  # of all files, once they are counted
        self.learns_length = not check_bool("count_records", count_records)
        """Whether the length is known once an epoch has ended: not to a process that resumes."""
        if count_records:
            self._records = sum(map(count_records_of, self._paths))

    def copy(self, rank: int | None = None, world_size: int | None = None) -> JsonlSource:
        """Return a source over the same files, at their beginning, that shares no position.

        Args:
            rank: whose records it yields; default: those of the same rank.
            world_size: number of ranks; give both or none.
        """
        source = copy.copy(self)  # and not made anew: a subclass may take other arguments
        EpochNode.__init__(source)
        source._open, source._mended = None, set()
        if rank is not None and world_size is not None:
            source._rank, source._world_size = rank, world_size
            source._share = Share(rank, world_size)
        source.begin_epoch()
        return source

    def __len__(self) -> int:
        """Return the number of this rank's records in the epoch.

        Raises:
            TypeError: they are not counted yet.
        """
        return self._share.count(self.num_records)

    @property
    def num_records(self) -> int:
        """Number of records of all ranks.

        Raises:
            TypeError: they are not counted yet.
        """
        if self._records is None:
            raise TypeError(
                f"`{type(self).__name__}` knows its number of records only when an epoch has "
                "ended. Pass `count_records=True` to count them before."
            )
        return self._records

    def begin_epoch(self) -> None:
        """Stand at the first record of the first file."""
        self.close()
        self._at, self._share = JsonlState(), Share(self._rank, self._world_size)

    def restore(self, state: JsonlState) -> None:
        """Go to a byte of a file.

        Raises:
            StateError: it lies beyond the end.
        """
        self.close()
        files = len(self._paths)
        ends = [
            _UNKNOWN if is_compressed(path) else size
            for path, size in zip(self._paths, self._sizes, strict=True)
        ]
        if state.file > files or state.offset > [*ends, 0][state.file]:
            where = self._paths[state.file] if state.file < files else f"file {state.file}"
            raise StateError(
                f"the state of {type(self).__name__} stands at byte {state.offset} of {where}, but "
                f"its {files} files have {self._sizes} bytes. Resume over the files that it was "
                "saved on."
            )
        self._at, self._share = state, Share(self._rank, self._world_size, state)
        if state.offset:
            self._check_line_begins()

    def save(self) -> JsonlState:
        """Return file and byte offset."""
        return replace(self._at)

    def next(self) -> Any:
        """Return the next record of this rank.

        Raises:
            SampleError: it is not valid JSON, or the file ends before it, though it was longer when
                this source was made; names file and line. The state stays before it, and it is
                raised again until the file is mended.
        """
        at = self._at
        while at.file < len(self._paths):
            line = self._read_line()
            self._check_not_cut(line)
            if not line:
                self.close()
                at.file, at.offset, at.line = at.file + 1, 0, 0
                continue
            mine = not line.isspace() and at.record in self._share
            record = self._parse(line) if mine else None
            self._last = at.file, at.offset
            at.offset += len(line)
            at.line += 1
            at.record += not line.isspace()
            if mine:
                return record
        self._records = at.record
        raise StopIteration

    def item_key(self) -> ItemKey | None:
        """Return file and byte offset of the last record; nothing beyond 1 TiB of a file."""
        file, offset = self._last
        if offset >= 1 << _OFFSET_BITS:
            return None
        key = (file << _OFFSET_BITS) + offset
        return ItemKey("", key, self._world_size, self._epochs.cycle)

    @property
    def recalls(self) -> bool:
        """Whether records can be read again by file and offset: not of compressed files."""
        plain = not any(map(is_compressed, self._paths))
        return plain and max(self._sizes) < 1 << _OFFSET_BITS

    def read(self, key: int) -> Any:
        """Return the record of a key, and stay where this source stands.

        Raises:
            StateError: there is none.
        """
        file, offset = key >> _OFFSET_BITS, key % (1 << _OFFSET_BITS)
        try:
            with open(self._paths[file], "rb") as lines:
                lines.seek(offset)
                return json.loads(lines.readline().decode("utf-8-sig"))
        except (IndexError, OSError, ValueError, RecursionError) as error:
            path = self._paths[file] if file < len(self._paths) else f"file {file}"
            raise StateError(
                f"there is no record at byte {offset} of {path}: {error}. Resume over the files "
                "that the state was saved on."
            ) from error

    def item_location(self) -> ItemLocation:
        """Return file and line of the last record."""
        return "line %d of %s", self._at.line, self._paths[min(self._at.file, len(self._paths) - 1)]

    def close(self) -> None:
        """Close the file that is open. The next record opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _check_line_begins(self) -> None:
        """Raise a `StateError` unless a line begins at the position, or the file ends there."""
        path, offset = self._paths[self._at.file], self._at.offset
        with open_lines(path) as file:
            file.seek(offset - 1)
            last, following = file.read(1), file.read(1)
            if last != b"\n" and (following or not last):
                raise StateError(
                    f"the state of {type(self).__name__} stands at byte {offset} of {path}, where "
                    "no line begins. Resume over the files that it was saved on."
                )

    def _check_not_cut(self, line: bytes) -> None:
        """Raise a `SampleError` where a file ends, with `line`, before the size that it had."""
        at, end = self._at, self._at.offset + len(line)
        is_whole = line.endswith(b"\n") or end >= self._sizes[at.file] or at.file in self._mended
        if is_whole or is_compressed(self._paths[at.file]):  # which says itself where it is cut
            return
        self.close()
        raise SampleError(
            f"{self._paths[at.file]} ends at byte {end}, in line {at.line + 1}, but had "
            f"{self._sizes[at.file]} bytes when the source was made: it was cut or replaced, and "
            "the rest of it would be left out. Put it back, then iterate again; or make a new "
            "source, and begin an epoch."
        )

    def _read_line(self) -> bytes:
        """Return the next line of the present file; nothing at its end."""
        path = self._paths[self._at.file]
        try:
            if self._open is None:
                self._open = open_lines(path)
                self._open.seek(self._at.offset)
            return self._open.readline()
        except CUT as error:
            self.close()
            raise SampleError(
                f"{path}, line {self._at.line + 1}, cannot be decompressed: {error}. The file is "
                "cut or damaged: put it back whole, then iterate again."
            ) from error
        except MemoryError as error:
            self.close()
            raise SampleError(
                f"{path}, line {self._at.line + 1}, is too long for the memory. A record must be "
                "on a line of its own: is this JSON Lines?"
            ) from error

    def _parse(self, line: bytes) -> Any:
        try:
            return json.loads(line.decode("utf-8-sig"))  # of bytes, it would guess the encoding
        except (ValueError, RecursionError) as error:
            self.close()  # It may be mended before the next call.
            self._mended.add(self._at.file)
            what = f"{error}"
            if isinstance(error, json.JSONDecodeError):  # whose own line number is within the line
                what = f"{error.msg} at character {error.pos + 1}"
            shown = line[:80].decode(errors="replace").strip()
            where = f"{self._paths[self._at.file]}, line {self._at.line + 1}"
            raise SampleError(
                f"{where}, is not valid JSON in UTF-8: {what}. It begins with "
                f"{shown!r}. Mend it, then iterate again; or resume, with "
                "`strict=False` if the size of the file has changed."
            ) from error

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only where it is equal."""
        return {
            "files": [path.name for path in self._paths],
            "sizes_bytes": list(self._sizes),
            "rank": self._rank,
            "world_size": self._world_size,
            # The last groups of an epoch depend on it.
            **({} if self.learns_length else {"count_records": True}),
        }
