"""Samples that do not go into a pool: counted, and the first of each kind shown."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from odb_nodes._core.checks import MAX_KEY, check_count, describe
from odb_nodes._core.user_warning import warn_user
from odb_nodes.errors import SampleError
from odb_nodes.nodes.sample_store import SampleStore
from odb_nodes.planning import TokenBudget
from odb_nodes.sample import LeftOut, Sample, Skipped, name_of
from odb_nodes.sample_block import KEY, IntArray, SampleBlock

ExcludedState = dict[str, bytes | None]
"""`ExcludedKeys` as the field of a state: the keys of each source, 8 bytes a key."""

_SHOWN = 5
_ALLOWED = "integers, a mapping of source to integers, or the path of a file of them"


class ExcludedKeys:
    """Keys of samples by source. It does not change."""

    def __init__(self, keys: Mapping[str, Iterable[int]] | None = None) -> None:
        found = {source: frozenset(some) for source, some in (keys or {}).items()}
        self._keys = {source: found[source] for source in sorted(found) if found[source]}
        own = self._keys.items()
        self._state = {source: np.array(sorted(some), "<i8").tobytes() for source, some in own}

    @classmethod
    def of(cls, exclude: Exclude) -> ExcludedKeys:
        """Return the keys that an `exclude` argument names."""
        if isinstance(exclude, cls):
            return exclude
        if isinstance(exclude, (str, os.PathLike)):
            return cls(_read(Path(exclude)))
        if exclude is None or isinstance(exclude, Mapping):
            return cls(
                {
                    _source("a source in `exclude`", source): _keys(f"exclude[{source!r}]", some)
                    for source, some in (exclude or {}).items()
                }
            )
        return cls({"": _keys("exclude", exclude)})

    @classmethod
    def from_state(cls, state: ExcludedState) -> ExcludedKeys:
        """Return what `to_state` was called on."""
        keys = {source: np.frombuffer(some or b"", "<i8") for source, some in state.items()}
        return cls({source: some.tolist() for source, some in keys.items()})

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
        """Tell whether a sample is excluded; one without a key never is."""
        return sample.key is not None and self.holds(sample.source, sample.key)

    def holds(self, source: str, key: int) -> bool:
        """Tell whether the sample of a source that has this key is excluded."""
        return key in self._keys.get(source, ())

    def __or__(self, other: ExcludedKeys) -> ExcludedKeys:
        if not other._keys or other._keys == self._keys:
            return self
        sources = {*self._keys, *other._keys}
        none: frozenset[int] = frozenset()
        return ExcludedKeys(
            {one: self._keys.get(one, none) | other._keys.get(one, none) for one in sources}
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExcludedKeys) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(frozenset(self._keys.items()))

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def __repr__(self) -> str:
        named = [
            f"{source}/{key}" if source else str(key)
            for source, some in self._keys.items()
            for key in sorted(some)
        ]
        if len(named) <= _SHOWN:
            return f"[{', '.join(named)}]"
        digest = zlib.crc32(", ".join(named).encode())
        return f"[{', '.join(named[:_SHOWN])}, ...: {len(named)} keys, CRC-32 {digest:08x}]"


Exclude = ExcludedKeys | Iterable[int] | Mapping[str, Iterable[int]] | str | os.PathLike[str] | None
"""What an `exclude` argument may be; see `ExcludedKeys.of`."""


def _keys(name: str, keys: Any) -> list[int]:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise TypeError(f"`{name}` must be {_ALLOWED}, but is {describe(keys)} instead.")
    return [check_count(f"{name}[{at}]", key, 0, MAX_KEY) for at, key in enumerate(keys)]


def _source(name: str, source: Any) -> str:
    if not isinstance(source, str):
        raise TypeError(f"{name} must be a string, but is {describe(source)} instead.")
    return source


def _read(path: Path) -> dict[str, list[int]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"`exclude` must name a file in JSON Lines, but {str(path)!r} cannot be read: {error}."
        ) from error
    found: dict[str, list[int]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            source, key = _parsed(line, f"line {number} of {str(path)!r}")
            found.setdefault(source, []).append(key)
    return found


def _parsed(line: str, where: str) -> tuple[str, int]:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            return "", check_count("key", record, 0, MAX_KEY)
        source = _source("`source`", record.get("source", ""))
        return source, check_count("key", record.get("key"), 0, MAX_KEY)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'`exclude`, {where}: must be a key, or `{{"source": "name", "key": 17}}`, but is '
            f"{line!r:.80}: {error}"
        ) from error


class LeftOutSamples:
    """The samples that are in no step, until somebody takes their names."""

    def __init__(self) -> None:
        self.left_out: list[LeftOut] = []

    def leave_out(self, samples: Iterable[LeftOut]) -> None:
        """Have `take_left_out` return these, too."""
        self.left_out += samples

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last call."""
        taken, self.left_out = self.left_out, []
        return taken

    def leave_unemitted(self, store: SampleStore, ordinals: IntArray) -> None:
        """Leave out samples of a store, since another rank has ended."""
        samples = store.look(ordinals).without_data()
        self.leave_out(LeftOut(sample.key, sample.source, "unemitted") for sample in samples)
        store.drop(ordinals)


class ExclusionCounter(LeftOutSamples):
    """The samples of an epoch that are excluded, skipped, or exceed the budget on their own.

    named: what a sample is called by its number, in warnings and errors.
    """

    def __init__(
        self, budget: TokenBudget, keys: ExcludedKeys, named: str = "sample {} of the epoch"
    ) -> None:
        super().__init__()
        self._named = named
        self.budget = budget  # tells which samples are oversize; it may become smaller
        # What was warned of, in earlier epochs too: reasons, `None` for oversize samples; summaries
        self._said: set[str | None] = set()
        self.keys = keys
        self.excluded = self.oversize = 0
        self.dropped = 0  # oversize samples that `oversize="drop"` left out
        self.skipped: dict[str, int] = {}  # by reason

    def of_next_epoch(self, budget: TokenBudget, keys: ExcludedKeys) -> ExclusionCounter:
        """Return a counter of another epoch, which does not repeat what was warned of."""
        counter = ExclusionCounter(budget, keys, self._named)
        counter._said = self._said
        return counter

    def copy(self) -> ExclusionCounter:
        """Return a counter that counts on, while this one stays as it is."""
        counter = copy(self)
        counter.left_out, counter.skipped = [*self.left_out], {**self.skipped}
        return counter

    def use_present(self, budget: TokenBudget, keys: ExcludedKeys) -> None:
        """Go on with a smaller budget, and with more keys."""
        self.budget, self.keys = budget, keys

    def restore(self, state: Any) -> None:
        """Go on from a state."""
        self.keys = ExcludedKeys.from_state(state.excluded)
        self.excluded = state.excluded_samples
        self.dropped = state.dropped_samples
        self.oversize = state.oversize_samples
        self.skipped = state.skipped_samples
        self.left_out = [LeftOut(*one) for one in state.left_out]

    def to_state(self) -> dict[str, Any]:
        """Return the fields of a `BucketerState` that `restore` needs."""
        return {
            "excluded": self.keys.to_state(),
            "excluded_samples": self.excluded,
            "dropped_samples": self.dropped,
            "oversize_samples": self.oversize,
            "skipped_samples": self.skipped,
            "left_out": [(*one,) for one in self.left_out],
        }

    def exclude_from(self, samples: SampleBlock) -> npt.NDArray[np.bool_]:
        """Count the samples that are left out by their keys; tell which they are, (n,) bool."""
        is_out = self.are_excluded(samples)
        self._exclude(samples.take(np.flatnonzero(is_out)).without_data())
        return is_out

    def exclude_keys(self, keys: Sequence[int]) -> None:
        """Count samples that are left out by their keys before they are read."""
        self.excluded += len(keys)
        self.left_out += [LeftOut(key, "", "excluded") for key in keys]

    def _exclude(self, samples: Sequence[Sample | Skipped]) -> None:
        self.excluded += len(samples)
        self.left_out += [LeftOut(one.key, one.source, "excluded") for one in samples]

    def are_excluded(self, samples: SampleBlock) -> npt.NDArray[np.bool_]:
        """Tell which samples are left out by their keys, (n,) bool."""
        if not self.keys:
            return np.zeros(len(samples), dtype=bool)
        pairs = zip(samples.kinds, samples.facts[KEY].tolist(), strict=True)
        return np.array([self.keys.holds(kind.source, key) for kind, key in pairs], dtype=bool)

    def admits_all(self, samples: SampleBlock) -> bool:
        """Tell at once that all of some samples go into the pool, and none is to be counted.

        Where it cannot tell, each is to be asked for.
        """
        if self.keys and self.are_excluded(samples).any():
            return False
        tokens, patches = int(samples.tokens.max()), int(samples.patches.max())
        return not self.budget.is_oversize(tokens, patches)

    def admit(
        self, sample: Sample | Skipped, ordinal: int, *, is_counted: bool = False
    ) -> TypeGuard[Sample]:
        """Tell whether a sample goes into the pool; count it, and warn of the first of its kind.

        is_counted: whether it has gone into it before in this epoch.
        """
        if sample in self.keys:
            self._exclude([sample])
            return False
        if isinstance(sample, Skipped):
            self._skip(sample, ordinal)
            return False
        if not self.budget.is_oversize(sample.tokens, sample.patches):
            return True
        size = (
            f"{self._named.format(ordinal)}{name_of(sample)}, with {sample.tokens} tokens and "
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
            fate = "dropped" if drops else "given a group of its own"
            warn_user(
                f"{size}. It is {fate}. Further ones are only counted, see `oversize_samples`."
            )
        self.oversize += 1
        self.dropped += drops
        if drops:
            self.left_out.append(LeftOut(sample.key, sample.source, "dropped"))
        return not drops

    def warn_of_summary(self, samples: int) -> None:
        """Say what has become of the samples of an epoch, unless it was so in one before."""
        summary = self.summary(samples)
        if summary and self._is_new(summary):
            warn_user(summary)

    def summary(self, samples: int) -> str:
        """Return what became of samples beyond the first of each kind; "" if there are none."""
        skipped = sum(self.skipped.values())
        if self.oversize <= 1 and skipped == len(self.skipped):
            return ""
        alone = self.oversize - self.dropped
        kinds = {
            f"{alone} exceed the budget on their own (groups of their own)": alone,
            f"{self.dropped} exceed it and were dropped": self.dropped,
            f"{skipped} were skipped by processing: {self.skipped}": skipped,
        }
        found = "; ".join(text for text, count in kinds.items() if count)
        return f"of the {samples} samples of the epoch, {found}."

    def check_not_all(self, samples: int) -> None:
        """Raise where an epoch had samples, but none came out: the data or the budget is wrong."""
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
        is_new = kind not in self._said
        self._said.add(kind)
        return is_new

    def _skip(self, sample: Skipped, ordinal: int) -> None:
        if sample.reason not in self.skipped and self._is_new(sample.reason):
            warn_user(
                f"{self._named.format(ordinal)}{name_of(sample)} is skipped {sample.why} Further "
                "ones are only counted, see `skipped_samples`."
            )
        self.skipped[sample.reason] = self.skipped.get(sample.reason, 0) + 1
        self.left_out.append(LeftOut(sample.key, sample.source, sample.reason))
