"""What a ledger says of some steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_nodes.errors import StateError
from odb_nodes.ledger.entries import TRAINED, Entries, Names, entries_of
from odb_nodes.ledger.history import gaps_of, stretches
from odb_nodes.ledger.rank_records import records_by_rank
from odb_nodes.ledger.reading import rank_files
from odb_nodes.ledger.records import ENDS_EPOCH, FILLER, NO_KEY, STEP
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
    files = rank_files(folder)
    ranks = records_by_rank(files)
    if problems := [text for file in files for text in file.problems] + gaps_of(ranks):
        raise StateError(
            f"the ledger in `{folder}` is damaged, so nothing is made of it: {problems[0]} See its "
            "audit."
        )
    names = Names.of(ranks)
    found: dict[int, list[StepRecord]] = {}
    for part in stretches(ranks):
        if part.epoch != epoch:
            continue
        by_rank: dict[int, dict[int, StepRecord]] = {rank: {} for rank in range(part.world_size)}
        for rank, blocks in part.blocks.items():
            for block in blocks:
                indices = block.indices[np.isin(block.steps, steps)]
                for at in range(len(indices)):
                    one = replace(block, indices=indices[at : at + 1])
                    alone = replace(part, blocks={rank: [one]}, replaced={})
                    record = _record(entries_of([alone], names), one.attempt.heads[indices[at]])
                    by_rank[rank][record.step] = replace(record, epoch=epoch)
        for step in steps:
            if all(step in records for records in by_rank.values()):
                found[step] = [records[step] for records in by_rank.values()]
    return found


def _record(entries: Entries, head: np.void) -> StepRecord:
    """Return the only step of some entries; its epoch is not known here."""
    sources = {number: (name, rank >= 0) for (name, rank), number in entries.names.sources.items()}
    reasons = {number: text for text, number in entries.names.reasons.items()}
    origins = [sources[number] for number in entries.sources.tolist()]
    keys = [None if key == NO_KEY else key for key in entries.keys.tolist()]
    repeats = [0] * len(keys) if entries.repeats is None else entries.repeats.tolist()
    fates = entries.fates.tolist()
    rows = fates.count(TRAINED)
    left = zip(keys[rows:], origins[rows:], fates[rows:], strict=True)
    flags = int(head["kind"]) - STEP
    return StepRecord(
        epoch=0,
        step=int(head["step"]),
        keys=tuple(keys[:rows]),
        sources=tuple(name for name, _ in origins[:rows]),
        repeats=tuple(repeats[:rows]),
        is_own=tuple(is_own for _, is_own in origins[:rows]),
        left_out=tuple(LeftOut(key, name, reasons[fate]) for key, (name, _), fate in left),
        is_filler=bool(flags & FILLER),
        ends_epoch=bool(flags & ENDS_EPOCH),
    )
