"""Exclude samples by key, and count the samples that are excluded, skipped or oversize."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray, int64_bytes
from odb_nodes._support.checks import MAX_KEY, check_count, describe
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.contract.state import NodeState, integers_of
from odb_nodes.core.nodes.sample_store import SampleStore
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.sample import LeftOut, Sample, Skipped, name_of
from odb_nodes.core.sample_block import KEY, NONE, SampleBlock
from odb_nodes.errors import SampleError

ExcludedState = dict[str, bytes | None]
"""`ExcludedKeys` as the field of a state: the keys of each source, 8 bytes a key."""

_SHOWN = 5
_COUNTED = "Further samples are only counted: see `{}` of the loader, or of the grouping node."
_ALLOWED = "integers, a mapping of source to integers, or the path of a file of them"


class ExcludedKeys:
    """Keys of samples by source. Immutable."""

    def __init__(self, keys: Mapping[str, Iterable[int]]) -> None:
        by_source = {source: frozenset(keys[source]) for source in sorted(keys)}
        self._keys = {source: keys for source, keys in by_source.items() if keys}
        self._state: ExcludedState = {
            source: int64_bytes(sorted(keys)) for source, keys in self._keys.items()
        }

    @classmethod
    def of(cls, exclude: Exclude) -> ExcludedKeys:
        """Return the keys that an `exclude` argument names."""
        if isinstance(exclude, cls):
            return exclude
        if exclude is None:
            return cls({})
        if isinstance(exclude, (str, os.PathLike)):
            return cls(_read(Path(exclude)))
        if not isinstance(exclude, Mapping):
            return cls({"": _checked_keys("exclude", exclude)})
        for source in exclude:
            _check_source("a source in `exclude`", source)
        return cls(
            {source: _checked_keys(f"exclude[{source!r}]", exclude[source]) for source in exclude}
        )

    @classmethod
    def from_state(cls, state: ExcludedState) -> ExcludedKeys:
        """Return the object that `to_state` was called on."""
        return cls(
            {source: integers_of(keys, "excluded").tolist() for source, keys in state.items()}
        )

    @property
    def sources(self) -> list[str]:
        """Names of the sources that have keys."""
        return [*self._keys]

    def of_source(self, source: str) -> list[int]:
        """Return the keys of a source."""
        return [*self._keys.get(source, ())]

    def to_state(self) -> ExcludedState:
        """Return the keys as plain data."""
        return {**self._state}

    def __contains__(self, sample: Sample | Skipped | LeftOut) -> bool:
        """Return whether a sample is excluded. A sample without a key is not."""
        return sample.key is not None and self.holds(sample.source, sample.key)

    def holds(self, source: str, key: int) -> bool:
        """Return whether a key of a source is excluded."""
        return key in self._keys.get(source, ())

    def __or__(self, other: ExcludedKeys) -> ExcludedKeys:
        if not other._keys or other._keys == self._keys:
            return self
        union = dict(self._keys)
        for source, keys in other._keys.items():
            union[source] = union.get(source, frozenset()) | keys
        return ExcludedKeys(union)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExcludedKeys) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(frozenset(self._keys.items()))

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def __repr__(self) -> str:
        names = [
            f"{source}/{key}" if source else str(key)
            for source, keys in self._keys.items()
            for key in sorted(keys)
        ]
        if len(names) <= _SHOWN:
            return f"[{', '.join(names)}]"
        digest = zlib.crc32(", ".join(names).encode())
        return f"[{', '.join(names[:_SHOWN])}, ...: {len(names)} keys, CRC-32 {digest:08x}]"


Exclude = ExcludedKeys | Iterable[int] | Mapping[str, Iterable[int]] | str | os.PathLike[str] | None
"""The type of an `exclude` argument; see `ExcludedKeys.of`."""


def _checked_keys(name: str, keys: Any) -> list[int]:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise TypeError(f"`{name}` must be {_ALLOWED}, but is {describe(keys)} instead.")
    return [check_count(f"{name}[{index}]", key, 0, MAX_KEY) for index, key in enumerate(keys)]


def _check_source(name: str, source: Any) -> None:
    if not isinstance(source, str):
        raise TypeError(f"{name} must be a string, but is {describe(source)} instead.")


def _read(path: Path) -> dict[str, list[int]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"`exclude` must name a file in JSON Lines, but {str(path)!r} cannot be read: {error}."
        ) from error
    keys: dict[str, list[int]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            source, key = _parsed(line, f"line {number} of {str(path)!r}")
            keys.setdefault(source, []).append(key)
    return keys


def _parsed(line: str, where: str) -> tuple[str, int]:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            return "", check_count("key", record, 0, MAX_KEY)
        source = record.get("source", "")
        _check_source("`source`", source)
        return source, check_count("key", record.get("key"), 0, MAX_KEY)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'`exclude`, {where}: must be a key, or `{{"source": "name", "key": 17}}`, but is '
            f"{line!r:.80}: {error}"
        ) from error


class LeftOutSamples:
    """The samples left out since the last call of `take_left_out`."""

    def __init__(self) -> None:
        self.left_out: list[LeftOut] = []

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last call."""
        left_out = self.left_out
        self.left_out = []
        return left_out

    def leave_unemitted(self, store: SampleStore, ordinals: IntArray) -> None:
        """Leave out samples of a store, because another rank has ended."""
        samples = store.look(ordinals).without_data()
        self.left_out += [LeftOut(sample.key, sample.source, "unemitted") for sample in samples]
        store.drop(ordinals)


@dataclass(kw_only=True)
class ExclusionState(NodeState):
    """The state of an `ExclusionCounter`, within the state of a node: counts of the epoch."""

    excluded: ExcludedState
    excluded_samples: int  # samples excluded by their keys
    dropped_samples: int  # samples left out by `oversize="drop"`
    oversize_samples: int  # samples that exceeded the budget on their own
    skipped_samples: dict[str, int]  # samples that processing skipped, by reason
    # key, source and reason of each sample left out since the last group
    left_out: list[tuple[int | None, str, str]]


class ExclusionCounter(LeftOutSamples):
    """Counts the samples of an epoch that are excluded, skipped, or oversize: above the budget.

    named: format for the number of a sample, in warnings and errors.
    """

    def __init__(
        self, budget: TokenBudget, keys: ExcludedKeys, named: str = "sample {} of the epoch"
    ) -> None:
        super().__init__()
        self._named = named
        self.budget = budget  # decides which samples are oversize; it may become smaller
        # What was warned of in all epochs so far: reasons, `None` for oversize samples, summaries.
        self._warned_of: set[str | None] = set()
        self.keys = keys
        self.excluded = self.oversize = 0
        self.dropped = 0  # oversize samples that `oversize="drop"` left out
        self.skipped: dict[str, int] = {}  # by reason

    def for_next_epoch(self, budget: TokenBudget, keys: ExcludedKeys) -> ExclusionCounter:
        """Return a counter for another epoch, which does not repeat warnings."""
        counter = ExclusionCounter(budget, keys, self._named)
        counter._warned_of = self._warned_of
        return counter

    def copy(self) -> ExclusionCounter:
        """Return a copy whose counts are independent."""
        counter = copy(self)
        counter.left_out = [*self.left_out]
        counter.skipped = {**self.skipped}
        return counter

    def use_present(self, budget: TokenBudget, keys: ExcludedKeys) -> None:
        """Continue with a smaller budget, and with more keys."""
        self.budget = budget
        self.keys = keys

    def restore(self, state: ExclusionState) -> None:
        """Continue from a state."""
        self.keys = ExcludedKeys.from_state(state.excluded)
        self.excluded = state.excluded_samples
        self.dropped = state.dropped_samples
        self.oversize = state.oversize_samples
        self.skipped = state.skipped_samples
        self.left_out = [LeftOut(*fields) for fields in state.left_out]

    def to_state(self) -> dict[str, Any]:
        """Return the fields of an `ExclusionState`."""
        return {
            "excluded": self.keys.to_state(),
            "excluded_samples": self.excluded,
            "dropped_samples": self.dropped,
            "oversize_samples": self.oversize,
            "skipped_samples": self.skipped,
            "left_out": [tuple(sample) for sample in self.left_out],
        }

    def exclude_from(self, samples: SampleBlock) -> npt.NDArray[np.bool_]:
        """Count the samples that are excluded by key; return which samples are, (n,) bool."""
        are_excluded = self.are_excluded(samples)
        self._exclude(samples.take(np.flatnonzero(are_excluded)).without_data())
        return are_excluded

    def exclude_keys(self, keys: Sequence[int]) -> None:
        """Count samples that are excluded before they are read."""
        self.excluded += len(keys)
        self.left_out += [LeftOut(key, "", "excluded") for key in keys]

    def _exclude(self, samples: Sequence[Sample | Skipped]) -> None:
        self.excluded += len(samples)
        self.left_out += [LeftOut(sample.key, sample.source, "excluded") for sample in samples]

    def are_excluded(self, samples: SampleBlock) -> npt.NDArray[np.bool_]:
        """Return which samples are excluded by key, (n,) bool."""
        if not self.keys:
            return np.zeros(len(samples), dtype=bool)
        keys = samples.facts[KEY]
        for index in np.flatnonzero(keys == NONE).tolist():
            self._check_has_key(samples.kinds[index].source)
        pairs = zip(samples.kinds, keys.tolist(), strict=True)
        return np.array([self.keys.holds(kind.source, key) for kind, key in pairs], dtype=bool)

    def _check_has_key(self, source: str) -> None:
        """Raise an error for a sample without a key if keys of its source are excluded."""
        if self.keys.of_source(source):
            raise SampleError(
                "`exclude` names keys, but a sample has no key. Process samples by a node that "
                "passes keys on, such as `ParallelProcessor`."
            )

    def admits_all(self, samples: SampleBlock) -> bool:
        """Return True if all samples are certainly admitted. If False, call `admit` for each."""
        if self.keys and self.are_excluded(samples).any():
            return False
        tokens, patches = int(samples.tokens.max()), int(samples.patches.max())
        return not self.budget.is_oversize(tokens, patches)

    def admit(
        self, sample: Sample | Skipped, number: int, *, is_counted: bool = False
    ) -> TypeGuard[Sample]:
        """Return whether a sample goes into a group; count a sample that is left out or oversize.

        The first sample of each kind is warned of.

        number: number of the sample, for warnings and errors.
        is_counted: whether the sample was admitted before in this epoch.
        """
        if sample.key is None:
            self._check_has_key(sample.source)
        elif sample in self.keys:
            self._exclude([sample])
            return False
        if isinstance(sample, Skipped):
            self._skip(sample, number)
            return False
        if not self.budget.is_oversize(sample.tokens, sample.patches):
            return True
        size = (
            f"{self._named.format(number)}{name_of(sample)}, with {sample.tokens} tokens and "
            f"{sample.patches} patches, exceeds the budget on its own: "
            f"{self.budget.limit_of(sample.tokens)}"
        )
        if self.budget.oversize == "error":
            raise SampleError(
                f'{size}. Raise the budget, shorten the sample, or set `oversize` to "alone" or '
                '"drop".'
            )
        drops = self.budget.oversize == "drop"
        if is_counted and not drops:
            return True
        if not self.oversize and self._is_new(None):
            consequence = "It is dropped" if drops else "It is alone in its group"
            warn_user(f"{size}. {consequence}. {_COUNTED.format('oversize_samples')}")
        self.oversize += 1
        self.dropped += drops
        if drops:
            self.left_out.append(LeftOut(sample.key, sample.source, "dropped"))
        return not drops

    def warn_of_summary(self, samples: int) -> None:
        """Warn with the summary of an epoch, unless an earlier epoch had the same summary."""
        summary = self.summary(samples)
        if summary and self._is_new(summary):
            warn_user(summary)

    def summary(self, samples: int) -> str:
        """Return the counts of an epoch as text; "" if `admit` has warned of each sample."""
        skipped = sum(self.skipped.values())
        if self.oversize <= 1 and skipped == len(self.skipped):
            return ""
        alone = self.oversize - self.dropped
        kinds = {
            f"{alone} exceed the budget on their own (each alone in its group)": alone,
            f"{self.dropped} exceed it and were dropped": self.dropped,
            f"{skipped} were skipped by processing: {self.skipped}": skipped,
        }
        counts = "; ".join(text for text, count in kinds.items() if count)
        return f"of the {samples} samples read for this epoch, {counts}."

    def check_not_all(self, samples: int) -> None:
        """Raise if all samples of an epoch were left out: the data or the budget is wrong."""
        samples -= self.excluded
        skipped = sum(self.skipped.values())
        if samples <= 0 or self.dropped + skipped != samples:
            return
        if skipped:
            raise SampleError(
                f"all {samples} samples of the epoch were left out: {self.skipped} skipped in "
                f"processing, {self.dropped} dropped. Check the paths of the data, or let "
                "processing raise for such samples to see what is wrong."
            )
        raise SampleError(
            f"all {samples} samples of the epoch exceed {self.budget} on their own: they were "
            'dropped. Raise the budget, or set `oversize` to "alone".'
        )

    def _is_new(self, kind: str | None) -> bool:
        is_new = kind not in self._warned_of
        self._warned_of.add(kind)
        return is_new

    def _skip(self, sample: Skipped, number: int) -> None:
        if sample.reason not in self.skipped and self._is_new(sample.reason):
            named = f"{self._named.format(number)}{name_of(sample)}"
            warn_user(f"{named} is skipped {sample.why} {_COUNTED.format('skipped_samples')}")
        self.skipped[sample.reason] = self.skipped.get(sample.reason, 0) + 1
        self.left_out.append(LeftOut(sample.key, sample.source, sample.reason))


class CountsExclusions:
    """A node that leaves out samples, and counts them in `_exclusions`."""

    _exclusions: ExclusionCounter

    @property
    def excluded(self) -> ExcludedKeys:
        """The excluded keys, of the argument and of a loaded state."""
        return self._exclusions.keys

    @property
    def excluded_samples(self) -> int:
        """Samples of this epoch that were excluded by their keys so far."""
        return self._exclusions.excluded

    @property
    def dropped_samples(self) -> int:
        """Samples of this epoch that `oversize="drop"` left out so far."""
        return self._exclusions.dropped

    @property
    def oversize_samples(self) -> int:
        """Samples of this epoch that exceeded the budget on their own so far."""
        return self._exclusions.oversize

    @property
    def skipped_samples(self) -> dict[str, int]:
        """Samples of this epoch that processing `Skipped` so far, by reason."""
        return dict(self._exclusions.skipped)

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last call."""
        return self._exclusions.take_left_out()
