"""Which steps of a ledger count: an attempt replaces what earlier ones did from its start on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._core.text import counted
from odb_nodes.errors import StateError
from odb_nodes.ledger.reading import STEP_DTYPE, Ints, RankFile, Steps, place_of, rank_files
from odb_nodes.ledger.records import ENDS_EPOCH, FILLER, NO_KEY, ROW_BYTES, SAMPLE_ROW, Name
from odb_nodes.sample import LeftOut
from odb_nodes.step_info import StepInfo

_NEVER = 1 << 62
_STEP_BITS = (1 << 32) - 1
_UNKNOWN = Name("a source whose name is damaged", "", False)


def position(epoch: npt.ArrayLike, step: npt.ArrayLike) -> Ints:
    """Return epoch and step as one number that grows with both."""
    return (np.asarray(epoch, np.int64) << 32) + np.asarray(step, np.int64)


@dataclass(kw_only=True)
class Attempt:
    """One attempt of one rank; of a virtual rank, where processes hosted several."""

    rank: int
    world_size: int
    start: int  # `position` of its first step
    time_s: float
    lost: int  # steps that could not be written, from its start on
    path: Path
    has_ended: bool  # it is the last one of the file, and the run has ended
    has_steps: bool
    names: npt.NDArray[np.int32]  # indices into `Run.names`; the last is of an unknown one
    job: int = 0  # attempts of as many ranks, one after the other
    job_limit: int = _NEVER  # `position` from which later jobs have done its steps again
    limit: int = _NEVER  # that from which later attempts have


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps of an epoch that count of one job; sorted by step, then by rank."""

    epoch: int
    world_size: int
    first: int  # step at which it begins
    stop: int | None  # step at which a later job goes on
    begun: list[int]  # steps of this epoch at which attempts begin
    steps: Steps

    @cached_property
    def lasts(self) -> dict[int, int]:
        """The last step of each rank that has recorded any."""
        return dict(zip(self.steps["rank"].tolist(), self.steps["step"].tolist(), strict=True))

    @cached_property
    def ending(self) -> set[int]:
        """The ranks whose last step ends the epoch."""
        ends = self.steps[self.steps["flags"] & ENDS_EPOCH > 0]
        places = zip(ends["rank"].tolist(), ends["step"].tolist(), strict=True)
        return {rank for rank, step in places if step == self.lasts[rank]}


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of some steps, as columns."""

    keys: Ints  # `NO_KEY` where there is none
    repeats: npt.NDArray[np.uint32]
    names: npt.NDArray[np.int32]  # indices into `Run.names`
    stops: Ints  # number of samples up to the end of each step

    def of_step(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        """Return keys, repeats and names of one of the steps."""
        at = slice(self.stops[index - 1] if index else 0, self.stops[index])
        return self.keys[at], self.repeats[at], self.names[at]


class Run:
    """What all files of a ledger say.

    Attributes:
        attempts: of all ranks.
        by_rank: rank -> its attempts, in their order.
        names: sources and reasons of samples, in all files.
        own: names of the sources that each rank has for itself.
        steps: all that are recorded, of `STEP_DTYPE`.
        segments: what counts of them, in the order of the run.
        replaced: those that a later attempt of as many ranks has done again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.files = rank_files(folder)
        named = [name for file in self.files for one in file.names for name in one.values()]
        self.own = {name.source for name in named if name.is_own}
        self.attempts: list[Attempt] = []
        numbers, parts = {_UNKNOWN: 0}, [np.empty(0, STEP_DTYPE)]
        for file in self.files:
            parts += [self._read_attempt(file, at, numbers) for at in range(len(file.headers))]
        self.names, self.steps = [*numbers], np.concatenate(parts)
        ranks = {file.rank for file in self.files if not file.headers}
        ranks.update(one.rank for one in self.attempts)
        self.by_rank = {rank: self._attempts_of(rank) for rank in sorted(ranks)}
        self._jobs = self._set_limits()
        limits, job_limits, jobs = (
            np.array([getattr(one, name) for one in self.attempts], np.int64)[self.steps["attempt"]]
            for name in ("limit", "job_limit", "job")
        )
        places = position(self.steps["epoch"], self.steps["step"])
        self.replaced = self.steps[(limits <= places) & (places < job_limits)]
        self.segments = self._segments(self.steps[places < limits], jobs[places < limits])

    def _read_attempt(self, file: RankFile, index: int, numbers: dict[Name, int]) -> Steps:
        """Add an attempt, and return its steps; an attempt for each virtual rank of a process.

        A virtual rank counts its own steps, so they are the same whichever process hosts it.
        """
        header, names = file.headers[index], file.names[index]
        of_names = np.zeros(max(names, default=-1) + 2, np.int32)
        for number, name in names.items():
            of_names[number] = numbers.setdefault(name._replace(is_own=False), len(numbers))
        steps: Steps = file.steps[file.steps["attempt"] == index]
        hosted = header.batches
        steps["step"], turns = np.divmod(steps["step"], hosted)
        steps["rank"], steps["attempt"] = file.rank * hosted + turns, len(self.attempts) + turns
        if hosted > 1:  # the last of them knows
            places = position(steps["epoch"], steps["step"])
            is_last = np.isin(places, places[steps["flags"] & ENDS_EPOCH > 0])
            steps["flags"] |= (ENDS_EPOCH * is_last).astype(np.uint8)
        lost = range(header.step, header.step + header.lost)
        for turn in range(hosted):
            attempt = Attempt(
                rank=file.rank * hosted + turn,
                world_size=header.world_size * hosted,
                start=int(position(header.epoch, -(-(header.step - turn) // hosted))),
                time_s=header.time_s,
                lost=sum(one % hosted == turn for one in lost),
                path=file.path,
                has_ended=file.has_ended and index == len(file.headers) - 1,
                has_steps=bool((turns == turn).any()),
                names=of_names,
            )
            self.attempts.append(attempt)
        return steps

    def _attempts_of(self, rank: int) -> list[Attempt]:
        own = [one for one in self.attempts if one.rank == rank]
        if len({one.path for one in own}) > 1:  # else their order in the file is right
            own.sort(key=lambda one: one.time_s)
        return own

    def _set_limits(self) -> list[list[Attempt]]:
        """Tell each attempt what has replaced its steps, and return the jobs."""
        jobs: list[list[Attempt]] = []
        for one in sorted(self.attempts, key=lambda one: one.time_s):
            if not jobs or jobs[-1][0].world_size != one.world_size:
                jobs.append([])
            one.job = len(jobs) - 1
            jobs[-1].append(one)
        limit = _NEVER
        for job in reversed(jobs):
            for one in job:
                one.job_limit = limit
            limit = min([limit, *(one.start for one in job)])
        for own in self.by_rank.values():
            limits: dict[int, int] = {}
            for one in reversed(own):
                one.limit = min(one.job_limit, limits.get(one.job, _NEVER))
                limits[one.job] = min(one.limit, one.start)
        return jobs

    def _segments(self, steps: Steps, jobs: Ints) -> list[Segment]:
        order = np.lexsort((steps["rank"], steps["step"], jobs, steps["epoch"]))
        steps, jobs = steps[order], jobs[order]
        cuts = np.flatnonzero((np.diff(steps["epoch"]) != 0) | (np.diff(jobs) != 0)) + 1
        found = []
        for part in np.split(steps, cuts) if len(steps) else ():
            epoch = int(part["epoch"][0])
            attempts = [self.attempts[one] for one in np.unique(part["attempt"]).tolist()]
            start = min(one.start for one in self._jobs[attempts[0].job])
            limit = attempts[0].job_limit
            segment = Segment(
                epoch=epoch,
                world_size=attempts[0].world_size,
                first=start & _STEP_BITS if start >> 32 == epoch else 0,
                stop=limit & _STEP_BITS if limit >> 32 == epoch else None,
                begun=[one.start & _STEP_BITS for one in attempts if one.start >> 32 == epoch],
                steps=part,
            )
            found.append(segment)
        return sorted(found, key=lambda one: (one.epoch, one.first))

    def starts(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return epoch and step at which the attempts of each rank begin."""
        return {
            rank: tuple(
                (one.start >> 32, one.start & _STEP_BITS)
                for one in own
                if one.has_steps or not one.lost  # else it only says what was lost
            )
            for rank, own in self.by_rank.items()
        }

    def begun_anew(self) -> Iterator[str]:
        """Say which attempts leave nothing of those before them, perhaps of another run."""
        for rank, own in self.by_rank.items():
            for index in range(1, len(own)):
                if own[index].start <= min(one.start for one in own[:index]):
                    yield (
                        f"rank {rank}: attempt {index + 1} begins at {_place(own[index].start)}, "
                        "so that nothing counts that was recorded before. If it is of another run, "
                        "give each a folder of its own."
                    )

    def damage(self) -> list[str]:
        """Return what is wrong with the files, and what was lost and not done again."""
        found = [text for file in self.files for text in file.problems]
        return found + [
            f"rank {one.rank}: {counted(one.lost, 'step')} from {_place(one.start)} on could not "
            "be written: the disk was full, or the file was deleted."
            for own in self.by_rank.values()
            for one in own
            if one.lost and one.limit > one.start
        ]

    def open_ranks(self) -> list[int]:
        """Return the ranks of the last job whose end is not recorded; all where there is no job."""
        if not self._jobs:
            return [*self.by_rank]
        job = len(self._jobs) - 1
        last = {one.rank: one for own in self.by_rank.values() for one in own if one.job == job}
        world_size = self._jobs[-1][0].world_size
        return [one for one in range(world_size) if one not in last or not last[one].has_ended]

    def samples(self, steps: Steps) -> Samples:
        """Read the samples of some steps, in their order."""
        stops = np.cumsum(steps["samples"], dtype=np.int64)
        size = int(stops[-1]) if len(stops) else 0
        keys, repeats = np.empty(size, np.int64), np.empty(size, np.uint32)
        names = np.empty(size, np.int32)
        for number in np.unique(steps["attempt"]).tolist():
            attempt, indices = self.attempts[number], np.flatnonzero(steps["attempt"] == number)
            firsts, counts = steps["first_row"][indices], steps["samples"][indices].astype(int)
            start, stop = int(firsts.min()), int((firsts + counts).max())
            rows = np.fromfile(attempt.path, SAMPLE_ROW, stop - start, offset=start * ROW_BYTES)
            rows = rows[_ranges(firsts - start, counts)]
            to = _ranges(stops[indices] - counts, counts)
            keys[to], repeats[to] = rows["key"], rows["repeat"]
            names[to] = attempt.names[np.minimum(rows["name"], len(attempt.names) - 1)]
        return Samples(keys=keys, repeats=repeats, names=names, stops=stops)


def _ranges(firsts: Ints, counts: Ints) -> Ints:
    """Return the numbers of some ranges, one after the other."""
    return np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def _place(at: int) -> str:
    return place_of(at >> 32, at & _STEP_BITS)


def read_steps(
    folder: str | os.PathLike[str], epoch: int, steps: Sequence[int]
) -> dict[int, list[StepInfo]]:
    """Return what is recorded of some steps of an epoch: step -> the `StepInfo` of each rank.

    It says what a ledger keeps: samples, epoch, step, whether it is filler and ends the epoch. A
    step that a rank has no record of is left out.
    """
    run = Run(folder)
    if problems := run.damage():
        raise StateError(
            f"the ledger in `{folder}` is damaged, so nothing is made of it: {problems[0]} See its "
            "audit."
        )
    found: dict[int, list[StepInfo]] = {}
    for segment in run.segments:
        for step in steps if segment.epoch == epoch else ():
            records = segment.steps[segment.steps["step"] == step]
            if records["rank"].tolist() == [*range(segment.world_size)]:
                found[step] = [_info_of(run, one) for one in np.split(records, len(records))]
    return found


def _info_of(run: Run, step: Steps) -> StepInfo:
    keys, repeats, names = (one.tolist() for one in run.samples(step).of_step(0))
    origins = [run.names[number] for number in names]
    keys = [None if key == NO_KEY else key for key in keys]
    rows, flags = sum(not name.reason for name in origins), int(step["flags"][0])
    left = zip(keys[rows:], origins[rows:], strict=True)
    return StepInfo(
        epoch=int(step["epoch"][0]),
        step=int(step["step"][0]),
        local_samples=rows,
        keys=tuple(keys[:rows]),
        row_sources=tuple(name.source for name in origins[:rows]),
        row_repeats=tuple(repeats[:rows]),
        own_sources=frozenset(run.own),
        left_out=tuple(LeftOut(key, name.source, name.reason) for key, name in left),
        is_filler=bool(flags & FILLER),
        ends_epoch=bool(flags & ENDS_EPOCH),
        local_targets=0,
        all_samples_this_step=0,
        all_targets=0,
        optimizer_samples=0,
        optimizer_targets=0,
    )
