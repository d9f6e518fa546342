"""Which steps of a ledger count: an attempt replaces what earlier ones did from its start on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._core.text import counted
from odb_nodes.ledger.reading import STEP_DTYPE, Ints, RankFile, place, rank_files
from odb_nodes.ledger.records import ENDS_EPOCH, ROW_BYTES, SAMPLE_ROW, Name

Steps = npt.NDArray[np.void]
_NEVER = 1 << 62
MOST_SPANS = 20
"""Ranges of numbers that are named in one text."""
_STEP_BITS = (1 << 32) - 1
_UNKNOWN = Name("a source whose name is damaged", "", False)


def position(epoch: npt.ArrayLike, step: npt.ArrayLike) -> Ints:
    """Return epoch and step as one number that grows with both."""
    return (np.asarray(epoch, np.int64) << 32) + np.asarray(step, np.int64)


@dataclass(kw_only=True)
class Attempt:
    """One attempt of one rank; a virtual rank, where processes hosted several.

    Attributes:
        rank: whose it is.
        world_size: number of ranks.
        start: `position` of its first step.
        time_s: when it began, in seconds since 1970.
        lost: steps before it that could not be written.
        lost_from: `position` of the first of them.
        path: the file that it is in.
        has_ended: whether it is the last one of the file, and the run has ended.
        has_steps: whether any step is recorded.
        names: what its numbers of names are in `Run.names`, the last of an unknown one, (n,) int32.
        job: number of the job that it is of: attempts with as many ranks, one after the other.
        job_limit: `position` from which later jobs have done its steps again.
        limit: that from which its steps do not count, since later attempts have done them again.
    """

    rank: int
    world_size: int
    start: int
    time_s: float
    lost: int
    lost_from: int
    path: Path
    has_ended: bool
    has_steps: bool
    names: npt.NDArray[np.int32]
    job: int = 0
    job_limit: int = _NEVER
    limit: int = _NEVER


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Which steps one rank has recorded of a segment.

    Attributes:
        steps: sorted, (n,) int64.
        ends: whether the last of them ends the epoch.
    """

    steps: Ints
    ends: bool

    @classmethod
    def of(cls, steps: Steps) -> Coverage:
        """Return that of the steps of a rank, which are sorted."""
        ends = steps["flags"][steps["step"] == steps["step"][-1]] & ENDS_EPOCH
        return cls(steps=steps["step"], ends=bool(ends.any()))

    @property
    def last(self) -> int:
        """The last of them."""
        return int(self.steps[-1])


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What one job did of an epoch: the steps from `first` on, up to `stop` where another goes on.

    Attributes:
        epoch: number of the epoch.
        world_size: number of ranks.
        first: its first step.
        stop: the step at which a later job goes on; `None` where none does.
        steps: those that count, by rank and step, (n,) of `STEP_DTYPE`.
        ranks: rank -> what it has recorded; of those that have recorded anything.
        begun: the steps at which attempts begin in this epoch.
    """

    epoch: int
    world_size: int
    first: int
    stop: int | None
    steps: Steps
    ranks: dict[int, Coverage]
    begun: list[int]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of some steps, as columns.

    Attributes:
        keys: `NO_KEY` where there is none, (n,) int64.
        repeats: (n,) uint32.
        names: numbers in `Run.names`, (n,) int32.
        stops: number of samples up to the end of each step, (steps,) int64.
    """

    keys: Ints
    repeats: npt.NDArray[np.uint32]
    names: npt.NDArray[np.int32]
    stops: Ints

    def of_step(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        """Return keys, repeats and names of one of the steps."""
        at = slice(self.stops[index - 1] if index else 0, self.stops[index])
        return self.keys[at], self.repeats[at], self.names[at]


class Run:
    """What all files of a ledger say.

    Attributes:
        files: one for each rank, or process.
        attempts: of all ranks; those of one rank in their order.
        ranks: numbers of the ranks.
        names: sources and reasons of samples, in all files.
        own: names of the sources that each rank has for itself.
        steps: all that are recorded, (n,) of `STEP_DTYPE`.
        segments: what counts, in the order of the run.
        replaced: the steps that a later attempt of as many ranks has done again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.files = rank_files(folder)
        self.attempts: list[Attempt] = []
        self.own = {
            name.source
            for file in self.files
            for names in file.names
            for name in names.values()
            if name.is_own
        }
        numbers = {_UNKNOWN: 0}
        parts = [np.empty(0, STEP_DTYPE)]
        for file in self.files:
            for index in range(len(file.headers)):
                parts.append(self._read_attempt(file, index, numbers))
        self.names, self.steps = [*numbers], np.concatenate(parts)
        empty = {file.rank for file in self.files if not file.headers}
        self.ranks = sorted({*empty, *(one.rank for one in self.attempts)})
        self._by_rank = self._order_attempts()
        self._jobs = self._set_limits()
        limits, job_limits, jobs = (
            np.array([getattr(one, name) for one in self.attempts], np.int64)[self.steps["attempt"]]
            for name in ("limit", "job_limit", "job")
        )
        places = position(self.steps["epoch"], self.steps["step"])
        self.replaced = self.steps[(limits <= places) & (places < job_limits)]
        self.segments = self._segments(self.steps[places < limits], jobs[places < limits])

    def _read_attempt(self, file: RankFile, index: int, numbers: dict[Name, int]) -> Steps:
        """Add an attempt, and return its steps; one for each virtual rank of a process.

        A virtual rank counts its own steps, so they are the same whichever process hosts it.
        """
        header, steps = file.headers[index], file.steps[file.steps["attempt"] == index]
        names = np.zeros(max(file.names[index], default=-1) + 2, np.int32)
        for number, name in file.names[index].items():
            names[number] = numbers.setdefault(name._replace(is_own=False), len(numbers))
        hosted = header.batches
        steps["step"], turns = np.divmod(steps["step"], hosted)
        steps["rank"], steps["attempt"] = file.rank * hosted + turns, len(self.attempts) + turns
        if hosted > 1:  # the last of them knows
            places = position(steps["epoch"], steps["step"])
            is_last = np.isin(places, places[steps["flags"] & ENDS_EPOCH > 0])
            steps["flags"] |= (ENDS_EPOCH * is_last).astype(np.uint8)
        lost = range(header.lost_step, header.lost_step + header.lost)
        for turn in range(hosted):
            attempt = Attempt(
                rank=file.rank * hosted + turn,
                world_size=header.world_size * hosted,
                start=int(position(header.epoch, -(-(header.step - turn) // hosted))),
                time_s=header.time_s,
                lost=sum(one % hosted == turn for one in lost),
                lost_from=int(position(header.lost_epoch, -(-(lost.start - turn) // hosted))),
                path=file.path,
                has_ended=file.has_ended and index == len(file.headers) - 1,
                has_steps=bool((turns == turn).any()),
                names=names,
            )
            self.attempts.append(attempt)
        return steps

    def _order_attempts(self) -> dict[int, list[Attempt]]:
        """Return the attempts of each rank in their order."""
        by_rank: dict[int, list[Attempt]] = {rank: [] for rank in self.ranks}
        for one in self.attempts:
            by_rank[one.rank].append(one)
        for own in by_rank.values():
            if len({one.path for one in own}) > 1:  # else their order in the file is right
                own.sort(key=lambda one: one.time_s)
        return by_rank

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
        for own in self._by_rank.values():
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
            epoch, attempts = int(part["epoch"][0]), self._attempts_of(part)
            start = min(one.start for one in self._jobs[attempts[0].job])
            limit = attempts[0].job_limit
            ranks = np.unique(part["rank"]).tolist()
            segment = Segment(
                epoch=epoch,
                world_size=attempts[0].world_size,
                first=start & _STEP_BITS if start >> 32 == epoch else 0,
                stop=limit & _STEP_BITS if limit >> 32 == epoch else None,
                begun=[one.start & _STEP_BITS for one in attempts if one.start >> 32 == epoch],
                steps=part,
                ranks={rank: Coverage.of(part[part["rank"] == rank]) for rank in ranks},
            )
            found.append(segment)
        return sorted(found, key=lambda one: (one.epoch, one.first))

    def _attempts_of(self, steps: Steps) -> list[Attempt]:
        return [self.attempts[one] for one in np.unique(steps["attempt"]).tolist()]

    def starts(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return where the attempts of each rank begin; of those that do more than tell a loss."""
        return {
            rank: tuple(
                (one.start >> 32, one.start & _STEP_BITS)
                for one in own
                if one.has_steps or not one.lost
            )
            for rank, own in self._by_rank.items()
        }

    def begun_anew(self) -> Iterator[str]:
        """Say which attempts leave nothing of those before them, perhaps of another run."""
        for rank, own in self._by_rank.items():
            for index in range(1, len(own)):
                if own[index].start <= min(one.start for one in own[:index]):
                    yield (
                        f"rank {rank}: attempt {index + 1} begins at {_place(own[index].start)}, "
                        "so that nothing counts that was recorded before. If it is of another run, "
                        "give each a folder of its own."
                    )

    def damage(self) -> list[str]:
        """Return what is wrong with the files, and what could not be written nor was done again."""
        found = [text for file in self.files for text in file.problems]
        return found + [
            f"rank {one.rank}: {counted(one.lost, 'step')} from {_place(one.lost_from)} on could "
            "not be written: the disk was full, or the file was deleted."
            for own in self._by_rank.values()
            for one in own
            if one.lost and one.limit > one.lost_from
        ]

    def has_ended(self, rank: int) -> bool:
        """Tell whether the last attempt of a rank has recorded the end of the run."""
        own = self._by_rank[rank]
        return bool(own) and own[-1].has_ended

    def open_ranks(self) -> list[int]:
        """Return the ranks of the last job whose end is not recorded; all where there is no job."""
        if not self._jobs:
            return self.ranks
        job = len(self._jobs) - 1
        last = {one.rank: one for own in self._by_rank.values() for one in own if one.job == job}
        world_size = self._jobs[-1][0].world_size
        return [one for one in range(world_size) if one not in last or not last[one].has_ended]

    def samples(self, steps: Steps) -> Samples:
        """Read the samples of some steps, in their order."""
        stops = np.cumsum(steps["samples"], dtype=np.int64)
        size = int(stops[-1]) if len(stops) else 0
        found = Samples(
            keys=np.empty(size, np.int64),
            repeats=np.empty(size, np.uint32),
            names=np.empty(size, np.int32),
            stops=stops,
        )
        for number in np.unique(steps["attempt"]).tolist():
            attempt, indices = self.attempts[number], np.flatnonzero(steps["attempt"] == number)
            firsts, counts = steps["first_row"][indices], steps["samples"][indices]
            first = int(firsts.min())
            rows = np.fromfile(
                attempt.path,
                SAMPLE_ROW,
                int((firsts + counts).max()) - first,
                offset=first * ROW_BYTES,
            )[_ranges(firsts - first, counts)]
            to = _ranges(stops[indices] - counts, counts)
            found.keys[to], found.repeats[to] = rows["key"], rows["repeat"]
            known = np.minimum(rows["name"], len(attempt.names) - 1)
            found.names[to] = attempt.names[known]
        return found


def _ranges(firsts: Ints, counts: Ints) -> Ints:
    """Return the numbers of some ranges, one after the other."""
    counts = counts.astype(np.int64)
    return np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def _place(at: int) -> str:
    return place(at >> 32, at & _STEP_BITS)


def spans_of(numbers: Ints) -> list[tuple[int, int]]:
    """Return the ranges, from and to, of sorted numbers without repeats."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) > 1)
    firsts, lasts = numbers[[0, *(cuts + 1)]], numbers[[*cuts, -1]]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def ranges(numbers: npt.ArrayLike) -> str:
    """Return sorted numbers without repeats as text: `3, 7 to 9`; "" for none."""
    return text_of_spans(spans_of(np.asarray(numbers)))


def text_of_spans(spans: Sequence[tuple[int, int]]) -> str:
    """Return ranges of numbers as text, of which the first are named and the others counted."""
    named = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:MOST_SPANS]]
    rest = sum(b - a + 1 for a, b in spans[MOST_SPANS:])
    return ", ".join(named + [f"{rest:,} more"] * bool(rest))
