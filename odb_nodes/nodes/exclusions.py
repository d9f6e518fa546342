"""Samples that do not go into a pool: counted, and the first of each kind shown."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeGuard

from odb_nodes._core.user_warning import warn_user
from odb_nodes.errors import SampleError
from odb_nodes.nodes.excluded_keys import ExcludedKeys
from odb_nodes.planning import TokenBudget
from odb_nodes.sample import LeftOut, Sample, Skipped, name_of

_TOKENS = itemgetter(Sample._fields.index("tokens"))
_PATCHES = itemgetter(Sample._fields.index("patches"))


class ExclusionCounter:
    """The samples of an epoch that are excluded, skipped, or exceed the budget on their own.

    Args:
        budget: the budget that tells which samples are oversize.
        keys: the keys that are excluded.
        said: what was warned of in the epochs before: reasons, and `None` for oversize samples.

    Attributes:
        budget: likewise; it may become smaller.
        keys: the keys that are excluded.
        excluded: samples that were left out by their keys.
        oversize: samples that exceed the budget on their own.
        dropped: oversize samples that `oversize="drop"` left out.
        skipped: reason -> samples that processing `Skipped`.
        left_out: the samples themselves, until they are taken.
        said: likewise; grows.
    """

    def __init__(
        self, budget: TokenBudget, keys: ExcludedKeys, said: set[str | None] | None = None
    ) -> None:
        self.budget = budget
        self.said = set() if said is None else said
        self.keys = keys
        self.excluded = 0
        self.oversize = 0
        self.dropped = 0
        self.skipped: dict[str, int] = {}
        self.left_out: list[LeftOut] = []

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

    def exclude(self, samples: Sequence[Sample | Skipped]) -> None:
        """Count samples that are left out by their keys."""
        self.excluded += len(samples)
        self.left_out += [LeftOut(one.key, one.source, "excluded") for one in samples]

    def admits_all(self, samples: Sequence[Any]) -> TypeGuard[Sequence[Sample]]:
        """Tell at once that all of some samples go into the pool, and none is to be counted.

        Where it cannot tell, each is to be asked for.
        """
        if self.keys or {*map(type, samples)} != {Sample}:
            return False
        tokens, patches = max(map(_TOKENS, samples)), max(map(_PATCHES, samples))
        return not self.budget.is_oversize(tokens, patches)

    def admit(self, sample: Sample | Skipped, ordinal: int) -> TypeGuard[Sample]:
        """Tell whether a sample goes into the pool; count it, and warn of the first of its kind.

        Args:
            sample: the next one.
            ordinal: its number in the epoch.

        Raises:
            SampleError: it is too large, under `oversize="error"`.
        """
        if sample in self.keys:
            self.exclude([sample])
            return False
        if isinstance(sample, Skipped):
            self._skip(sample, ordinal)
            return False
        if not self.budget.is_oversize(sample.tokens, sample.patches):
            return True
        size = (
            f"sample {ordinal} of the epoch{name_of(sample)}, with {sample.tokens} tokens and "
            f"{sample.patches} patches, exceeds the budget on its own: "
            f"{self.budget.limit_of(sample.tokens)}"
        )
        if self.budget.oversize == "error":
            raise SampleError(
                f'{size}. Raise the budget, shorten the sample, or set `oversize` to "alone" or '
                '"drop".'
            )
        drops = self.budget.oversize == "drop"
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

    def summary(self, samples: int) -> str:
        """Return what became of samples beyond the first of each kind; "" if there are none.

        Args:
            samples: the number of samples of the epoch.
        """
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
        """Raise where an epoch had samples, but none came out: the data or the budget is wrong.

        Args:
            samples: the number of samples of the epoch.

        Raises:
            SampleError: all of them were left out, beside those that are excluded.
        """
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
        is_new = kind not in self.said
        self.said.add(kind)
        return is_new

    def _skip(self, sample: Skipped, ordinal: int) -> None:
        if sample.reason not in self.skipped and self._is_new(sample.reason):
            warn_user(
                f"sample {ordinal} of the epoch{name_of(sample)} is skipped {sample.why} Further "
                "ones are only counted, see `skipped_samples`."
            )
        self.skipped[sample.reason] = self.skipped.get(sample.reason, 0) + 1
        self.left_out.append(LeftOut(sample.key, sample.source, sample.reason))


class CountsExclusions:
    """What a node says of the samples that its counter has left out."""

    _exclusions: ExclusionCounter

    @property
    def excluded(self) -> ExcludedKeys:
        """The keys that are excluded: those of the argument, and those of a loaded state."""
        return self._exclusions.keys

    @property
    def excluded_samples(self) -> int:
        """Samples of this epoch that were left out by their keys so far."""
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
        """Samples of this epoch that processing `Skipped` so far, by its reason."""
        return dict(self._exclusions.skipped)

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were skipped or dropped since the last call."""
        taken, self._exclusions.left_out = self._exclusions.left_out, []
        return taken
