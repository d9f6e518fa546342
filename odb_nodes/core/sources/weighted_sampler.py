"""Indices drawn by weight, for the `sampler` of a loader."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from odb_nodes._support.checks import check_bool, check_count, check_integer
from odb_nodes._support.hashing import hash_ints

_CHUNK = 1 << 16  # indices made into Python integers at a time


class WeightedSampler:
    """Yields indices in proportion to weights, drawn in each epoch from seed and epoch alone.

    Pass it as `ODBDataLoader(sampler=WeightedSampler(weights))`: ranks share its indices, and a
    resumed run draws the same ones. Memory: 16 bytes per weight, and 8 per index.

    Args:
        weights: weight of each sample, (n,), not negative.
        num_samples: number of indices of an epoch, over all ranks. Default: n.
        replacement: whether an index may come more than once in an epoch. Without it, indices are
            drawn one after the other from the remaining ones (by exponential keys: Efraimidis and
            Spirakis, 2006); `num_samples` = n yields each index once, heavy ones early.
        seed: seed of the indices.

    Raises:
        ValueError: a weight is negative or not finite, all are 0, or fewer than `num_samples` are
            above 0 without replacement.
    """

    def __init__(
        self,
        weights: npt.ArrayLike,
        num_samples: int | None = None,
        *,
        replacement: bool = True,
        seed: int = 0,
    ) -> None:
        try:
            self._weights = np.asarray(weights, dtype=np.float64)
        except (TypeError, ValueError):
            raise TypeError(f"`weights` must be numbers, but is {weights!r:.80} instead.") from None
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(self._weights.sum())
        if self._weights.ndim != 1 or not is_finite:
            raise ValueError(
                "`weights` must be one row of numbers, one for each sample, with a finite sum, but "
                f"is {weights!r:.80} instead."
            )
        positive = int(np.count_nonzero(self._weights))
        if not positive or self._weights.min() < 0:
            raise ValueError(
                "`weights` must not be negative, and some more than 0, but the least is "
                f"{self._weights.min(initial=0)} and {positive} are not 0."
            )
        self._replacement = check_bool("replacement", replacement)
        size = len(self._weights) if num_samples is None else num_samples
        self._num_samples = check_count("num_samples", size)
        if not replacement and self._num_samples > positive:
            raise ValueError(
                f"`num_samples` must be at most {positive}, the number of weights above 0, without "
                f"replacement, but is {self._num_samples} instead."
            )
        self._seed = check_integer("seed", seed)
        self._epoch = 0

    def __len__(self) -> int:
        return self._num_samples

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next iteration. `ODBDataLoader` calls it."""
        self._epoch = check_count("epoch", epoch, 0)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the epoch."""
        rng = np.random.default_rng(hash_ints(self._seed, self._epoch))
        if self._replacement:
            places = np.cumsum(self._weights)
            drawn = rng.random(self._num_samples) * places[-1]
            last = int(np.flatnonzero(self._weights)[-1])  # for a product that is rounded up
            indices = np.minimum(places.searchsorted(drawn, side="right"), last)
        else:
            with np.errstate(divide="ignore"):
                keys = np.log(rng.exponential(size=len(self._weights))) - np.log(self._weights)
            indices = keys.argsort(kind="stable")[: self._num_samples]
        for start in range(0, len(indices), _CHUNK):
            yield from indices[start : start + _CHUNK].tolist()
