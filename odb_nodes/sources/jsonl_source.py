"""Source node: the records of JSON Lines files."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from torchdata.nodes import BaseNode

from odb_nodes._core.ranks import has_data_elsewhere, resolve_rank
from odb_nodes.contract.epochs import EpochCounter
from odb_nodes.contract.item_location import ItemLocation
from odb_nodes.contract.state import seal, unseal
from odb_nodes.errors import SampleError, StateError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class JsonlSource(BaseNode[Any]):
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

    EPOCH_KEY = "epoch"
    STARTED_KEY = "started"
    FILE_KEY = "file"
    OFFSET_KEY = "offset"
    LINE_KEY = "line"
    RECORD_KEY = "record"
    CYCLE_KEY = "cycle"
    STATE_KEYS = (EPOCH_KEY, STARTED_KEY, FILE_KEY, OFFSET_KEY, LINE_KEY, RECORD_KEY, CYCLE_KEY)

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
        self._epochs = EpochCounter()
        self._open: BinaryIO | None = None
        self._begin()

    def copy(self) -> JsonlSource:
        """Return a source over the same files, at their beginning, that shares no position."""
        source = copy.copy(self)  # and not made anew: a subclass may take other arguments
        BaseNode.__init__(source)
        source._epochs, source._open = EpochCounter(), None
        source._begin()
        return source

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset without a state begins."""
        self._epochs.request(epoch)

    def begin_cycle(self) -> None:
        """Make the next reset without a state begin this epoch again."""
        self._epochs.request_cycle()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state was saved with other files, or files of other sizes, or as another
                rank.
        """
        super().reset(initial_state)
        self.close()
        if initial_state is None:
            self._epochs.advance()
            self._begin()
            return
        state = unseal(initial_state, type(self).__name__, self.fingerprint(), self.STATE_KEYS)
        self._epochs.restore(state[self.EPOCH_KEY], state[self.STARTED_KEY], state[self.CYCLE_KEY])
        self._file, self._offset = state[self.FILE_KEY], state[self.OFFSET_KEY]
        self._line, self._record = state[self.LINE_KEY], state[self.RECORD_KEY]
        if self._file < len(self._paths) and self._offset > self._sizes[self._file]:
            raise StateError(
                f"the state of {type(self).__name__} stands at byte {self._offset} of "
                f"{self._paths[self._file]}, which has {self._sizes[self._file]}. Resume over the "
                "files that it was saved on."
            )

    def next(self) -> Any:
        """Return the next record of this rank.

        Raises:
            SampleError: it is not valid JSON; names file and line. The state stays before it, and
                it is raised again until the file is mended.
        """
        self._epochs.started = True
        while self._file < len(self._paths):
            line = self._lines().readline()
            if not line:
                self.close()
                self._file, self._offset, self._line = self._file + 1, 0, 0
                continue
            mine = not line.isspace() and self._record % self._world_size == self._rank
            record = self._parse(line) if mine else None
            self._offset += len(line)
            self._line += 1
            self._record += not line.isspace()
            if mine:
                return record
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """Return epoch, file and byte offset."""
        return seal(
            type(self).__name__,
            self.fingerprint(),
            epoch=self._epochs.epoch,
            started=self._epochs.started,
            file=self._file,
            offset=self._offset,
            line=self._line,
            record=self._record,
            cycle=self._epochs.cycle,
        )

    def item_location(self) -> ItemLocation:
        """Return where the last record comes from, for errors."""
        return "line %d of %s", self._line, self._paths[min(self._file, len(self._paths) - 1)]

    def close(self) -> None:
        """Close the file that is open. The next record opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _begin(self) -> None:
        self._file = self._offset = self._line = self._record = 0

    def _lines(self) -> BinaryIO:
        if self._open is None:
            self._open = open(self._paths[self._file], "rb")
            self._open.seek(self._offset)
        return self._open

    def _parse(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            self.close()  # It may be mended before the next call.
            what = f"{error}"
            if isinstance(error, json.JSONDecodeError):  # whose own line number is within the line
                what = f"{error.msg} at character {error.pos + 1}"
            shown = line[:80].decode(errors="replace").strip()
            raise SampleError(
                f"{self._paths[self._file]}, line {self._line + 1}, is not valid JSON in UTF-8: "
                f"{what}. It begins with {shown!r}. Mend it, then iterate again; or resume, with "
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
