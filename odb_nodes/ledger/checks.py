"""Which keys of an epoch come more than once, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from odb_nodes.ledger.entries import TRAINED, Entries, Ints
from odb_nodes.ledger.history import ranges
from odb_nodes.ledger.records import NO_KEY

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
    entries: Entries, size: int | Mapping[str, int] | None, is_complete: bool
) -> Findings:
    """Return which keys of an epoch have several fates, or none.

    Args:
        entries: the samples of the epoch.
        size: samples of the data, of each source where there are several; `None`: not known.
        is_complete: whether the whole epoch was recorded, so that none may be missing.
    """
    found = Findings()
    names = entries.names
    numbers = np.flatnonzero(np.bincount(entries.sources, minlength=len(names.sources)))
    by_name: dict[str, list[int]] = {}
    for (name, _), number in names.sources.items():
        if number in numbers:
            by_name.setdefault(name, []).append(number)
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
    whole = entries.sources.min() == entries.sources.max()
    chosen = slice(None) if whole else np.flatnonzero(entries.sources == number)
    keys = entries.keys[chosen]
    repeats = None if entries.repeats is None else entries.repeats[chosen]
    repeats = repeats if repeats is not None and repeats.any() else None
    without = int((keys == NO_KEY).sum())
    if without:
        found.notes.append(f"{without:,} samples{_of(name)} have no key: they are only counted.")
    if repeats is None:
        ordered = np.sort(keys)
        is_new = np.diff(ordered, prepend=NO_KEY - 1) > 0
        several = np.unique(ordered[~is_new & (ordered != NO_KEY)])
        distinct = ordered[is_new & (ordered != NO_KEY)]
        if len(several):
            _name_several(entries, name, chosen, np.isin(keys, several), found)
        return _Keys(distinct, without)
    trained = entries.fates[chosen] == TRAINED
    order = np.lexsort((repeats, keys))
    order = order[(trained & (keys != NO_KEY))[order]]
    same_key = np.diff(keys[order]) == 0
    same = np.flatnonzero(same_key & (np.diff(repeats[order]) == 0))
    if same_key.any():
        found.notes.append(
            f"{_count(keys[order[1:][same_key]])} keys{_of(name)} come more than once by intent: a "
            "source that begins again, or a sampler that draws. Each repeat has one fate"
            f"{'' if trained.all() else '; of what was left out, repeats are not told apart'}."
        )
    if len(same):
        is_wrong = np.zeros(len(keys), bool)
        is_wrong[order[same]] = is_wrong[order[same + 1]] = True
        _name_several(entries, name, chosen, is_wrong, found)
    distinct = np.unique(keys)
    return _Keys(distinct[distinct != NO_KEY], without)


def _name_several(
    entries: Entries, name: str, chosen: slice | Ints, is_wrong: np.ndarray, found: Findings
) -> None:
    """Say of each key that has several fates where it has which."""
    at = np.arange(len(entries.keys))[chosen][is_wrong]
    at = at[np.argsort(entries.keys[at], kind="stable")]
    reasons = {number: text for text, number in entries.names.reasons.items()}
    records = np.searchsorted(entries.ends, at, side="right")
    cuts = np.flatnonzero(np.diff(entries.keys[at])) + 1
    groups = np.split(np.arange(len(at)), cuts)
    for group in groups[:MOST_NAMED]:
        fates = [
            f"{fate_of(reasons[int(entries.fates[at[one]])])} at rank "
            f"{entries.ranks[records[one]]} step {entries.steps[records[one]]}"
            for one in group[:MOST_NAMED]
        ]
        more = [f"{len(group) - MOST_NAMED:,} more"] * (len(group) > MOST_NAMED)
        key = entries.keys[at[group[0]]]
        found.problems.append(f"key {key}{_of(name)} has {len(group)} fates: {_join(fates, more)}.")
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


def _count(keys: Ints) -> str:
    return f"{len(np.unique(keys)):,}"


def _join(fates: list[str], more: list[str]) -> str:
    return "; ".join([*fates, *more])
