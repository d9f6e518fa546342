"""Write the fate of every sample to a file, step by step."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from odb_nodes._support.checks import check_bool, check_type
from odb_nodes._support.files import LockedFile, check_folder
from odb_nodes._support.processes import Owner, resolve_rank
from odb_nodes.core.step_info import StepInfo
from odb_nodes.training.ledger.records import MAGIC, VERSION, Encoder, Header, last_record, preamble

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_LOST = "the missing steps are a gap, which `audit` reports as a problem"


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
    first recorded step begins an attempt: earlier attempts' records of this step and later ones no
    longer count. A kill loses no recorded step. A full disk or a deleted file warns once and leaves
    a gap that `audit` reports. A forked child records nothing.

    Close the ledger at the end of the run: that records the end. Without it, an `audit` cannot tell
    a run that continues, or was killed, from a run that lost its last records.

    Args:
        folder: the folder of the files; created if needed.
        rank, world_size: this rank and the number of ranks, among the ranks that share the data.
            Default: from torch.distributed, or the environment. If several ranks train on the same
            samples (parts of one model), only one of them records.

    Raises:
        TypeError, ValueError: an argument is not valid; `folder` is a file, or another version of
            this library wrote its ledger.
        OSError: the folder or the file cannot be created; a full disk only warns.
        RuntimeError: another process, or another ledger of this process, writes the same file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_folder(folder)
        self._rank, self._world_size = resolve_rank(rank, world_size)
        self.path = Path(folder) / f"rank-{self._rank:05d}.ledger"
        """The file of this rank."""
        self._file = LockedFile(
            self.path,
            "Give each run its own folder. Within a run, give each process its own rank (this one "
            f"is rank {self._rank} of {self._world_size}), and `close()` a ledger before you make "
            "another.",
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
                    "this library. Give the run its own folder."
                )

    def record(self, info: StepInfo) -> None:
        """Record a step. Call it after training on the step, before saving the next checkpoint.

        Args:
            info: the `StepInfo` of the step.

        Raises:
            TypeError: `info` is not a `StepInfo`.
            ValueError: the ledger is closed; or the repeat of a sample is 2**32 or more.
        """
        check_type("info", info, StepInfo, "Pass `pop_step_info(batch)`.")
        if self._is_closed:
            raise ValueError("the ledger is closed: it records nothing. Make a new `Ledger`.")
        if not self._owner.is_here:
            return
        # An interrupt in here may leave a torn record: then the next step begins an attempt.
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
        self._encoder = encoder
        self._lost, self._first_lost = 0, None

    def begin_attempt(self) -> None:
        """Begin an attempt with the next step: call it when this process returns to a checkpoint.

        Earlier records of that step and of later steps then no longer count.
        """
        self._encoder = None

    def sync(self) -> None:
        """Wait until all records are on the disk, where they survive a loss of power."""
        if self._file.is_open:
            try:
                self._file.sync()
            except OSError as error:
                self._file.warn(error, _LOST)

    def close(self, *, ended: bool = True) -> None:
        """Record the end of the run, and close the file. Idempotent.

        `with` calls it at the end of its block, with `ended=False` if the block raises.

        Args:
            ended: whether the run is over. False records no end, as after a kill: other ranks may
                then be some steps behind or ahead.
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
        """Cut off a torn record; return the header of an attempt from the first lost step on."""
        lost, first = 0, self._first_lost
        if info is None or (
            first is not None and (first.epoch, first.step) < (info.epoch, info.step)
        ):
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
            rank=self._rank,
            world_size=self._world_size,
            virtual_ranks=info.batches_per_step,
            epoch=info.epoch,
            step=info.step,
            time_s=time.time(),
            lost=lost,
            cut_bytes=size - whole,
        )
        encoder = Encoder(number, is_shared=self._world_size * info.batches_per_step > 1)
        return (b"" if whole else preamble()) + encoder.header(header), encoder
