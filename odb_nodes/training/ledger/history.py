"""Find the steps that count in the files of a ledger: those that no later attempt replaces.

An attempt replaces the records of earlier attempts from its first step on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.files import check_folder, folder_with
from odb_nodes._support.text import counted
from odb_nodes.core.sample import LeftOut
from odb_nodes.core.step_info import StepInfo
from odb_nodes.errors import StateError
from odb_nodes.training.ledger.rank_file import STEP_DTYPE, RankFile, Steps
from odb_nodes.training.ledger.records import (
    ENDS_EPOCH,
    FILLER,
    NO_KEY,
    ROW_BYTES,
    SAMPLE_ROW,
    Name,
)

_NEVER = 1 << 62
_STEP_BITS = (1 << 32) - 1
_UNKNOWN = Name("a source whose name is damaged", "", False)


def read_steps(
    folder: str | os.PathLike[str], epoch: int, steps: Sequence[int]
) -> dict[int, list[StepInfo]]:
    """Return step -> the `StepInfo` of each rank, for the steps that all ranks have recorded."""
    run = RecordedRun(folder)
    if problems := run.damage():
        raise StateError(
            f"the ledger in `{folder}` is damaged, so its steps cannot be used: {problems[0]} See "
            "its audit."
        )
    infos: dict[int, list[StepInfo]] = {}
    for segment in run.segments:
        for step in steps if segment.epoch == epoch else ():
            records = segment.steps[segment.steps["step"] == step]
            if records["rank"].tolist() == [*range(segment.world_size)]:
                infos[step] = [_info_of(run, record) for record in np.split(records, len(records))]
    return infos


def _info_of(run: RecordedRun, step: Steps) -> StepInfo:
    samples = run.samples(step)
    names = [run.names[number] for number in samples.names]
    keys = [None if key == NO_KEY else key for key in samples.keys.tolist()]
    rows = sum(not name.reason for name in names)
    flags = int(step["flags"][0])
    left_out = zip(keys[rows:], names[rows:], strict=True)
    return StepInfo(
        epoch=int(step["epoch"][0]),
        step=int(step["step"][0]),
        local_samples=rows,
        keys=tuple(keys[:rows]),
        row_sources=tuple(name.source for name in names[:rows]),
        row_repeats=tuple(samples.repeats[:rows].tolist()),
        per_rank_sources=frozenset(run.per_rank_sources),
        left_out=tuple(LeftOut(key, name.source, name.reason) for key, name in left_out),
        is_filler=bool(flags & FILLER),
        ends_epoch=bool(flags & ENDS_EPOCH),
        local_targets=0,
        all_samples_this_step=0,
        all_targets=0,
        optimizer_samples=0,
        optimizer_targets=0,
    )


@dataclass(kw_only=True)
class Attempt:
    """An attempt of one rank. A process with several virtual ranks has one for each of them."""

    rank: int
    world_size: int
    start: int  # `position` of the first step
    time_s: float
    lost: int  # steps from `start` on that could not be written
    is_after_gap: bool  # it begins where the process could write again, not at a checkpoint
    path: Path
    has_ended: bool  # the run has ended with this attempt
    has_steps: bool
    names: npt.NDArray[np.int32]  # number of a name -> index into `Run.names`; last: unknown name
    job: int = 0  # consecutive attempts with the same number of ranks are one job
    job_limit: int = _NEVER  # `position` from which later jobs have replaced the steps
    limit: int = _NEVER  # `position` from which later attempts or jobs have replaced the steps


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps of one job in one epoch that count, sorted by step, then by rank."""

    epoch: int
    world_size: int
    first: int  # first step
    stop: int | None  # step at which a later job takes over
    starts: list[int]  # steps of this epoch at which attempts begin, from a checkpoint
    steps: Steps

    @cached_property
    def lasts(self) -> dict[int, int]:
        """Rank -> its last recorded step."""
        return dict(zip(self.steps["rank"].tolist(), self.steps["step"].tolist(), strict=True))

    @cached_property
    def ending(self) -> set[int]:
        """The ranks whose last step ends the epoch."""
        ends = self.steps[self.steps["flags"] & ENDS_EPOCH > 0]
        places = zip(ends["rank"].tolist(), ends["step"].tolist(), strict=True)
        return {rank for rank, step in places if step == self.lasts[rank]}


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a number of steps, as columns."""

    keys: IntArray  # `NO_KEY` for a sample without a key
    repeats: npt.NDArray[np.uint32]
    names: npt.NDArray[np.int32]  # indices into `Run.names`
    stops: IntArray  # number of samples up to the end of each step


class RecordedRun:
    """All files of a ledger, and the steps in them that count."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder_with("rank-*.ledger", folder)
        self.files = _read_files(self.folder)
        all_names = [name for file in self.files for names in file.names for name in names.values()]
        self.per_rank_sources = {name.source for name in all_names if name.is_per_rank}
        self.attempts: list[Attempt] = []  # the attempts of all ranks
        numbers = {_UNKNOWN: 0}  # name -> index into `names`
        parts = [np.empty(0, STEP_DTYPE)]
        for file in self.files:
            for index in range(len(file.headers)):
                parts.append(self._read_attempt(file, index, numbers))
        self.names = [*numbers]
        self.steps = np.concatenate(parts)
        ranks = {file.rank for file in self.files if not file.headers}
        ranks.update(attempt.rank for attempt in self.attempts)
        self.by_rank = {rank: self._attempts_of(rank) for rank in sorted(ranks)}
        self._jobs = self._set_limits()
        fields = [(attempt.limit, attempt.job_limit, attempt.job) for attempt in self.attempts]
        of_steps = np.array(fields, np.int64).reshape(-1, 3)[self.steps["attempt"]]
        limits, job_limits, jobs = of_steps.T
        positions = position(self.steps["epoch"], self.steps["step"])
        # Steps that a later attempt of the same job has done again.
        self.replaced = self.steps[(limits <= positions) & (positions < job_limits)]
        self.segments = self._segments(self.steps[positions < limits], jobs[positions < limits])

    def _read_attempt(self, file: RankFile, index: int, numbers: dict[Name, int]) -> Steps:
        """Add the attempt of each virtual rank of a process, and return their steps."""
        header, names = file.headers[index], file.names[index]
        indices = np.zeros(max(names, default=-1) + 2, np.int32)
        for number, name in names.items():
            indices[number] = numbers.setdefault(name._replace(is_per_rank=False), len(numbers))
        steps: Steps = file.steps[file.steps["attempt"] == index]
        ranks_per_process = header.virtual_ranks
        steps["step"], turns = np.divmod(steps["step"], ranks_per_process)
        steps["rank"] = file.rank * ranks_per_process + turns
        steps["attempt"] = len(self.attempts) + turns
        # Only the last virtual rank of a step records the end of the epoch.
        if ranks_per_process > 1:
            positions = position(steps["epoch"], steps["step"])
            is_last = np.isin(positions, positions[steps["flags"] & ENDS_EPOCH > 0])
            steps["flags"] |= (ENDS_EPOCH * is_last).astype(np.uint8)
        lost = range(header.step, header.step + header.lost)
        for turn in range(ranks_per_process):
            attempt = Attempt(
                rank=file.rank * ranks_per_process + turn,
                world_size=header.world_size * ranks_per_process,
                start=int(position(header.epoch, -(-(header.step - turn) // ranks_per_process))),
                time_s=header.time_s,
                lost=sum(number % ranks_per_process == turn for number in lost),
                is_after_gap=bool(lost),
                path=file.path,
                has_ended=file.has_ended and index == len(file.headers) - 1,
                has_steps=bool((turns == turn).any()),
                names=indices,
            )
            self.attempts.append(attempt)
        return steps

    def _attempts_of(self, rank: int) -> list[Attempt]:
        attempts = [attempt for attempt in self.attempts if attempt.rank == rank]
        if len({attempt.path for attempt in attempts}) > 1:  # else the order of the file is right
            attempts.sort(key=lambda attempt: attempt.time_s)
        return attempts

    def _set_limits(self) -> list[list[Attempt]]:
        """Set the limits of each attempt, and return the attempts of each job."""
        jobs: list[list[Attempt]] = []
        for attempt in sorted(self.attempts, key=lambda attempt: attempt.time_s):
            if not jobs or jobs[-1][0].world_size != attempt.world_size:
                jobs.append([])
            attempt.job = len(jobs) - 1
            jobs[-1].append(attempt)
        limit = _NEVER
        for job in reversed(jobs):
            for attempt in job:
                attempt.job_limit = limit
            limit = min([limit, *(attempt.start for attempt in job)])
        for attempts in self.by_rank.values():
            limits: dict[int, int] = {}  # job -> limit of its earlier attempts
            for attempt in reversed(attempts):
                attempt.limit = min(attempt.job_limit, limits.get(attempt.job, _NEVER))
                limits[attempt.job] = min(attempt.limit, attempt.start)
        return jobs

    def _segments(self, steps: Steps, jobs: IntArray) -> list[Segment]:
        order = np.lexsort((steps["rank"], steps["step"], jobs, steps["epoch"]))
        steps, jobs = steps[order], jobs[order]
        cuts = np.flatnonzero((np.diff(steps["epoch"]) != 0) | (np.diff(jobs) != 0)) + 1
        segments = []
        for part in np.split(steps, cuts) if len(steps) else ():
            epoch = int(part["epoch"][0])
            attempts = [self.attempts[index] for index in np.unique(part["attempt"]).tolist()]
            job_start = min(attempt.start for attempt in self._jobs[attempts[0].job])
            first_epoch, first_step = _epoch_and_step(job_start)
            stop_epoch, stop_step = _epoch_and_step(attempts[0].job_limit)
            starts = [
                _epoch_and_step(attempt.start) for attempt in attempts if not attempt.is_after_gap
            ]
            segment = Segment(
                epoch=epoch,
                world_size=attempts[0].world_size,
                first=first_step if first_epoch == epoch else 0,
                stop=stop_step if stop_epoch == epoch else None,
                starts=[step for start_epoch, step in starts if start_epoch == epoch],
                steps=part,
            )
            segments.append(segment)
        return sorted(segments, key=lambda segment: (segment.epoch, segment.first))

    def starts(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return for each rank the epoch and step at which its attempts begin."""
        return {
            rank: tuple(
                _epoch_and_step(attempt.start)
                for attempt in attempts
                if attempt.has_steps or not attempt.lost  # else its header only records the loss
            )
            for rank, attempts in self.by_rank.items()
        }

    def notes(self) -> list[str]:
        """Return the notes on the files, and on attempts that replace all records before them."""
        notes = [text for file in self.files for text in file.notes]
        notes += [
            f"rank {file.rank}: nothing is recorded." for file in self.files if not file.headers
        ]
        for rank, attempts in self.by_rank.items():
            for index in range(1, len(attempts)):
                start = attempts[index].start
                if start <= min(attempt.start for attempt in attempts[:index]):
                    notes.append(
                        f"rank {rank}: attempt {index + 1} begins at {_place_name(start)}, so that "
                        "nothing counts that was recorded before. If it is another run, give each "
                        "run its own folder."
                    )
        return notes

    def damage(self) -> list[str]:
        """Return the problems of the files, and the lost steps that were not done again."""
        problems = [text for file in self.files for text in file.problems]
        return problems + [
            f"rank {attempt.rank}: {counted(attempt.lost, 'step')} from "
            f"{_place_name(attempt.start)} on could not be written: the disk was full, or the file "
            "was deleted."
            for attempts in self.by_rank.values()
            for attempt in attempts
            if attempt.lost and attempt.limit > attempt.start
        ]

    def open_ranks(self) -> list[int]:
        """Return the ranks of the last job that have no recorded end; without a job, all ranks."""
        if not self._jobs:
            return [*self.by_rank]
        job = len(self._jobs) - 1
        last = {
            attempt.rank: attempt
            for attempts in self.by_rank.values()
            for attempt in attempts
            if attempt.job == job
        }
        ranks = range(self._jobs[-1][0].world_size)
        return [rank for rank in ranks if rank not in last or not last[rank].has_ended]

    def samples(self, steps: Steps) -> Samples:
        """Read the samples of steps, in their order."""
        stops = np.cumsum(steps["samples"], dtype=np.int64)
        size = int(stops[-1]) if len(stops) else 0
        keys = np.empty(size, np.int64)
        repeats = np.empty(size, np.uint32)
        names = np.empty(size, np.int32)
        for number in np.unique(steps["attempt"]).tolist():
            attempt = self.attempts[number]
            indices = np.flatnonzero(steps["attempt"] == number)
            firsts = steps["first_row"][indices]
            counts = steps["samples"][indices].astype(int)
            start = int(firsts.min())
            stop = int((firsts + counts).max())
            rows = np.fromfile(attempt.path, SAMPLE_ROW, stop - start, offset=start * ROW_BYTES)
            rows = rows[_indices_of(firsts - start, counts)]
            places = _indices_of(stops[indices] - counts, counts)
            keys[places], repeats[places] = rows["key"], rows["repeat"]
            names[places] = attempt.names[np.minimum(rows["name"], len(attempt.names) - 1)]
        return Samples(keys=keys, repeats=repeats, names=names, stops=stops)


def _read_files(folder: Path) -> list[RankFile]:
    """Return the files of a ledger, in the order of the ranks."""
    check_folder(folder)
    paths = sorted(folder.glob("rank-*.ledger"))
    if not paths:
        missing = "no file `rank-00000.ledger`" if os.path.isdir(folder) else "no such folder"
        raise FileNotFoundError(
            f"`{folder}` has no ledger: there is {missing}. Give the folder of a `Ledger`."
        )
    return [RankFile(path) for path in paths]


def _indices_of(firsts: IntArray, counts: IntArray) -> IntArray:
    """Return the integers of ranges, each given by its first integer and its length."""
    return np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def position(epoch: npt.ArrayLike, step: npt.ArrayLike) -> IntArray:
    """Return epoch and step as one integer that grows with both."""
    return (np.asarray(epoch, np.int64) << 32) + np.asarray(step, np.int64)


def _epoch_and_step(place: int) -> tuple[int, int]:
    return place >> 32, place & _STEP_BITS


def _place_name(place: int) -> str:
    epoch, step = _epoch_and_step(place)
    return f"epoch {epoch} step {step}"
