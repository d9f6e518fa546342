"""Facts of the samples of a dataset that planning needs before any sample is read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.planning.budget import TokenBudget
from odb_nodes.errors import SampleError


class SampleCosts(NamedTuple):
    """Facts of the samples of a dataset, (n,) int64 each."""

    tokens: IntArray  # lengths; 0 for a sample that processing skips
    targets: IntArray  # supervised tokens
    patches: IntArray  # image patches
    tasks: IntArray  # numbers of the tasks

    @classmethod
    def of_lengths(cls, lengths: npt.ArrayLike) -> SampleCosts:
        """Return the costs of samples with known lengths, (n,), and without targets."""
        tokens = check_lengths(lengths)
        zeros = np.broadcast_to(np.int64(0), tokens.shape)  # takes no memory
        return cls(tokens, targets=zeros, patches=zeros, tasks=zeros)

    def are_oversize(self, budget: TokenBudget) -> NDArray[np.bool_]:
        """Return which samples exceed a budget on their own, (n,) bool."""
        over: NDArray[np.bool_] = self.tokens > budget.capacity
        if budget.max_patches is not None:
            over = over | (self.patches > budget.max_patches)
        return over

    def are_left_out(self, budget: TokenBudget) -> NDArray[np.bool_]:
        """Return which samples are skipped or dropped, (n,) bool.

        Raises:
            SampleError: a sample is too long under `oversize="error"`.
        """
        left_out: NDArray[np.bool_] = self.tokens == 0
        if budget.oversize == "alone":
            return left_out
        over = self.are_oversize(budget)
        if budget.oversize == "error" and over.any():
            first = int(over.argmax())
            raise SampleError(
                f"a sample of {self.tokens[first]} tokens and {self.patches[first]} patches "
                f"exceeds {budget} on its own."
            )
        left_out |= over
        return left_out


def check_lengths(lengths: npt.ArrayLike) -> IntArray:
    """Return lengths as (n,) int64."""
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu" or tokens.min() < 1:
        raise ValueError(
            "`lengths` must be one row of integers of at least 1, one for each sample, but is "
            f"{lengths!r:.80} instead."
        )
    return tokens.astype(np.int64)
