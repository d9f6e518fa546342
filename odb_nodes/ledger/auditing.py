"""Check that every sample has one fate per epoch, over all ranks and attempts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from odb_nodes._core.checks import MAX_KEY, check_count, check_type
from odb_nodes.ledger.checks import Findings, check_keys, fate_of
from odb_nodes.ledger.entries import Entries, Names, entries_of, merkle_root
from odb_nodes.ledger.history import (
    Stretch,
    extent_of,
    gaps_of,
    open_ranks,
    ranges,
    stretches,
)
from odb_nodes.ledger.rank_records import RankRecords, records_by_rank
from odb_nodes.ledger.reading import rank_files
from odb_nodes.ledger.records import ENDS_EPOCH, STEP
from odb_nodes.ledger.report import Audit, EpochAudit

MOST_PROBLEMS = 100
"""Problems that are named of the steps of an epoch."""


MOST_STEPS_BEHIND = 16
"""Steps that the file of a killed rank may lack of those of another.

Ranks meet at each optimizer step, so that one is ahead of another by a few steps at most.
"""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What is known of all epochs.

    Attributes:
        last_epochs: rank -> the last epoch that it has recorded; of ranks that have a file.
        may_be_killed: ranks that have so few steps less than another that they may have been
            killed before they recorded them.
        has_ends: whether any step is known to end its epoch.
    """

    last_epochs: dict[int, int]
    may_be_killed: frozenset[int]
    has_ends: bool

    @classmethod
    def of(cls, ranks: Sequence[RankRecords], parts: Sequence[Stretch]) -> _Run:
        """Return what is known of all epochs."""
        last_epochs = {one.rank: parts[0].epoch - 1 if parts else 0 for one in ranks}
        done = {one.rank: parts[0].first if parts else 0 for one in ranks}
        begun = before = 0  # steps, as those of `done`, are counted over epochs
        for epoch, group in groupby(parts, key=lambda one: one.epoch):
            own = list(group)
            extents = {rank: extent_of(part, rank) for part in own for rank in part.blocks}
            stop = before + 1 + max(one.last for one in extents.values())
            for rank, one in extents.items():
                last_epochs[rank] = epoch
                done[rank] = stop if one.ends else before + one.last + 1
            headers = [
                block.attempt.header
                for part in own
                for blocks in part.blocks.values()
                for block in blocks
            ]
            starts = [before + header.step for header in headers if header.epoch == epoch]
            begun, before = max([begun, *starts]), stop
        closed = [done[one.rank] for one in ranks if one.attempts and one.attempts[-1].is_closed]
        # A checkpoint that an attempt begins at is of all ranks; so is the end of a run.
        least = max([begun, before - MOST_STEPS_BEHIND, *closed])
        heads = [attempt.heads for one in ranks for attempt in one.attempts]
        return cls(
            last_epochs=last_epochs,
            may_be_killed=frozenset(rank for rank, steps in done.items() if steps >= least),
            has_ends=any(bool(((head["kind"] - STEP) & ENDS_EPOCH).any()) for head in heads),
        )

    def may_be_behind(self, rank: int, epoch: int) -> bool:
        """Tell whether a rank that was killed may have no further record from this epoch on.

        Others may have gone on by some steps, perhaps into the next epoch.
        """
        return rank in self.may_be_killed and self.last_epochs[rank] <= epoch

    def lacks_steps(self, rank: int, epoch: int) -> bool:
        """Tell whether a rank has its last record in this epoch, too far behind others."""
        return rank not in self.may_be_killed and self.last_epochs.get(rank) == epoch


def audit(folder: str | os.PathLike[str], size: int | Mapping[str, int] | None = None) -> Audit:
    """Return what became of every sample that a `Ledger` has recorded, and what is wrong.

    Args:
        folder: the folder that all ranks have written to; or one that their files were put into.
        size: number of samples of the data over all ranks; a dict source -> size where several
            are mixed. In a complete epoch each of them must have a fate: keys that are indices are
            named, others counted. Of a source that is drawn from at random, or that is not read to
            its end, leave it out.

    Returns:
        Facts and problems; `audit(...).ok` is whether there are none, and the run has ended or all
        of its epochs are complete: see `Audit.state`.

    Raises:
        TypeError, ValueError: `size` is not that of the sources, `folder` or what is in it is not
            that of a ledger, or a file is of a later version.
        FileNotFoundError: there is no ledger in the folder.
    """
    _check_size(size)
    files = rank_files(folder)
    found = Findings(
        [text for file in files for text in file.problems],
        [text for file in files for text in file.notes],
    )
    found.notes += [
        f"rank {file.rank}: nothing is recorded." for file in files if not file.attempts
    ]
    ranks = records_by_rank(files)
    found.notes += [text for one in ranks for text in _begun_anew(one)]
    found.problems += gaps_of(ranks)
    if left := open_ranks(ranks):
        found.notes.append(
            f"rank {ranges(np.array(left))}: no end of the run is recorded. It goes on, or was "
            "killed, or its last records are missing: the files cannot tell. A run that ends "
            "calls `Ledger.close`."
        )
    is_damaged = any(file.problems for file in files)
    parts = stretches(ranks)
    if not parts and (total := sum(size.values()) if isinstance(size, Mapping) else size):
        found.problems.append(f"no sample has a fate, of {total:,}: nothing is recorded.")
    run = _Run.of(ranks, parts)
    epochs: list[EpochAudit] = []
    names = Names.of(ranks)
    for epoch, group in groupby(parts, key=lambda one: one.epoch):
        own = list(group)
        is_complete = _check_steps(own, epochs[-1] if epochs else None, run, found)
        entries = entries_of(own, names)
        found.notes += _repeated_otherwise(own, entries)
        entries.digests.clear()
        in_keys = check_keys(entries, size, is_complete, is_damaged)
        found.problems += [f"epoch {epoch}: {text}" for text in in_keys.problems]
        found.notes += [f"epoch {epoch}: {text}" for text in in_keys.notes]
        epochs.append(_facts(epoch, own, entries, is_complete))
    return Audit(
        folder=str(folder),
        attempts={
            one.rank: tuple(
                (own.header.epoch, own.header.step)
                for own in one.attempts
                if len(own.heads) or not own.header.lost  # else it only says what was lost
            )
            for one in ranks
        },
        epochs=tuple(epochs),
        open_ranks=tuple(left),
        problems=tuple(found.problems),
        notes=tuple(found.notes),
    )


def _repeated_otherwise(parts: Sequence[Stretch], entries: Entries) -> Iterator[str]:
    """Say which steps had other samples in an attempt that was replaced: a resume repeats them."""
    replaced = [replace(part, blocks=part.replaced) for part in parts if part.replaced]
    if not replaced:
        return
    before = entries_of(replaced, entries.names)
    others: dict[tuple[int, int], set[bytes]] = {}
    for rank, step, digest in _records(before):
        others.setdefault((rank, step), set()).add(digest)
    steps: dict[int, list[int]] = {}
    for rank, step, digest in _records(entries):
        if others.get((rank, step), set()) - {digest}:
            steps.setdefault(rank, []).append(step)
    for rank, differing in steps.items():
        yield (
            f"epoch {parts[0].epoch}: rank {rank}: an earlier attempt had other samples at step "
            f"{ranges(np.array(differing))}: it is of another run, or data or configuration have "
            "changed since."
        )


def _records(entries: Entries) -> Iterator[tuple[int, int, bytes]]:
    """Yield rank, step and digest of each record."""
    return zip(entries.ranks.tolist(), entries.steps.tolist(), entries.digests, strict=True)


def _begun_anew(records: RankRecords) -> Iterator[str]:
    """Say which attempts leave nothing of those before them: perhaps they are of another run."""
    starts = [(attempt.header.epoch, attempt.header.step) for attempt in records.attempts]
    for number in range(1, len(starts)):
        if starts[number] <= min(starts[:number]):
            where = "epoch {} step {}".format(*starts[number])
            yield (
                f"rank {records.rank}: attempt {number + 1} begins at {where}, so that nothing "
                "counts that was recorded before. If it is of another run, give each a folder of "
                "its own."
            )


def _check_size(size: object) -> None:
    check_type("size", size, int | Mapping | None)
    if isinstance(size, Mapping):
        for name, one in size.items():
            check_count(f"size[{name!r}]", one, 0, MAX_KEY)
    elif size is not None:
        check_count("size", size, 0, MAX_KEY)


def _check_steps(
    parts: Sequence[Stretch], before: EpochAudit | None, run: _Run, found: Findings
) -> bool:
    """Check the steps of an epoch on each rank, and return whether it is complete."""
    epoch = parts[0].epoch
    problems: list[str] = []
    if before is not None and epoch > before.epoch + 1:
        problems.append(f"epoch {before.epoch + 1} has no record, but epoch {epoch} has.")
    if not (is_whole := parts[0].first == 0):
        text = f"epoch {epoch}: what was before step {parts[0].first} is not recorded."
        (found.notes if before is None else problems).append(text)
    for part in parts:
        extents = {rank: extent_of(part, rank) for rank in range(part.world_size)}
        problems += [text for one in extents.values() for text in one.problems]
        behind = {rank for rank in extents if run.may_be_behind(rank, epoch)}
        absent = [rank for rank in extents if rank not in {*part.blocks} | behind]
        if absent:
            problems.append(
                f"epoch {epoch}: rank {ranges(np.array(absent))} of {part.world_size} has no "
                "record: put the files of all ranks into the folder."
            )
    is_open = [rank for rank, one in extents.items() if not one.ends]
    if is_open and len({one.last for one in extents.values()}) > 1:
        lasts = [f"rank {rank} {one.steps}" for rank, one in extents.items()]
        found.notes.append(
            f"epoch {epoch}: not all ranks have recorded as many steps: {', '.join(lasts)}."
        )
    if left := [rank for rank in is_open if rank in {*part.blocks} - behind]:
        text = (
            f"epoch {epoch}: rank {ranges(np.array(left))}: the epoch has no end: it was left, "
            "or its last steps are not recorded"
        )
        if run.has_ends or any(run.lacks_steps(rank, epoch) for rank in left):
            problems.append(f"{text}.")
        else:
            found.notes.append(f"{text}; or the graph has no `RankAligner`, which knows it.")
    found.problems += problems[:MOST_PROBLEMS]
    if (more := len(problems) - MOST_PROBLEMS) > 0:
        found.problems.append(f"epoch {epoch}: {more:,} more problems of its steps.")
    return is_whole and not problems and all(one.ends for one in extents.values())


def _facts(epoch: int, parts: Sequence[Stretch], entries: Entries, is_complete: bool) -> EpochAudit:
    counts = np.bincount(entries.fates, minlength=len(entries.names.reasons)).tolist()
    fates: dict[str, int] = {}
    for reason, number in sorted(entries.names.reasons.items()):
        if counts[number]:
            fates[fate_of(reason)] = counts[number]
    return EpochAudit(
        epoch=epoch,
        steps=len(entries.leaves),
        last_step=int(entries.steps.max()),
        world_sizes=tuple(dict.fromkeys(part.world_size for part in parts)),
        is_complete=is_complete,
        fates=fates,
        filler=entries.filler,
        digest=merkle_root(entries.leaves).hex(),
        leaves=entries.leaves,
    )
