"""Which records count: an attempt replaces what earlier ones did from its start on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from odb_nodes._core.text import counted
from odb_nodes.ledger.rank_records import RankRecords
from odb_nodes.ledger.reading import Attempt, place, position
from odb_nodes.ledger.records import ENDS_EPOCH, STEP

_Job = list[tuple[RankRecords, Attempt]]
_NEVER = 1 << 62
MOST_SPANS = 20
"""Ranges of numbers that are named in one text."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Records of one attempt that count, all of one epoch.

    Attributes:
        of: all records of the rank.
        attempt: the attempt.
        indices: which of its records, (n,) int64.
    """

    of: RankRecords
    attempt: Attempt
    indices: npt.NDArray[np.int64]

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps of the records, (n,) int64."""
        return self.attempt.heads["step"][self.indices].astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What the ranks of a job of one size did of an epoch.

    Attributes:
        epoch: number of the epoch.
        world_size: number of ranks.
        first: its first step.
        stop: the step at which a job of another size goes on; `None` where none does.
        blocks: what counts, by rank.
        replaced: what does not, since a later attempt has begun before it, by rank.
    """

    epoch: int
    world_size: int
    first: int
    stop: int | None
    blocks: dict[int, list[Block]]
    replaced: dict[int, list[Block]]


def stretches(ranks: Sequence[RankRecords]) -> list[Stretch]:
    """Return what counts, in the order of the run."""
    found: list[Stretch] = []
    for job, limit in _with_limits(_jobs(ranks)):
        start = _start_of(job)
        by_epoch: dict[int, tuple[dict[int, list[Block]], dict[int, list[Block]]]] = {}
        for block, is_replaced in _blocks(job, limit):
            epoch = int(block.attempt.heads["epoch"][block.indices[0]])
            by_rank = by_epoch.setdefault(epoch, ({}, {}))[is_replaced]
            by_rank.setdefault(block.of.rank, []).append(block)
        for epoch, (blocks, replaced) in by_epoch.items():
            if not blocks:
                continue
            stretch = Stretch(
                epoch=epoch,
                world_size=job[0][1].header.world_size,
                first=start & 0xFFFFFFFF if start >> 32 == epoch else 0,
                stop=limit & 0xFFFFFFFF if limit >> 32 == epoch else None,
                blocks=blocks,
                replaced=replaced,
            )
            found.append(stretch)
    return sorted(found, key=lambda one: (one.epoch, one.first))


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Which steps of a stretch one rank has recorded.

    Attributes:
        steps: number of steps that are recorded.
        last: the last of them; one before the first where there is none.
        ends: whether that step ends the epoch.
        problems: steps that are missing, or recorded twice.
    """

    steps: int
    last: int
    ends: bool
    problems: list[str]


def extent_of(stretch: Stretch, rank: int) -> Extent:
    """Return which steps of a stretch a rank has recorded, and what is wrong with them."""
    blocks = stretch.blocks.get(rank, [])
    if not blocks:
        return Extent(steps=0, last=stretch.first - 1, ends=False, problems=[])
    steps = np.concatenate([block.steps for block in blocks])
    kinds = np.concatenate([block.attempt.heads["kind"][block.indices] for block in blocks])
    last = int(steps.max())
    unique, counts = np.unique(steps, return_counts=True)
    wrong = {"recorded more than once": ranges(unique[counts > 1])}
    ends = [stretch.first - 1, *unique.tolist(), last + 1 if stretch.stop is None else stretch.stop]
    gaps = [(a + 1, b - 1) for a, b in pairwise(ends) if b > a + 1]
    wrong["not recorded"] = _text_of(gaps)
    return Extent(
        steps=len(steps),
        last=last,
        ends=bool(((kinds[steps == last] - STEP) & ENDS_EPOCH).any()),
        problems=[
            f"rank {rank}, epoch {stretch.epoch}: {text}: step {which}."
            for text, which in wrong.items()
            if which
        ],
    )


def gaps_of(ranks: Sequence[RankRecords]) -> list[str]:
    """Return what a rank could not write, unless a later attempt has done these steps again."""
    found = []
    for job, limit in _with_limits(_jobs(ranks)):
        for records, attempt in job:
            header = attempt.header
            lost = int(position(header.lost_epoch, header.lost_step))
            own = [
                _start(one) for who, one in job if who is records and one.number > attempt.number
            ]
            if header.lost and min([limit, *own]) > lost:
                found.append(
                    f"rank {records.rank}: {counted(header.lost, 'step')} from {place(lost)} on "
                    "could not be written: the disk was full, or the file was deleted."
                )
    return found


def open_ranks(ranks: Sequence[RankRecords]) -> list[int]:
    """Return the ranks of the last job whose end is not recorded; all where there is no job."""
    jobs = _jobs(ranks)
    if not jobs:
        return [one.rank for one in ranks]
    last = {records.rank: attempt for records, attempt in sorted(jobs[-1], key=_number)}
    world_size = jobs[-1][0][1].header.world_size
    return [rank for rank in range(world_size) if rank not in last or not last[rank].is_closed]


def ranges(numbers: npt.NDArray[np.int64]) -> str:
    """Return sorted numbers without repeats as text: `3, 7 to 9`; "" for none."""
    if not len(numbers):
        return ""
    cuts = np.flatnonzero(np.diff(numbers) > 1)
    firsts, lasts = numbers[[0, *(cuts + 1)]], numbers[[*cuts, -1]]
    return _text_of(list(zip(firsts.tolist(), lasts.tolist(), strict=True)))


def _text_of(spans: Sequence[tuple[int, int]]) -> str:
    """Return ranges of numbers as text, of which the first are named and the others counted."""
    named = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:MOST_SPANS]]
    rest = sum(b - a + 1 for a, b in spans[MOST_SPANS:])
    return ", ".join(named + [f"{rest:,} more"] * bool(rest))


def _jobs(ranks: Sequence[RankRecords]) -> list[_Job]:
    """Return the attempts by time, cut where the number of ranks changes."""
    attempts = [(one, attempt) for one in ranks for attempt in one.attempts]
    attempts.sort(key=lambda one: one[1].header.time_s)
    jobs: list[_Job] = []
    for one in attempts:
        if not jobs or jobs[-1][0][1].header.world_size != one[1].header.world_size:
            jobs.append([])
        jobs[-1].append(one)
    return jobs


def _with_limits(jobs: Sequence[_Job]) -> Iterator[tuple[_Job, int]]:
    """Yield each job, and the place from which later ones have done its steps again."""
    starts = [*map(_start_of, jobs)]
    for number, job in enumerate(jobs):
        yield job, min(starts[number + 1 :], default=_NEVER)


def _start_of(job: _Job) -> int:
    return min(_start(attempt) for _, attempt in job)


def _number(one: tuple[RankRecords, Attempt]) -> int:
    return one[1].number


def _blocks(job: _Job, limit: int) -> Iterator[tuple[Block, bool]]:
    """Yield the records of a job, attempt by attempt and epoch by epoch, and which are replaced."""
    limits: dict[int, int] = {}
    kept = []
    for records, attempt in sorted(job, key=_number, reverse=True):  # the last one first
        before = limits.get(records.rank, limit)
        kept.append((records, attempt, before))
        limits[records.rank] = min(before, _start(attempt))
    for records, attempt, before in reversed(kept):
        positions, epochs = attempt.positions, attempt.heads["epoch"]
        is_replaced = positions >= before
        for epoch in np.unique(epochs):
            for chosen in (False, True):
                is_one = (epochs == epoch) & (is_replaced == chosen) & (positions < limit)
                if len(indices := np.flatnonzero(is_one)):
                    yield Block(of=records, attempt=attempt, indices=indices), chosen


def _start(attempt: Attempt) -> int:
    return int(position(attempt.header.epoch, attempt.header.step))
