"""Source node: the records of JSON Lines files."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from odb_nodes._core.ranks import has_data_elsewhere, resolve_rank
from odb_nodes.contract import Count, EpochNode, EpochState
from odb_nodes.contract.item_location import ItemLocation
from odb_nodes.errors import SampleError, StateError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(kw_only=True)
class JsonlState(EpochState):
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

    Args:
        paths: a file, or several in their order. UTF-8.
        rank: this rank; by default that of torch.distributed, or of `RANK`.
        world_size: number of ranks; by default that of torch.distributed, or of `WORLD_SIZE`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: there is no file; one is a folder; or all are empty, unless this is one of
            several ranks that each have files of their own (`rank=0, world_size=1`).
    """

    STATE = JsonlState
    retries_errors = True  # the file may be mended meanwhile

    def __init__(
        self, paths: Paths, rank: int | None = None, world_size: int | None = None
    ) -> None:
        super().__init__()
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self._paths = [Path(path) for path in given]
        if not self._paths:
            raise ValueError("`paths` must name at least 1 file, but is empty.")
        if folders := [path for path in self._paths if path.is_dir()]:
            raise ValueError(
                f"`paths` must be files, but {folders[0]} is a folder. Pass its files, as in "
                '`sorted(folder.glob("*.jsonl"))`.'
            )
        self._sizes = [path.stat().st_size for path in self._paths]
        self._rank, self._world_size = resolve_rank(rank, world_size)
        if not any(self._sizes) and not has_data_elsewhere(self._world_size):
            raise ValueError(f"`paths` must hold a record, but {self._paths[0]} is empty.")
        self._open: BinaryIO | None = None
        self._mended: set[int] = set()  # files whose size may be another since
        self._at = JsonlState()

    def copy(self) -> JsonlSource:
        """Return a source over the same files, at their beginning, that shares no position."""
        source = copy.copy(self)  # and not made anew: a subclass may take other arguments
        EpochNode.__init__(source)
        source._open, source._at, source._mended = None, JsonlState(), set()
        return source

    def begin_epoch(self) -> None:
        """Stand at the first record of the first file."""
        self.close()
        self._at = JsonlState()

    def restore(self, state: JsonlState) -> None:
        """Go to a byte of a file.

        Raises:
            StateError: it lies beyond the end.
        """
        self.close()
        files, sizes = len(self._paths), [*self._sizes, 0]
        if state.file > files or state.offset > sizes[state.file]:
            where = self._paths[state.file] if state.file < files else f"file {state.file}"
            raise StateError(
                f"the state of {type(self).__name__} stands at byte {state.offset} of {where}, but "
                f"its {files} files have {self._sizes} bytes. Resume over the files that it was "
                "saved on."
            )
        self._at = state
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
            line = self._lines().readline()
            self._check_not_cut(line)
            if not line:
                self.close()
                at.file, at.offset, at.line = at.file + 1, 0, 0
                continue
            mine = not line.isspace() and at.record % self._world_size == self._rank
            record = self._parse(line) if mine else None
            at.offset += len(line)
            at.line += 1
            at.record += not line.isspace()
            if mine:
                return record
        raise StopIteration

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
        with open(path, "rb") as file:
            file.seek(offset - 1)
            if file.read(1) != b"\n" and offset < self._sizes[self._at.file]:
                raise StateError(
                    f"the state of {type(self).__name__} stands at byte {offset} of {path}, where "
                    "no line begins. Resume over the files that it was saved on."
                )

    def _check_not_cut(self, line: bytes) -> None:
        """Raise a `SampleError` where a file ends, with `line`, before the size that it had."""
        at, end = self._at, self._at.offset + len(line)
        if line.endswith(b"\n") or end >= self._sizes[at.file] or at.file in self._mended:
            return
        self.close()
        raise SampleError(
            f"{self._paths[at.file]} ends at byte {end}, in line {at.line + 1}, but had "
            f"{self._sizes[at.file]} bytes when the source was made: it was cut or replaced, and "
            "the rest of it would be left out. Put it back, then iterate again; or make a new "
            "source, and begin an epoch."
        )

    def _lines(self) -> BinaryIO:
        if self._open is None:
            self._open = open(self._paths[self._at.file], "rb")
            self._open.seek(self._at.offset)
        return self._open

    def _parse(self, line: bytes) -> Any:
        try:
            return json.loads(line)
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
        }
