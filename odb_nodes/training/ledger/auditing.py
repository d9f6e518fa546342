"""Check that every sample has one fate per epoch, over all ranks and attempts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import MAX_KEY, check_count
from odb_nodes.training.ledger.audit_result import (
    DIGEST_BYTES,
    Audit,
    Digests,
    EpochAudit,
    digest_of_steps,
)
from odb_nodes.training.ledger.history import RecordedRun, Samples, Segment
from odb_nodes.training.ledger.rank_file import Steps
from odb_nodes.training.ledger.records import ENDS_EPOCH, FILLER, NO_KEY, Name

MOST_NAMED = 20
"""Most keys, or ranges of numbers, that one problem lists; it counts the others."""
MOST_STEPS_BEHIND = 16
"""Steps that a killed rank may lack, compared with other ranks.

Ranks meet at each optimizer step, so none is ahead of another by more than a few steps.
"""
_FATES = ("dropped", "unemitted", "excluded")  # reasons of this library, not of the user

Size = int | Mapping[str, int] | None


def audit(folder: str | os.PathLike[str], size: int | Mapping[str, int] | None = None) -> Audit:
    """Check the records of a `Ledger`: the fate of every sample, and what is wrong.

    Args:
        folder: the folder that all ranks wrote to, or a folder with exactly one such folder in it.
        size: number of samples of the data over all ranks, or a dict source -> number for a
            mixture. The audit then checks that each sample of a complete epoch has a fate: it lists
            missing indices and counts missing keys of other kinds. Leave out a source that is drawn
            from at random, or that is not read to its end.

    Returns:
        The facts and problems. `audit(...).ok` is true if there is no problem, and the run has
        ended or all of its epochs are complete: see `Audit.state`.

    Raises:
        TypeError, ValueError: `size` does not fit the sources, or `folder` is not the folder of a
            ledger.
        FileNotFoundError: there is no ledger in the folder.
    """
    size = _checked_size(size)
    run = RecordedRun(folder)
    problems, notes, open_ranks = run.damage(), run.notes(), run.open_ranks()
    if open_ranks:
        notes.append(
            f"{_ranks(open_ranks)}: no end of the run is recorded. The run continues, was "
            "killed, or lost its last records: the files cannot tell. A run that ends calls "
            "`Ledger.close`."
        )
    total = sum(size.values()) if isinstance(size, Mapping) else size
    if total and not run.segments:
        problems.append(f"no sample has a fate, of {total:,}: nothing is recorded.")
    killed = _KilledRanks(run)
    epochs: list[EpochAudit] = []
    for _, segments in groupby(run.segments, key=lambda segment: segment.epoch):
        check = _EpochCheck(run, [*segments], problems, notes)
        epochs.append(check.run_checks(epochs, killed, size))
    return Audit(
        folder=str(run.folder),
        attempts=run.starts(),
        epochs=tuple(epochs),
        open_ranks=tuple(open_ranks),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _checked_size(size: object) -> Size:
    if isinstance(size, Mapping):
        return {
            source: check_count(f"size[{source!r}]", number, 0, MAX_KEY)
            for source, number in size.items()
        }
    return None if size is None else check_count("size", size, 0, MAX_KEY)


class _KilledRanks:
    """The ranks that may lack steps of other ranks because they were killed earlier."""

    def __init__(self, run: RecordedRun) -> None:
        first = run.segments[0] if run.segments else None
        self.last_epochs = dict.fromkeys(run.by_rank, first.epoch - 1 if first else 0)
        # The steps done are counted over all epochs here.
        done = dict.fromkeys(run.by_rank, first.first if first else 0)
        latest_start = epoch_start = 0
        for epoch, group in groupby(run.segments, key=lambda segment: segment.epoch):
            segments = [*group]
            last_step = max(max(segment.lasts.values()) for segment in segments)
            epoch_stop = epoch_start + last_step + 1
            for segment in segments:
                self.last_epochs |= dict.fromkeys(segment.lasts, epoch)
                done |= {rank: epoch_start + last + 1 for rank, last in segment.lasts.items()}
                done |= dict.fromkeys(segment.ending, epoch_stop)
                latest_start = max([latest_start, *(epoch_start + step for step in segment.starts)])
            epoch_start = epoch_stop
        # All ranks reached the checkpoint that an attempt begins at, and the end of the run.
        ended = [
            done[rank]
            for rank, attempts in run.by_rank.items()
            if attempts and attempts[-1].has_ended
        ]
        least = max([latest_start, epoch_start - MOST_STEPS_BEHIND, *ended])
        self.ranks = {rank for rank, steps in done.items() if steps >= least}
        self.has_ends = bool((run.steps["flags"] & ENDS_EPOCH).any())

    def may_be_behind(self, rank: int, epoch: int) -> bool:
        """Tell whether a kill may explain that a rank has no record after this epoch."""
        return rank in self.ranks and self.last_epochs[rank] <= epoch

    def lacks_steps(self, rank: int, epoch: int) -> bool:
        """Tell whether a rank's last record is in this epoch, too far behind the other ranks."""
        return rank not in self.ranks and self.last_epochs.get(rank) == epoch


class _EpochCheck:
    """Checks the segments of one epoch, and adds to the problems and notes of the audit."""

    def __init__(
        self, run: RecordedRun, segments: Sequence[Segment], problems: list[str], notes: list[str]
    ) -> None:
        self.run, self.segments = run, segments
        self.epoch = segments[0].epoch
        self.steps = np.concatenate([segment.steps for segment in segments])
        self.samples = run.samples(self.steps)
        self.problems, self.notes = problems, notes

    def run_checks(
        self, earlier: Sequence[EpochAudit], killed: _KilledRanks, size: Size
    ) -> EpochAudit:
        """Check steps and samples, and return the result for the epoch."""
        is_complete = self._check_steps(earlier[-1].epoch if earlier else None, killed)
        self._compare_replaced()
        self._check_keys(size, is_complete)
        names = self.run.names
        counts = np.bincount(self.samples.names, minlength=len(names)).tolist()
        fates: dict[str, int] = {}
        for name, count in sorted(zip(names, counts, strict=True), key=lambda pair: pair[0].reason):
            if count:
                fate = _fate_of(name.reason)
                fates[fate] = fates.get(fate, 0) + count
        cuts = [0, *(np.flatnonzero(np.diff(self.steps["step"])) + 1).tolist(), len(self.steps)]
        digests = _digests(self.steps, self.samples, names, cuts)
        return EpochAudit(
            epoch=self.epoch,
            steps=len(digests),
            last_step=int(self.steps["step"][-1]),
            world_sizes=tuple(dict.fromkeys(segment.world_size for segment in self.segments)),
            is_complete=is_complete,
            fates=fates,
            filler=int((self.steps["flags"] & FILLER > 0).sum()),
            digest=digest_of_steps(digests),
            step_digests=digests,
        )

    def _check_steps(self, previous: int | None, killed: _KilledRanks) -> bool:
        """Check the steps of each rank, and return whether the epoch is complete.

        previous: the recorded epoch before this one.
        """
        epoch = self.epoch
        problems = list[str]()
        if previous is not None and epoch > previous + 1:
            problems.append(f"epoch {previous + 1} has no record, but epoch {epoch} has.")
        first = self.segments[0].first
        if first:
            text = f"epoch {epoch}: the steps before step {first} are not recorded."
            (self.notes if previous is None else problems).append(text)
        for segment in self.segments:
            for rank in segment.lasts:
                problems += _holes(segment, rank)
            absent = [
                rank
                for rank in range(segment.world_size)
                if rank not in segment.lasts and not killed.may_be_behind(rank, epoch)
            ]
            if absent:
                have = "has" if len(absent) == 1 else "have"
                problems.append(
                    f"epoch {epoch}: {_ranks(absent)} of {segment.world_size} {have} no record: "
                    "put the files of all ranks into the folder."
                )
        last = self.segments[-1]
        ranks = range(last.world_size)
        is_ended = last.ending >= {*ranks}
        if not is_ended and len({last.lasts.get(rank) for rank in ranks}) > 1:
            counts = [f"rank {rank} {(last.steps['rank'] == rank).sum()}" for rank in ranks]
            self._note(f"not all ranks have recorded as many steps: {', '.join(counts)}.")
        unended = [
            rank
            for rank in sorted(last.lasts.keys() - last.ending)
            if not killed.may_be_behind(rank, epoch)
        ]
        if unended:
            text = (
                f"epoch {epoch}: {_ranks(unended)}: the epoch has no end: it was left, or its last "
                "steps are not recorded"
            )
            if killed.has_ends or any(killed.lacks_steps(rank, epoch) for rank in unended):
                problems.append(f"{text}.")
            else:
                self.notes.append(f"{text}; or the graph has no `RankAligner`, which knows it.")
        self.problems += problems
        return not first and not problems and is_ended

    def _compare_replaced(self) -> None:
        """Note steps that had other samples in an earlier attempt: a resume should repeat steps."""
        replaced = self.run.replaced[self.run.replaced["epoch"] == self.epoch]
        if not len(replaced):
            return
        counting = dict(self._digests_by_place(self.steps))
        differing: dict[int, list[int]] = {}
        for (rank, step), digest in self._digests_by_place(replaced):
            if counting.get((rank, step), digest) != digest:
                differing.setdefault(rank, []).append(step)
        for rank, steps in sorted(differing.items()):
            self._note(
                f"rank {rank}: an earlier attempt had other samples at step "
                f"{ranges(np.unique(steps))}: it belongs to another run, or data or configuration "
                "have changed since."
            )

    def _digests_by_place(self, steps: Steps) -> list[tuple[tuple[int, int], bytes]]:
        """Return (rank, step) and digest of each record of a step."""
        digests = _digests(steps, self.run.samples(steps), self.run.names, range(len(steps) + 1))
        places = zip(steps["rank"].tolist(), steps["step"].tolist(), strict=True)
        return [*zip(places, map(bytes, digests), strict=True)]

    def _check_keys(self, size: Size, is_complete: bool) -> None:
        """Check that no sample has several fates, and that none is missing."""
        sources = self._by_source()
        if isinstance(size, int) and len(sources) > 1:
            if not any(file.problems for file in self.run.files):
                raise ValueError(
                    f"`size` must be a dict, with the sizes of the sources {sorted(sources)} by "
                    f"name, but is {size} instead."
                )
            self._problem(f"the size {size:,} is not compared: names of sources are damaged.")
            size = None
        sizes = dict.fromkeys(sources, size) if isinstance(size, int) else size or {}
        for source, parts in sources.items():
            keys = [self._check_source(source, indices) for indices in parts]
            if source in sizes:
                self._compare_size(source, sizes[source], keys, is_complete)
        for source in sizes if is_complete else ():
            if sizes[source] and source not in sources:
                self._problem(f"no sample{_of_name(source)} has a fate, of {sizes[source]:,}.")

    def _by_source(self) -> dict[str, list[IntArray]]:
        """Return the indices of each source's samples by key: one array, or one for each rank."""
        names, samples, per_rank = self.run.names, self.samples, self.run.per_rank_sources
        numbers: dict[str, int] = {}
        source_of_name = [numbers.setdefault(name.source, len(numbers)) for name in names]
        group = np.array(source_of_name)[samples.names]
        if per_rank:
            ranks = np.repeat(self.steps["rank"] + 1, self.steps["samples"])
            is_per_rank = np.array([name.source in per_rank for name in names])[samples.names]
            group = group * (int(ranks.max(initial=0)) + 1) + ranks * is_per_rank
        order = np.lexsort((samples.repeats, samples.keys, group))
        cuts = np.flatnonzero(np.diff(group[order])) + 1
        by_source: dict[str, list[IntArray]] = {}
        for indices in np.split(order, cuts) if len(order) else ():
            source = names[samples.names[indices[0]]].source
            by_source.setdefault(source, []).append(indices)
        return by_source

    def _check_source(self, source: str, indices: IntArray) -> IntArray:
        """Report keys with several fates; return the sorted keys of the source, each once."""
        keys, repeats = self.samples.keys[indices], self.samples.repeats[indices]
        unkeyed = int(np.searchsorted(keys, 0))  # `NO_KEY` sorts before all keys
        if unkeyed:
            self._note(f"{unkeyed:,} samples{_of_name(source)} have no key: they are only counted.")
        indices = indices[unkeyed:]
        starts = np.flatnonzero(np.diff(keys[unkeyed:], prepend=NO_KEY))  # first sample of each key
        is_repeated = np.diff(starts, append=len(indices)) > 1
        if repeats.any() and is_repeated.any():
            self._note(
                f"{is_repeated.sum():,} keys{_of_name(source)} come more than once by intent: "
                "their source begins again, or a sampler draws them. Each repeat has one fate; "
                "repeats of left-out samples cannot be told apart."
            )
            is_trained = np.array([not name.reason for name in self.run.names])
            indices = indices[is_trained[self.samples.names[indices]]]
        pairs = np.stack((self.samples.keys[indices], self.samples.repeats[indices].astype(int)))
        equal = np.flatnonzero((np.diff(pairs) == 0).all(0))
        self._report_several(source, indices[np.union1d(equal, equal + 1)])
        return np.append(keys[:unkeyed], keys[unkeyed:][starts])

    def _report_several(self, source: str, indices: IntArray) -> None:
        """Report keys with several fates: `indices` are their samples, sorted by key."""
        keys = self.samples.keys[indices]
        groups = np.split(indices, np.flatnonzero(np.diff(keys)) + 1) if len(indices) else []
        for group in groups[:MOST_NAMED]:
            fates = []
            for index in group[:MOST_NAMED].tolist():
                step = self.steps[np.searchsorted(self.samples.stops, index, side="right")]
                fate = _fate_of(self.run.names[self.samples.names[index]].reason)
                fates.append(f"{fate} at rank {step['rank']} step {step['step']}")
            if len(group) > MOST_NAMED:
                fates.append(f"{len(group) - MOST_NAMED:,} more")
            self._problem(
                f"key {self.samples.keys[group[0]]}{_of_name(source)} has {len(group)} fates: "
                f"{'; '.join(fates)}."
            )
        if len(groups) > MOST_NAMED:
            more = len(groups) - MOST_NAMED
            self._problem(f"{more:,} more keys{_of_name(source)} have several fates.")

    def _compare_size(
        self, source: str, size: int, parts: Sequence[IntArray], is_complete: bool
    ) -> None:
        """Compare the number of keys of a source with its size. `parts`: its keys, by rank."""
        count = sum(map(len, parts))
        if count > size:
            self._problem(f"{count:,} samples{_of_name(source)} have a fate, but it has {size:,}.")
        if count >= size or not is_complete:
            return
        text = f"{size - count:,} of {size:,} samples{_of_name(source)} have no fate"
        keys = parts[0]
        if len(parts) == 1 and (not count or (keys[0] >= 0 and keys[-1] < size)):  # indices
            is_missing = np.ones(size, bool)
            is_missing[keys] = False
            noun = "key" if count == size - 1 else "keys"
            text += f": {noun} {ranges(np.flatnonzero(is_missing))}"
        self._problem(f"{text}.")

    def _problem(self, text: str) -> None:
        self.problems.append(f"epoch {self.epoch}: {text}")

    def _note(self, text: str) -> None:
        self.notes.append(f"epoch {self.epoch}: {text}")


def _digests(steps: Steps, samples: Samples, names: Sequence[Name], cuts: Iterable[int]) -> Digests:
    """Return a digest of the steps between each two consecutive indices in `cuts`."""
    name_digests = [blake2b(json.dumps([*name]).encode(), digest_size=8).digest() for name in names]
    columns = (
        samples.keys,
        samples.repeats,
        np.frombuffer(b"".join(name_digests), np.int64)[samples.names],
    )
    heads = np.column_stack(
        (steps["step"], steps["rank"], steps["samples"], steps["flags"] & FILLER)
    )
    stops, digests = [0, *samples.stops.tolist()], []
    for first, stop in pairwise(cuts):
        rows = slice(stops[first], stops[stop])
        parts = [heads[first:stop], *(column[rows] for column in columns)]
        data = b"".join(part.tobytes() for part in parts)
        digests.append(blake2b(data, digest_size=DIGEST_BYTES).digest())
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def _holes(segment: Segment, rank: int) -> Iterator[str]:
    """Yield the problem of steps that a rank has recorded twice, and of missing steps."""
    steps = segment.steps["step"][segment.steps["rank"] == rank]
    stop = segment.lasts[rank] + 1 if segment.stop is None else segment.stop
    wrong = {
        "recorded more than once": np.unique(steps[1:][steps[1:] == steps[:-1]]),
        "not recorded": np.setdiff1d(np.arange(segment.first, stop), steps),
    }
    for text, numbers in wrong.items():
        if len(numbers):
            yield f"rank {rank}, epoch {segment.epoch}: {text}: step {ranges(numbers)}."


def ranges(numbers: npt.ArrayLike) -> str:
    """Return sorted, different numbers as text: `3, 7 to 9`; at most `MOST_NAMED` ranges."""
    array = np.asarray(numbers)
    parts = np.split(array, np.flatnonzero(np.diff(array) > 1) + 1)
    names = [
        str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}"
        for part in parts[:MOST_NAMED]
    ]
    if more := sum(map(len, parts[MOST_NAMED:])):
        names.append(f"{more:,} more")
    return ", ".join(names)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def _fate_of(reason: str) -> str:
    if not reason:
        return "trained"
    return reason if reason in _FATES else f"skipped ({reason})"


def _of_name(source: str) -> str:
    return f" of source {source!r}" if source else ""
