"""Which keys of an epoch come more than once, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from odb_nodes.ledger.entries import TRAINED, Entries, Ints
from odb_nodes.ledger.history import ranges

MOST_NAMED = 20
"""Keys that are named where more are wrong in the same way."""
OWN_FATES = ("dropped", "unemitted", "excluded")


@dataclass
class Findings:
    """What was found out of an epoch.

    Attributes:
        problems: what contradicts that each sample has one fate.
        notes: what else is to be known, or could not be checked.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def fate_of(reason: str) -> str:
    """Return the fate of a sample by the reason that its record has; "" for one in a batch."""
    if not reason:
        return "trained"
    return reason if reason in OWN_FATES else f"skipped ({reason})"


def check_keys(
    entries: Entries,
    size: int | Mapping[str, int] | None,
    is_complete: bool,
    is_damaged: bool,
) -> Findings:
    """Return which keys of an epoch have several fates, or none."""
    found = Findings()
    names = entries.names
    numbers = np.flatnonzero(np.bincount(entries.sources, minlength=len(names.sources)))
    by_name: dict[str, list[int]] = {}
    for (name, _), number in names.sources.items():
        if number in numbers:
            by_name.setdefault(name, []).append(number)
    if is_damaged and isinstance(size, int) and len(by_name) > 1:
        found.problems.append(f"the size {size:,} is not compared: names of sources are damaged.")
        size = None
    sizes = _sizes(size, by_name)
    for name, own in by_name.items():
        parts = [_check_source(entries, name, number, found) for number in own]
        if name in sizes:
            keys = parts[0].keys if len(parts) == 1 else None
            known = sum(len(part.keys) for part in parts)
            without = sum(part.without_key for part in parts)
            _check_size(name, sizes[name], keys, known, without, is_complete, found)
    for name in sizes.keys() - by_name.keys():
        if is_complete and sizes[name]:
            found.problems.append(f"no sample{_of(name)} has a fate, of {sizes[name]:,}.")
    return found


@dataclass
class _Keys:
    """The keys of a source without repeats, (n,) int64, and the number of samples without one."""

    keys: Ints
    without_key: int


def _check_source(entries: Entries, name: str, number: int, found: Findings) -> _Keys:
    """Find the keys of a source that have several fates."""
    is_own = entries.sources == number
    keys = entries.keys if is_own.all() else entries.keys[is_own]
    ordered = np.sort(keys)
    without = int(np.searchsorted(ordered, 0))  # `NO_KEY` is below all keys
    if without:
        found.notes.append(f"{without:,} samples{_of(name)} have no key: they are only counted.")
    ordered = ordered[without:]
    is_new = np.ones(len(ordered), bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    distinct, several = ordered[is_new], np.unique(ordered[~is_new])
    del ordered, is_new
    if len(several):
        nearest = np.minimum(np.searchsorted(several, keys), len(several) - 1)
        has_several = several[nearest] == keys
        del nearest  # 8 bytes a sample, as all that is deleted here
        at = np.flatnonzero(is_own)[has_several]
        if (repeats := entries.repeats) is not None and repeats[is_own].any():
            at = _not_told_apart(entries, repeats, name, at, len(several), found)
        else:
            at = at[np.argsort(entries.keys[at], kind="stable")]
        _name_several(entries, name, at, found)
    return _Keys(distinct, without)


def _not_told_apart(
    entries: Entries,
    all_repeats: npt.NDArray[np.signedinteger],
    name: str,
    at: Ints,
    several: int,
    found: Findings,
) -> Ints:
    """Return which samples with the same key have the same repeat, too, by key.

    Args:
        entries: the samples of the epoch.
        all_repeats: their repeats, (n,).
        name: of the source.
        at: which of them have a key that comes more than once, (n,) int64.
        several: number of those keys.
        found: what a note is added to.
    """
    is_trained = entries.fates[at] == TRAINED
    found.notes.append(
        f"{several:,} keys{_of(name)} come more than once by intent: their source begins again, or "
        "a sampler draws them. Each repeat has one fate"
        f"{'' if is_trained.all() else ', but those of left-out samples are not told apart'}."
    )
    at = at[is_trained]
    keys, repeats = entries.keys[at], all_repeats[at]
    order = np.lexsort((repeats, keys))
    keys = keys[order]
    is_same = keys[1:] == keys[:-1]
    del keys
    repeats = repeats[order]
    same = np.flatnonzero(is_same & (repeats[1:] == repeats[:-1]))
    return at[order[np.union1d(same, same + 1)]]


def _name_several(entries: Entries, name: str, at: Ints, found: Findings) -> None:
    """Say where the samples of each key that has several fates are, and which fates.

    Args:
        entries: the samples of the epoch.
        name: of the source.
        at: which of them, by key, (n,) int64.
        found: what problems are added to.
    """
    if not len(at):
        return
    reasons = {number: text for text, number in entries.names.reasons.items()}
    groups = np.split(at, np.flatnonzero(np.diff(entries.keys[at])) + 1)
    for group in groups[:MOST_NAMED]:
        fates = []
        for one in group[:MOST_NAMED].tolist():
            record = int(np.searchsorted(entries.ends, one, side="right"))
            where = f"rank {entries.ranks[record]} step {entries.steps[record]}"
            fates.append(f"{fate_of(reasons[int(entries.fates[one])])} at {where}")
        fates += [f"{len(group) - MOST_NAMED:,} more"] * (len(group) > MOST_NAMED)
        found.problems.append(
            f"key {entries.keys[group[0]]}{_of(name)} has {len(group)} fates: {'; '.join(fates)}."
        )
    if len(groups) > MOST_NAMED:
        found.problems.append(
            f"{len(groups) - MOST_NAMED:,} more keys{_of(name)} have several fates."
        )


def _check_size(
    name: str,
    size: int,
    keys: Ints | None,
    known: int,
    without: int,
    is_complete: bool,
    found: Findings,
) -> None:
    """Compare the samples of a source with its size."""
    have = known + without
    if have > size:
        found.problems.append(f"{have:,} samples{_of(name)} have a fate, but it has {size:,}.")
    if have >= size or not is_complete:
        return
    are_indices = keys is not None and not without and (not len(keys) or keys[-1] < size)
    text = f"{size - have:,} of {size:,} samples{_of(name)} have no fate"
    if are_indices:
        is_missing = np.ones(size, bool)
        is_missing[keys] = False
        text += f": {'key' if have == size - 1 else 'keys'} {ranges(np.flatnonzero(is_missing))}"
    found.problems.append(f"{text}.")


def _sizes(
    size: int | Mapping[str, int] | None, sources: Mapping[str, list[int]]
) -> Mapping[str, int]:
    if isinstance(size, Mapping):
        return size
    if size is None or not sources:
        return {}
    if len(sources) > 1:
        raise ValueError(
            f"`size` must be a dict, with the sizes of the sources {sorted(sources)} by name, but "
            f"is {size} instead."
        )
    return dict.fromkeys(sources, size)


def _of(name: str) -> str:
    return f" of source {name!r}" if name else ""
