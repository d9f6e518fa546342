"""Write down what became of every sample, step by step."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from odb_nodes._core.checks import check_bool, check_type
from odb_nodes._core.files import LockedFile
from odb_nodes._core.processes import Owner, resolve_rank
from odb_nodes.ledger.records import (
    MAGIC,
    VERSION,
    Encoder,
    Header,
    last_record,
    preamble,
)
from odb_nodes.step_info import StepInfo

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_LOST = "steps that are not recorded are a gap, for which no `audit` is ok"


class Ledger:
    """Records each step of this rank, with the keys of its samples, in a file.

        ledger = Ledger("run/ledger")
        for batch in loader:
            info = pop_step_info(batch)
            ...  # train
            ledger.record(info)  # before a checkpoint is saved
        ledger.close()  # the run has ended
        print(audit("run/ledger"))

    All ranks, and all restarts of a run, write into one folder; a new run needs a new folder. The
    first step that is recorded begins an attempt: earlier attempts' records of this step and later
    ones no longer count. A killed process loses nothing that was recorded. A full disk or a deleted
    file warns once and leaves a gap that `audit` reports. A forked child records nothing.

    Close the ledger at the end of the run: that records the end. Without it, an `audit` cannot tell
    a run that continues, or was killed, from one whose last records are missing.

    Args:
        folder: where the files are; made if need be.
        rank, world_size: this rank and the number of ranks, among the ranks that share the data.
            Default: from torch.distributed, or the environment. Of ranks that train on the same
            samples (parts of one model), one records.

    Raises:
        TypeError, ValueError: an argument is not valid; `folder` is a file, say, or its ledger is
            of another version of this library.
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
        if os.path.isfile(folder):
            raise ValueError(f"`folder` must be a folder, but `{folder}` is a file.")
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
        self._first_lost: StepInfo | None = None
        self._is_closed = False
        self._owner = Owner()
        try:
            self._file.open()
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            self._file.warn(error, _LOST)
        if self._file.is_open:
            with self.path.open("rb") as file:
                start = file.read(len(MAGIC))
            if not MAGIC.startswith(start):
                raise ValueError(
                    f"`{self.path}` is no ledger of version {VERSION}, but of another version of "
                    "this library. Give the run a folder of its own."
                )

    def record(self, info: StepInfo) -> None:
        """Record a step that is done.

        Call it after the step was trained on, and before the next checkpoint is saved.

        Args:
            info: the `StepInfo` of the step.

        Raises:
            TypeError: `info` is no `StepInfo`.
            ValueError: the ledger is closed; or a repeat of a sample is 2**32 or more.
        """
        check_type("info", info, StepInfo, "Pass `pop_step_info(batch)`.")
        if self._is_closed:
            raise ValueError("the ledger is closed: it records nothing. Make a new one.")
        if not self._owner.is_here:
            return
        # Until the bytes are written, an interrupt leaves the file in doubt: begin an attempt then.
        encoder, self._encoder = self._encoder, None
        start = b""
        try:
            if encoder is None:
                start, encoder = self._begin(info)
            self._file.write(start + encoder.step(info))
        except (OSError, RuntimeError) as error:
            self._first_lost = self._first_lost or info
            self._lost += 1
            self._file.warn(error, _LOST)
            return
        self._encoder, self._lost, self._first_lost = encoder, 0, None

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

    def close(self, *, ended: bool = True) -> None:
        """Record that the run ends here, and close the file. Idempotent.

        `with` calls it at the end of its block; if the block raises, the run has not `ended`.

        Args:
            ended: whether the run ended by itself. If not, no end is recorded, as after a kill: the
                other ranks may then be some steps behind or ahead.
        """
        check_bool("ended", ended)
        if not self._is_closed and self._owner.is_here:
            self._is_closed = True
            try:
                if self._first_lost is not None:
                    start, self._encoder = self._begin(None)
                    self._file.write(start)
                if ended and self._encoder is not None:
                    self._file.check_exists()
                    self._file.replace(0, preamble(self._file.size()))
            except (OSError, RuntimeError) as error:
                self._file.warn(error, _LOST)
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(ended=not any(error))

    def _begin(self, info: StepInfo | None) -> tuple[bytes, Encoder]:
        """Return the header of an attempt, from the first lost step on; cut off what is torn."""
        lost, first = 0, self._first_lost
        if info is None or (first is not None and _place(first) < _place(info)):
            assert first is not None
            info, lost = first, self._lost
        self._file.open()
        self._file.check_exists()
        size = self._file.size()
        whole, number = last_record(self.path)
        if whole < size:
            self._file.cut(whole)
        if whole:
            self._file.replace(0, preamble())
        header = Header(
            version=VERSION,
            rank=self._rank,
            world_size=self._world_size,
            batches=info.batches_per_step,
            epoch=info.epoch,
            step=info.step,
            time_s=time.time(),
            lost=lost,
            cut_bytes=size - whole,
        )
        encoder = Encoder(number, is_shared=self._world_size * info.batches_per_step > 1)
        return (b"" if whole else preamble()) + encoder.header(header), encoder


def _place(info: StepInfo) -> tuple[int, int]:
    return info.epoch, info.step
