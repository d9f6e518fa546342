"""Check that every sample has one fate per epoch, over all ranks and attempts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from odb_nodes._core.checks import MAX_KEY, check_count
from odb_nodes._core.text import counted
from odb_nodes.ledger.history import Ints, Run, Samples, Segment, Steps
from odb_nodes.ledger.records import ENDS_EPOCH, FILLER, NO_KEY, Name

DIGEST_BYTES = 32
MOST_NAMED = 20
"""Keys, or ranges of numbers, that are named where more are wrong in the same way."""
MOST_STEPS_BEHIND = 16
"""Steps that the file of a killed rank may lack of those of another.

Ranks meet at each optimizer step, so that one is ahead of another by a few steps at most.
"""
OWN_FATES = ("dropped", "unemitted", "excluded")

Size = int | Mapping[str, int] | None
Digests = npt.NDArray[np.uint8]
"""Digest of each step, (steps, DIGEST_BYTES)."""


def digest_of(step_digests: Digests) -> str:
    """Return the digest of some steps by those of each."""
    return blake2b(step_digests.tobytes(), digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, kw_only=True)
class EpochAudit:
    """The result of an audit for one epoch.

    Attributes:
        epoch: number of the epoch.
        steps: number of steps that are recorded.
        last_step: the last of them.
        world_sizes: numbers of ranks that it was trained with; more than one where that changed.
        is_complete: whether all of its steps are recorded, on all ranks, from the first to the one
            that ends it.
        fates: fate -> number of samples: `"trained"`, `"dropped"`, `"excluded"`,
            `"unemitted"`, or `"skipped (reason)"`.
        filler: number of steps of a rank that had no sample of its own.
        digest: of all steps, 64 hexadecimal digits: equal where two runs had the same samples with
            the same fates at every step of every rank.
        step_digests: digest of each recorded step, of what all ranks had, (steps, 32) uint8.
    """

    epoch: int
    steps: int
    last_step: int
    world_sizes: tuple[int, ...]
    is_complete: bool
    fates: dict[str, int]
    filler: int
    digest: str
    step_digests: Digests = field(repr=False, compare=False)

    def digest_of_first(self, steps: int) -> str:
        """Return the digest of the first so many recorded steps.

        Args:
            steps: number of steps; all where fewer are recorded.

        Raises:
            TypeError, ValueError: `steps` is not a number of at least 0.
        """
        return digest_of(self.step_digests[: check_count("steps", steps, 0)])

    def __str__(self) -> str:
        extent = "complete" if self.is_complete else f"partial, to step {self.last_step:,}"
        fates = ", ".join(f"{count:,} {fate}" for fate, count in self.fates.items())
        return (
            f"epoch {self.epoch}: {extent}; {counted(self.steps, 'step')}; "
            f"{fates or 'no samples'}; {counted(self.filler, 'filler step')}\n"
            f"  digest {self.digest}"
        )


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit; as a string, its report.

    Attributes:
        folder: the folder of the ledger.
        attempts: rank -> the epoch and step at which each of its attempts begins.
        epochs: what is recorded of each epoch.
        open_ranks: ranks whose last attempt has no end: they go on, were killed, or their last
            records are missing.
        problems: what is missing, double, changed or damaged, by rank, step and key.
        notes: further facts, and what could not be checked.
    """

    folder: str
    attempts: dict[int, tuple[tuple[int, int], ...]]
    epochs: tuple[EpochAudit, ...]
    open_ranks: tuple[int, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether each sample has one fate per epoch, and no step is missing.

        Of a run that is `"open"`, this can be said only where each of its epochs is complete.
        """
        is_whole = bool(self.epochs) and all(epoch.is_complete for epoch in self.epochs)
        return self.state == "ended" or (self.state == "open" and is_whole)

    @property
    def state(self) -> Literal["ended", "open", "damaged"]:
        """What the records are.

        `"damaged"` where there is any problem; else `"ended"` where all ranks have recorded the end
        of the run; else `"open"`: nothing is wrong in what is recorded, but more may be missing.
        """
        if self.problems:
            return "damaged"
        return "open" if self.open_ranks else "ended"

    def __str__(self) -> str:
        begun: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank, starts in self.attempts.items():
            begun.setdefault(starts, []).append(rank)
        lines = [f"{self.folder}: {self._verdict()}"]
        for starts, ranks in begun.items():
            places = ", ".join(f"epoch {epoch} step {step}" for epoch, step in starts)
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            lines.append(f"{who}: {counted(len(starts), 'attempt')}{places and ', from '}{places}")
        lines += [str(epoch) for epoch in self.epochs]
        lines += [f"note: {text}" for text in self.notes]
        lines += [f"PROBLEM: {text}" for text in self.problems]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.problems:
            return counted(len(self.problems), "problem")
        if not self.open_ranks:
            return "OK"
        return f"{'OK so far' if self.ok else 'OPEN, no problem so far'}; no end is recorded"


def audit(folder: str | os.PathLike[str], size: int | Mapping[str, int] | None = None) -> Audit:
    """Return what became of every sample that a `Ledger` has recorded, and what is wrong.

    Args:
        folder: the folder that all ranks have written to; or one that their files were put into;
            or the folder of a run that has one such folder in it.
        size: number of samples of the data over all ranks; a dict source -> size where several
            are mixed. In a complete epoch each sample must have a fate: missing indices are named,
            other keys counted. Leave out a source that is drawn from at random, or is not read to
            its end.

    Returns:
        Facts and problems. `audit(...).ok` is true if there are no problems, and the run has ended
        or all of its epochs are complete: see `Audit.state`.

    Raises:
        TypeError, ValueError: `size` does not fit the sources, `folder` holds no ledger, or an
            attempt in it is of another version.
        FileNotFoundError: there is no ledger in the folder.
    """
    size = _checked_size(size)
    run = Run(folder)
    problems, notes = run.damage(), [text for file in run.files for text in file.notes]
    notes += [f"rank {one.rank}: nothing is recorded." for one in run.files if not one.headers]
    notes += run.begun_anew()
    if left := run.open_ranks():
        notes.append(
            f"rank {ranges(left)}: no end of the run is recorded. It goes on, or was killed, or "
            "its last records are missing: the files cannot tell. A run that ends calls "
            "`Ledger.close`."
        )
    if not run.segments and (total := sum(size.values()) if isinstance(size, Mapping) else size):
        problems.append(f"no sample has a fate, of {total:,}: nothing is recorded.")
    killed = _Killed(run)
    epochs: list[EpochAudit] = []
    for _, own in groupby(run.segments, key=lambda one: one.epoch):
        epochs.append(_EpochCheck(run, [*own], problems, notes).check(epochs, killed, size))
    return Audit(
        folder=str(run.folder),
        attempts=run.starts(),
        epochs=tuple(epochs),
        open_ranks=tuple(left),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _checked_size(size: object) -> Size:
    if isinstance(size, Mapping):
        return {name: check_count(f"size[{name!r}]", one, 0, MAX_KEY) for name, one in size.items()}
    return None if size is None else check_count("size", size, 0, MAX_KEY)


class _Killed:
    """Which ranks may lack steps of others, since they were killed before they recorded them."""

    def __init__(self, run: Run) -> None:
        first = run.segments[0] if run.segments else None
        self.last_epochs = dict.fromkeys(run.by_rank, first.epoch - 1 if first else 0)
        done = dict.fromkeys(run.by_rank, first.first if first else 0)
        begun = before = 0  # steps, as those of `done`, are counted over epochs
        for epoch, group in groupby(run.segments, key=lambda one: one.epoch):
            segments = [*group]
            stop = before + 1 + max(max(one.lasts.values()) for one in segments)
            for one in segments:
                self.last_epochs |= dict.fromkeys(one.lasts, epoch)
                done |= {rank: before + last + 1 for rank, last in one.lasts.items()}
                done |= dict.fromkeys(one.ending, stop)
                begun = max([begun, *(before + step for step in one.begun)])
            before = stop
        # A checkpoint that an attempt begins at is of all ranks; so is the end of a run.
        closed = [done[rank] for rank, own in run.by_rank.items() if own and own[-1].has_ended]
        least = max([begun, before - MOST_STEPS_BEHIND, *closed])
        self.ranks = {rank for rank, steps in done.items() if steps >= least}
        self.has_ends = bool((run.steps["flags"] & ENDS_EPOCH).any())

    def may_be_behind(self, rank: int, epoch: int) -> bool:
        """Tell whether a rank that was killed may have no further record from this epoch on."""
        return rank in self.ranks and self.last_epochs[rank] <= epoch

    def lacks_steps(self, rank: int, epoch: int) -> bool:
        """Tell whether a rank has its last record in this epoch, too far behind others."""
        return rank not in self.ranks and self.last_epochs.get(rank) == epoch


class _EpochCheck:
    """What is found out of the segments of one epoch, added to the problems and notes of all."""

    def __init__(
        self, run: Run, segments: Sequence[Segment], problems: list[str], notes: list[str]
    ) -> None:
        self.run, self.segments, self.epoch = run, segments, segments[0].epoch
        self.steps = np.concatenate([one.steps for one in segments])
        self.samples = run.samples(self.steps)
        self.problems, self.notes = problems, notes

    def check(self, before: Sequence[EpochAudit], killed: _Killed, size: Size) -> EpochAudit:
        """Check steps and samples, and return what the ledger says of the epoch."""
        is_complete = self._check_steps(before[-1].epoch if before else None, killed)
        self._compare_replaced()
        self._check_keys(size, is_complete)
        names = self.run.names
        counts = np.bincount(self.samples.names, minlength=len(names)).tolist()
        fates: dict[str, int] = {}
        for name, count in sorted(zip(names, counts, strict=True), key=lambda one: one[0].reason):
            if count:
                fate = _fate_of(name.reason)
                fates[fate] = fates.get(fate, 0) + count
        cuts = [0, *(np.flatnonzero(np.diff(self.steps["step"])) + 1).tolist(), len(self.steps)]
        digests = _digests(self.steps, self.samples, names, cuts)
        return EpochAudit(
            epoch=self.epoch,
            steps=len(digests),
            last_step=int(self.steps["step"][-1]),
            world_sizes=tuple(dict.fromkeys(one.world_size for one in self.segments)),
            is_complete=is_complete,
            fates=fates,
            filler=int((self.steps["flags"] & FILLER > 0).sum()),
            digest=digest_of(digests),
            step_digests=digests,
        )

    def _check_steps(self, before: int | None, killed: _Killed) -> bool:
        """Check the steps on each rank, and return whether the epoch is complete."""
        epoch, found = self.epoch, list[str]()
        if before is not None and epoch > before + 1:
            found.append(f"epoch {before + 1} has no record, but epoch {epoch} has.")
        if first := self.segments[0].first:
            text = f"epoch {epoch}: what was before step {first} is not recorded."
            (self.notes if before is None else found).append(text)
        last = self.segments[-1]
        for one in self.segments:
            for rank in one.lasts:
                found += _holes(one, rank)
            absent = [
                rank
                for rank in range(one.world_size)
                if rank not in one.lasts and not killed.may_be_behind(rank, epoch)
            ]
            if absent:
                found.append(
                    f"epoch {epoch}: rank {ranges(absent)} of {one.world_size} has no record: put "
                    "the files of all ranks into the folder."
                )
        ranks = range(last.world_size)
        is_ended = last.ending >= {*ranks}
        if not is_ended and len({last.lasts.get(rank) for rank in ranks}) > 1:
            counts = [f"rank {rank} {(last.steps['rank'] == rank).sum()}" for rank in ranks]
            self._note(f"not all ranks have recorded as many steps: {', '.join(counts)}.")
        left = sorted(last.lasts.keys() - last.ending)
        if left := [rank for rank in left if not killed.may_be_behind(rank, epoch)]:
            text = (
                f"epoch {epoch}: rank {ranges(left)}: the epoch has no end: it was left, or its "
                "last steps are not recorded"
            )
            if killed.has_ends or any(killed.lacks_steps(rank, epoch) for rank in left):
                found.append(f"{text}.")
            else:
                self.notes.append(f"{text}; or the graph has no `RankAligner`, which knows it.")
        self.problems += found
        return not first and not found and is_ended

    def _compare_replaced(self) -> None:
        """Say which steps had other samples in an attempt before: a resume repeats them."""
        replaced = self.run.replaced[self.run.replaced["epoch"] == self.epoch]
        found: list[list[tuple[tuple[int, int], bytes]]] = []
        for steps in (self.steps, replaced) if len(replaced) else ():
            cuts = range(len(steps) + 1)
            digests = _digests(steps, self.run.samples(steps), self.run.names, cuts)
            places = zip(steps["rank"].tolist(), steps["step"].tolist(), strict=True)
            found.append([*zip(places, map(bytes, digests), strict=True)])
        counted = dict(found[0]) if found else {}
        differing: dict[int, list[int]] = {}
        for (rank, step), digest in found[1] if found else ():
            if counted.get((rank, step), digest) != digest:
                differing.setdefault(rank, []).append(step)
        for rank, steps in sorted(differing.items()):
            self._note(
                f"rank {rank}: an earlier attempt had other samples at step "
                f"{ranges(np.unique(steps))}: it is of another run, or data or configuration have "
                "changed since."
            )

    def _check_keys(self, size: Size, is_complete: bool) -> None:
        """Find the samples that have several fates, and those that have none."""
        sources = self._by_source()
        if isinstance(size, int) and len(sources) > 1:
            if not any(one.problems for one in self.run.files):
                raise ValueError(
                    f"`size` must be a dict, with the sizes of the sources {sorted(sources)} by "
                    f"name, but is {size} instead."
                )
            self._problem(f"the size {size:,} is not compared: names of sources are damaged.")
            size = None
        sizes = dict.fromkeys(sources, size) if isinstance(size, int) else size or {}
        for source, parts in sources.items():
            keys = [self._check_source(source, at) for at in parts]
            if source in sizes:
                self._compare_size(source, sizes[source], keys, is_complete)
        for source in sizes if is_complete else ():
            if sizes[source] and source not in sources:
                self._problem(f"no sample{_of(source)} has a fate, of {sizes[source]:,}.")

    def _by_source(self) -> dict[str, list[Ints]]:
        """Return the samples of each source, by key; apart for each rank that has it for itself."""
        names, samples = self.run.names, self.samples
        numbers: dict[str, int] = {}
        of_names = [numbers.setdefault(name.source, len(numbers)) for name in names]
        group = np.array(of_names)[samples.names]
        if self.run.own:
            ranks = np.repeat(self.steps["rank"] + 1, self.steps["samples"])
            is_own = np.array([name.source in self.run.own for name in names])[samples.names]
            group = group * (int(ranks.max(initial=0)) + 1) + ranks * is_own
        order = np.lexsort((samples.repeats, samples.keys, group))
        found: dict[str, list[Ints]] = {}
        for at in np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else ():
            found.setdefault(names[samples.names[at[0]]].source, []).append(at)
        return found

    def _check_source(self, source: str, at: Ints) -> Ints:
        """Find the keys of a source that have several fates; return its keys, sorted, each once."""
        keys, repeats = self.samples.keys[at], self.samples.repeats[at]
        without = int(np.searchsorted(keys, 0))  # `NO_KEY` is below all keys
        if without:
            self._note(f"{without:,} samples{_of(source)} have no key: they are only counted.")
        at = at[without:]
        starts = np.flatnonzero(np.diff(keys[without:], prepend=NO_KEY))  # of each key
        is_repeated = np.diff(starts, append=len(at)) > 1
        if repeats.any() and is_repeated.any():
            self._note(
                f"{is_repeated.sum():,} keys{_of(source)} come more than once by intent: their "
                "source begins again, or a sampler draws them. Each repeat has one fate; those of "
                "left-out samples are not told apart."
            )
            at = at[np.array([not one.reason for one in self.run.names])[self.samples.names[at]]]
        compared = np.stack((self.samples.keys[at], self.samples.repeats[at].astype(np.int64)))
        same = np.flatnonzero((np.diff(compared) == 0).all(0))
        self._name_several(source, at[np.union1d(same, same + 1)])
        return np.append(keys[:without], keys[without:][starts])

    def _name_several(self, source: str, at: Ints) -> None:
        """Say where the samples of each key that has several fates are, and which fates."""
        keys = self.samples.keys[at]
        groups = np.split(at, np.flatnonzero(np.diff(keys)) + 1) if len(at) else []
        for group in groups[:MOST_NAMED]:
            fates = []
            for one in group[:MOST_NAMED].tolist():
                step = self.steps[np.searchsorted(self.samples.stops, one, side="right")]
                fate = _fate_of(self.run.names[self.samples.names[one]].reason)
                fates.append(f"{fate} at rank {step['rank']} step {step['step']}")
            fates += [f"{len(group) - MOST_NAMED:,} more"] * (len(group) > MOST_NAMED)
            self._problem(
                f"key {self.samples.keys[group[0]]}{_of(source)} has {len(group)} fates: "
                f"{'; '.join(fates)}."
            )
        if (more := len(groups) - MOST_NAMED) > 0:
            self._problem(f"{more:,} more keys{_of(source)} have several fates.")

    def _compare_size(
        self, source: str, size: int, parts: Sequence[Ints], is_complete: bool
    ) -> None:
        """Compare the keys of a source, and of each rank that has it for itself, with its size."""
        have = sum(map(len, parts))
        if have > size:
            self._problem(f"{have:,} samples{_of(source)} have a fate, but it has {size:,}.")
        if have >= size or not is_complete:
            return
        text = f"{size - have:,} of {size:,} samples{_of(source)} have no fate"
        keys = parts[0]
        if len(parts) == 1 and (not have or (keys[0] >= 0 and keys[-1] < size)):  # indices
            missing = np.ones(size, bool)
            missing[keys] = False
            text += f": {'key' if have == size - 1 else 'keys'} {ranges(np.flatnonzero(missing))}"
        self._problem(f"{text}.")

    def _problem(self, text: str) -> None:
        self.problems.append(f"epoch {self.epoch}: {text}")

    def _note(self, text: str) -> None:
        self.notes.append(f"epoch {self.epoch}: {text}")


def _digests(steps: Steps, samples: Samples, names: Sequence[Name], cuts: Iterable[int]) -> Digests:
    """Return a digest of what ranks had from each of some indices of steps to the next one."""
    of_names = [blake2b(json.dumps([*one]).encode(), digest_size=8).digest() for one in names]
    columns = (
        samples.keys,
        samples.repeats,
        np.frombuffer(b"".join(of_names), np.int64)[samples.names],
    )
    heads = np.column_stack(
        (steps["step"], steps["rank"], steps["samples"], steps["flags"] & FILLER)
    )
    stops, digests = [0, *samples.stops.tolist()], []
    for a, b in pairwise(cuts):
        parts = [heads[a:b], *(column[stops[a] : stops[b]] for column in columns)]
        data = b"".join(part.tobytes() for part in parts)
        digests.append(blake2b(data, digest_size=DIGEST_BYTES).digest())
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def _holes(segment: Segment, rank: int) -> Iterator[str]:
    """Say which steps of a segment a rank has not recorded, or more than once."""
    steps = segment.steps["step"][segment.steps["rank"] == rank]
    stop = segment.lasts[rank] + 1 if segment.stop is None else segment.stop
    wrong = {
        "recorded more than once": np.unique(steps[1:][steps[1:] == steps[:-1]]),
        "not recorded": np.setdiff1d(np.arange(segment.first, stop), steps),
    }
    for text, which in wrong.items():
        if len(which):
            yield f"rank {rank}, epoch {segment.epoch}: {text}: step {ranges(which)}."


def ranges(numbers: npt.ArrayLike) -> str:
    """Return sorted numbers without repeats as text: `3, 7 to 9`; of many, the first are named."""
    parts = np.split(found := np.asarray(numbers), np.flatnonzero(np.diff(found) > 1) + 1)
    named = [
        str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in parts[:MOST_NAMED]
    ]
    more = sum(map(len, parts[MOST_NAMED:]))
    return ", ".join(named + [f"{more:,} more"] * bool(more))


def _fate_of(reason: str) -> str:
    if not reason:
        return "trained"
    return reason if reason in OWN_FATES else f"skipped ({reason})"


def _of(source: str) -> str:
    return f" of source {source!r}" if source else ""
