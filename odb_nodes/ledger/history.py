"""What the files of a ledger say, and which steps count of it.

An attempt replaces what earlier ones did from its start on.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._core.files import folder_with
from odb_nodes._core.text import counted
from odb_nodes.errors import StateError
from odb_nodes.ledger.records import (
    END_ROW,
    ENDS_EPOCH,
    FILLER,
    HEADER,
    MAGIC,
    MARK,
    NAME,
    NO_KEY,
    ROW_BYTES,
    SAMPLE_ROW,
    STEP,
    VERSION,
    Header,
    Name,
)
from odb_nodes.sample import LeftOut
from odb_nodes.step_info import StepInfo

STEP_DTYPE = np.dtype(
    {
        "names": ["epoch", "step", "rank", "attempt", "flags", "samples", "first_row"],
        "formats": ["i8", "i8", "i4", "i4", "u1", "i4", "i8"],
    }
)
"""A step that is recorded: `attempt` is an index, `first_row` where its samples are in the file."""
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Steps = npt.NDArray[np.void]
_KIND_BITS = 0xFF ^ (FILLER | ENDS_EPOCH)


def rank_files(folder: Path) -> list[RankFile]:
    """Return the files of a ledger, in the order of the ranks."""
    if os.path.isfile(folder):
        raise ValueError(f"`folder` must be a folder, but `{folder}` is a file.")
    paths = sorted(folder.glob("rank-*.ledger"))
    if not paths:
        missing = "no file `rank-00000.ledger`" if os.path.isdir(folder) else "no such folder"
        raise FileNotFoundError(
            f"`{folder}` has no ledger: there is {missing}. Give the folder of a `Ledger`."
        )
    return [RankFile(path) for path in paths]


class RankFile:
    """What the file of one rank says, and where it was changed, damaged or torn."""

    def __init__(self, path: Path) -> None:
        match = re.fullmatch(r"rank-([0-9]+)\.ledger", path.name)
        if match is None:
            name = str(path).encode("utf-8", "backslashreplace").decode()
            raise ValueError(
                f"`{name}` must be named as `rank-00000.ledger`, but is not. Rename it, or move it "
                "out of the folder."
            )
        self.path, self.rank = path, int(match[1])
        self.headers: list[Header] = []  # of its attempts, in the order in which they were written
        self.names: list[dict[int, Name]] = []  # number -> name, of each attempt
        self.steps: Steps = np.empty(0, STEP_DTYPE)  # that are whole
        self.has_ended = False  # The run has, and nobody has gone on.
        self.problems: list[str] = []
        self.notes: list[str] = []
        if path.stat().st_size:  # what is empty cannot be mapped
            self._read(np.memmap(path, np.uint8, "r"))

    def _read(self, data: Bytes) -> None:
        start = data[: len(MAGIC)].tobytes()
        if not MAGIC.startswith(start):
            self._problem(
                f"it begins with {start!r}: it is damaged, or not of version {VERSION} of a "
                "ledger, which this library reads"
            )
            return
        size = int.from_bytes(data[len(MAGIC) : ROW_BYTES].tobytes(), "little")
        self.has_ended = size == len(data)
        if size and not self.has_ended:
            what = "missing: it was cut" if size > len(data) else "too many"
            self._problem(f"the run has ended, but {abs(size - len(data)):,} bytes are {what}")
        rows = data[: len(data) // ROW_BYTES * ROW_BYTES].view(END_ROW)
        starts = np.append(1, np.flatnonzero(rows["mark"][1:] == MARK) + 2)
        self._read_records(data, starts, rows[starts[1:] - 1])
        if rest := data[int(starts[-1]) * ROW_BYTES :].tobytes():
            if _is_torn(rest, len(self.names[-1]) if self.names else 0):
                text = f"rank {self.rank}: a torn record of {len(rest):,} bytes is ignored."
                self.notes.append(text)
            else:
                self._problem(f"the last {len(rest):,} bytes are damaged")

    def _read_records(self, data: Bytes, starts: Ints, ends: npt.NDArray[np.void]) -> None:
        """Read records, by the first rows of each and of what follows, and their end rows."""
        bounds, view = (starts * ROW_BYTES).tolist(), data.data
        crcs = [zlib.crc32(view[a : b - 4]) for a, b in pairwise(bounds)]
        kinds = ends["kind"]
        is_header, is_name, is_step = kinds == HEADER, kinds == NAME, kinds & _KIND_BITS == STEP
        is_whole = (ends["crc"] == np.array(crcs, np.uint32)) & (is_header | is_name | is_step)
        is_next = np.diff(ends["number"], prepend=np.uint16(0xFFFF)) == 1  # modulo 2**16
        is_next[1:] |= ~is_whole[:-1]  # what is damaged is said on its own
        attempts, steps = np.cumsum(is_header), np.flatnonzero(is_step & is_whole)
        is_read = [False]  # of each attempt, from 1: not where its header is damaged
        damaged_to = 0
        for at in np.flatnonzero(~(is_step & is_whole & is_next)).tolist():
            if is_header[at]:
                is_read.append(bool(is_whole[at]))
            before = steps[: np.searchsorted(steps, at)][-1:]
            where = f"attempt {max(attempts[at], 1)}, at its beginning"
            if len(before) and attempts[before[0]] == attempts[at]:
                where = f"attempt {attempts[at]}, after {_place(ends[before[0]])}"
            if not is_whole[at]:
                if at >= damaged_to:  # with all that follow it
                    damaged_to = at + int(np.argmax(np.append(is_whole[at:], True)))
                    size = bounds[damaged_to] - bounds[at]
                    self._problem(
                        f"{where}: {size:,} bytes from byte {bounds[at]:,} on are damaged"
                    )
                continue
            if not is_next[at]:
                what = "a name" if is_name[at] else "the beginning of the attempt"
                what = f"the record of {_place(ends[at])}" if is_step[at] else what
                self._problem(
                    f"{where}: {what} does not continue the record before it: one of them was "
                    "removed, doubled or moved"
                )
            text = bytes(view[bounds[at] : bounds[at + 1] - ROW_BYTES])
            if is_header[at]:
                self._begin(json.loads(text))
            elif is_name[at] and is_read[-1]:
                self.names[-1][int(ends["step"][at])] = Name(*json.loads(text))
        steps = steps[np.array(is_read)[attempts[steps]]]
        self.steps = np.zeros(len(steps), STEP_DTYPE)
        self.steps["epoch"], self.steps["step"] = ends["epoch"][steps], ends["step"][steps]
        self.steps["attempt"] = (np.cumsum(is_read) - 1)[attempts[steps]]
        self.steps["flags"] = kinds[steps] - STEP
        self.steps["first_row"], self.steps["samples"] = starts[steps], np.diff(starts)[steps] - 1

    def _begin(self, fields: dict[str, Any]) -> None:
        if fields["version"] != VERSION:
            raise ValueError(
                f"`{self.path}` is of version {fields['version']} of a ledger, but this library "
                f"reads version {VERSION}. Use the library that wrote it."
            )
        header = Header(**fields)
        self.headers.append(header)
        self.names.append({})
        where = f"attempt {len(self.headers)} (epoch {header.epoch} step {header.step})"
        if header.rank != self.rank:
            self._problem(f"{where} was written by rank {header.rank}: the file was renamed")
        if header.cut_bytes:
            self.notes.append(
                f"rank {self.rank}: {where}: a torn record of {header.cut_bytes:,} bytes before it "
                "was cut off."
            )

    def _problem(self, text: str) -> None:
        self.problems.append(f"rank {self.rank}: {text}.")


def _place(end: np.void) -> str:
    return f"epoch {end['epoch']} step {end['step']}"


def _is_torn(rest: bytes, names: int) -> bool:
    """Tell whether bytes can be the beginning of a record, or zeros after a loss of power."""
    rest = rest[: len(rest) // ROW_BYTES * ROW_BYTES]
    rows = np.frombuffer(rest, SAMPLE_ROW)
    return rest.isascii() or bool(((rows["name"] < names) & (rows["key"] >= NO_KEY)).all())


# --- what counts ----------------------------------------------------------------------------------

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


class Run:
    """What all files of a ledger say, and what counts of it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder_with("rank-*.ledger", folder)
        self.files = rank_files(self.folder)
        named = [name for file in self.files for one in file.names for name in one.values()]
        self.own = {name.source for name in named if name.is_own}  # of each rank for itself
        self.attempts: list[Attempt] = []  # of all ranks
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
        # Done again by a later attempt of as many ranks; and what counts, in the order of the run.
        self.replaced = self.steps[(limits <= places) & (places < job_limits)]
        self.segments = self._segments(self.steps[places < limits], jobs[places < limits])

    def _read_attempt(self, file: RankFile, index: int, numbers: dict[Name, int]) -> Steps:
        """Add an attempt for each virtual rank of a process, and return their steps."""
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
                        f"rank {rank}: attempt {index + 1} begins at {_at(own[index].start)}, "
                        "so that nothing counts that was recorded before. If it is of another run, "
                        "give each a folder of its own."
                    )

    def damage(self) -> list[str]:
        """Return what is wrong with the files, and what was lost and not done again."""
        found = [text for file in self.files for text in file.problems]
        return found + [
            f"rank {one.rank}: {counted(one.lost, 'step')} from {_at(one.start)} on could not "
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


def _at(at: int) -> str:
    return f"epoch {at >> 32} step {at & _STEP_BITS}"


def read_steps(
    folder: str | os.PathLike[str], epoch: int, steps: Sequence[int]
) -> dict[int, list[StepInfo]]:
    """Return the `StepInfo` of each rank, by step, as far as a ledger has it of all ranks."""
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
    samples = run.samples(step)
    origins = [run.names[number] for number in samples.names]
    keys = [None if key == NO_KEY else key for key in samples.keys.tolist()]
    rows, flags = sum(not name.reason for name in origins), int(step["flags"][0])
    left = zip(keys[rows:], origins[rows:], strict=True)
    return StepInfo(
        epoch=int(step["epoch"][0]),
        step=int(step["step"][0]),
        local_samples=rows,
        keys=tuple(keys[:rows]),
        row_sources=tuple(name.source for name in origins[:rows]),
        row_repeats=tuple(samples.repeats[:rows].tolist()),
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
