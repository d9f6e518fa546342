"""What a ledger says of some steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_nodes.errors import StateError
from odb_nodes.ledger.history import Run
from odb_nodes.ledger.records import ENDS_EPOCH, FILLER, NO_KEY
from odb_nodes.sample import LeftOut


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step of one rank.

    Attributes:
        epoch: number of the epoch.
        step: number of the step in it.
        keys: key of each sample, in the order of the rows; `None` where it has none.
        sources: names of their sources.
        repeats: what tells samples from themselves that come more than once in an epoch.
        is_own: whether the source of each is the rank's own.
        left_out: samples that were left out before the step.
        is_filler: whether it had no sample of its own.
        ends_epoch: whether the rank took no further step in the epoch.
    """

    epoch: int
    step: int
    keys: tuple[int | None, ...]
    sources: tuple[str, ...]
    repeats: tuple[int, ...]
    is_own: tuple[bool, ...]
    left_out: tuple[LeftOut, ...]
    is_filler: bool
    ends_epoch: bool


def read_steps(
    folder: str | os.PathLike[str], epoch: int, steps: Sequence[int]
) -> dict[int, list[StepRecord]]:
    """Return what is recorded of some steps of an epoch: step -> the record of each rank.

    A step that a rank has no record of is left out.
    """
    run = Run(folder)
    if problems := run.damage():
        raise StateError(
            f"the ledger in `{folder}` is damaged, so nothing is made of it: {problems[0]} See its "
            "audit."
        )
    found: dict[int, list[StepRecord]] = {}
    for segment in run.segments:
        for step in steps if segment.epoch == epoch else ():
            records = segment.steps[segment.steps["step"] == step]
            if records["rank"].tolist() == [*range(segment.world_size)]:
                found[step] = [_record(run, records[at : at + 1]) for at in range(len(records))]
    return found


def _record(run: Run, step: np.ndarray[tuple[int], np.dtype[np.void]]) -> StepRecord:
    samples = run.samples(step)
    names = [run.names[number] for number in samples.names.tolist()]
    keys = [None if key == NO_KEY else key for key in samples.keys.tolist()]
    rows = sum(not name.reason for name in names)
    left = zip(keys[rows:], names[rows:], strict=True)
    sources = tuple(name.source for name in names[:rows])
    (flags,) = step["flags"].tolist()
    return StepRecord(
        epoch=int(step["epoch"][0]),
        step=int(step["step"][0]),
        keys=tuple(keys[:rows]),
        sources=sources,
        repeats=tuple(samples.repeats[:rows].tolist()),
        is_own=tuple(source in run.own for source in sources),
        left_out=tuple(LeftOut(key, name.source, name.reason) for key, name in left),
        is_filler=bool(flags & FILLER),
        ends_epoch=bool(flags & ENDS_EPOCH),
    )
