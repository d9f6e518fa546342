"""Write down what became of every sample, step by step."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from odb_nodes._core.checks import check_type
from odb_nodes._core.forks import Owner
from odb_nodes._core.locked_file import LockedFile
from odb_nodes._core.ranks import resolve_rank
from odb_nodes.ledger.records import VERSION, Encoder, Header, pack_header
from odb_nodes.step_info import StepInfo

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_LOST = "steps that are not recorded are a gap that `audit` reports"


class Ledger:
    """A file of this rank in which each step that is done is recorded: its samples by key.

        ledger = Ledger("run/ledger")
        for batch in loader:
            info = pop_step_info(batch)
            ...  # train
            ledger.record(info)  # before a checkpoint is saved
        print(audit("run/ledger"))

    All ranks, and all restarts of a run, write into one folder; a run that begins anew needs a
    folder of its own. The first step that is recorded begins an attempt: what attempts before it
    recorded of that step, or of later ones, does not count. A killed process loses nothing that was
    recorded. A disk that is full warns once and leaves a gap that `audit` reports. A forked child
    records nothing.

    Args:
        folder: where the files are; made if need be.
        rank, world_size: this rank and the number of ranks, of those that share the data; default:
            those of torch.distributed, or of the environment. Of ranks that train on the same
            samples (parts of one model), one records.

    Raises:
        TypeError, ValueError: an argument is not valid.
        OSError: the folder or the file cannot be made, for another reason than a full disk.
        RuntimeError: another process, or another ledger of this one, writes the same file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_type("folder", folder, str | os.PathLike)
        self._rank, self._world_size = resolve_rank(rank, world_size)
        self.path = Path(folder) / f"rank-{self._rank:05d}.ledger"
        """The file of this rank."""
        self._file = LockedFile(
            self.path,
            "Give each run a folder of its own; within a run each process must have a rank of its "
            f"own (this one is rank {self._rank} of {self._world_size}), and `close()` its ledger "
            "before it makes another.",
        )
        self._encoder: Encoder | None = None  # None: the next record begins an attempt
        self._lost = 0
        self._is_closed = False
        self._owner = Owner()
        try:
            self._file.open()
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            self._file.warn(error, _LOST)

    def record(self, info: StepInfo) -> None:
        """Record a step that is done.

        Call it after the step was trained on, and before a checkpoint is saved that is to go on
        after it.

        Args:
            info: the `StepInfo` of the step.

        Raises:
            TypeError: `info` is no `StepInfo`.
            ValueError: the ledger is closed.
        """
        check_type("info", info, StepInfo, "Pass `pop_step_info(batch)`.")
        if self._is_closed:
            raise ValueError("the ledger is closed: it records nothing. Make a new one.")
        if not self._owner.is_here or not self._opened():
            return
        # Until the bytes are written, an interrupt leaves the chain in doubt: begin a new one then.
        encoder, self._encoder = self._encoder, None
        start = b""
        try:
            if encoder is None:
                start, crc = self._header(info)
                encoder = Encoder(crc, self._world_size)
            self._file.write(start + encoder.step(info))
        except OSError as error:
            self._lost += 1
            self._file.warn(error, _LOST)
            return
        self._encoder, self._lost = encoder, 0

    def begin_attempt(self) -> None:
        """Let the next step begin an attempt: call it where this process goes back to a checkpoint.

        What was recorded of that step, or of later ones, then does not count.
        """
        self._encoder = None

    def sync(self) -> None:
        """Wait until the disk has all that was recorded, for a loss of power after a checkpoint."""
        if self._file.is_open:
            try:
                self._file.sync()
            except OSError as error:
                self._file.warn(error, _LOST)

    def close(self) -> None:
        """Record that the attempt ends here, and close the file. Idempotent.

        `with` does so where its block ends; where that raises, it closes the file without a record,
        since the other ranks may then be some steps behind or ahead.
        """
        if self._file.is_open and self._encoder is not None:
            try:
                self._file.write(self._encoder.end())
            except OSError as error:
                self._file.warn(error, _LOST)
        self._file.close()
        self._is_closed = True

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self._encoder = None
        self.close()

    def _opened(self) -> bool:
        """Tell whether the file is there; try once more to make it, where the disk was full."""
        try:
            self._file.open()
        except (OSError, RuntimeError):
            self._lost += 1
        return self._file.is_open

    def _header(self, info: StepInfo) -> tuple[bytes, int]:
        header = Header(
            version=VERSION,
            rank=self._rank,
            world_size=self._world_size,
            lost=self._lost,
            offset=self._file.size(),
            time_s=time.time(),
            epoch=info.epoch,
            step=info.step,
        )
        return pack_header(header)
