"""Plan the epochs of a job whose lengths are known: window, key, and what no group holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_nodes._core.checks import check_count, check_integer, keep_count
from odb_nodes._core.hashing import hash_ints
from odb_nodes.planning.auto_window import AUTO, WindowSize, check_window
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.known_lengths import EpochPlan, plan_known
from odb_nodes.planning.sample_costs import SampleCosts
from odb_nodes.planning.table import IntArray

WINDOW_IN_ORDER = 2048
"""Samples of a rank that `"auto"` plans together where the order of the dataset is kept."""


def known_window(window: WindowSize, *, in_order: bool = False) -> int | None:
    """Return how many samples of each rank are planned together; `None` for all of the epoch."""
    window = check_window("window", window)
    if window != AUTO:
        return window
    return WINDOW_IN_ORDER if in_order else None


@dataclass(frozen=True, kw_only=True)
class KnownJob:
    """A job whose lengths are known. See `plan_known` for the fields."""

    budget: TokenBudget
    world_size: int
    window: int | None
    dearest_first: int
    seed: int

    def __post_init__(self) -> None:
        keep_count(self, "world_size")
        keep_count(self, "dearest_first", 0)
        object.__setattr__(self, "seed", check_integer("seed", self.seed))

    def plan(
        self, samples: SampleCosts, order: IntArray, epoch: int = 0, costs: IntArray | None = None
    ) -> EpochPlan:
        """Plan an epoch of samples, (n,), that come in this order.

        Raises:
            SampleError: a sample is too long under `oversize="error"`.
        """
        left_out = samples.are_left_out(self.budget)
        rows = order[~left_out[order]] if left_out.any() else order
        return self.plan_all(rows, samples.tokens, epoch, costs)

    def plan_all(
        self, rows: IntArray, tokens: IntArray, epoch: int, costs: IntArray | None = None
    ) -> EpochPlan:
        """Plan some samples, in this order, whatever their lengths are; leave none out.

        tokens, costs: of each sample of the dataset, (n,).
        """
        return plan_known(
            rows,
            tokens[rows],
            self.budget,
            world_size=self.world_size,
            window=self.window,
            dearest_first=self.dearest_first,
            key=hash_ints(self.seed, epoch, 1),
            costs=None if costs is None else costs[rows],
        )


def plan_epoch(
    lengths: npt.ArrayLike,
    budget: int | TokenBudget,
    *,
    world_size: int = 1,
    window: WindowSize = AUTO,
    dearest_first: int = 0,
    seed: int = 0,
    costs: npt.ArrayLike | None = None,
) -> list[list[list[int]]]:
    """Plan the batches of samples whose lengths are known, such as rollouts or a packed dataset.

        for step in plan_epoch([len(ids) for ids in rollouts], 16_384, world_size=8):
            batch = [rollouts[index] for index in step[rank]]

    Each sample is planned exactly once, but for those that `oversize="drop"` leaves out. All ranks
    have the same number of steps, and the groups of a step cost about the same. The plan depends on
    the arguments alone.

    Args:
        lengths: tokens of each sample, (n,).
        budget: padded tokens of a group, or a `TokenBudget`.
        world_size: number of ranks.
        window: samples of each rank that are planned together: the groups of the first
            `window * world_size` samples come first. `"auto"`: all samples.
        dearest_first: how many steps of the longest samples come first.
        seed: the seed of the order of steps.
        costs: what a step with each sample takes, (n,) integers of at least 0 in any unit; the
            groups of a step are matched by their sums, below 2**31. Default: what the groups cost
            under the budget, padding included.

    Returns:
        For each step the indices into `lengths` of each rank's group; none for a rank that has no
        sample left, and computes a filler batch in training.

    Raises:
        TypeError, ValueError: an argument is not valid.
        SampleError: a sample is too long under `oversize="error"`.
    """
    samples = SampleCosts.of_lengths(lengths)
    of_samples = None if costs is None else _checked_costs(costs, len(samples.tokens))
    job = KnownJob(
        budget=TokenBudget.of(budget),
        world_size=world_size,
        window=known_window(window),
        dearest_first=dearest_first,
        seed=seed,
    )
    plan = job.plan(samples, np.arange(len(samples.tokens)), costs=of_samples)
    steps = [
        [plan.group(step, rank).tolist() for rank in range(job.world_size)]
        for step in range(len(plan))
    ]
    if of_samples is not None:
        sums = [int(of_samples[group].sum()) for step in steps for group in step]
        check_count("costs", max(sums, default=0), 0)
    return steps


def _checked_costs(costs: npt.ArrayLike, samples: int) -> IntArray:
    """Return the cost of each sample, (n,) int64."""
    given = np.asarray(costs)
    if given.shape != (samples,) or given.dtype.kind not in "iu" or given.min() < 0:
        raise ValueError(
            f"`costs` must be {samples} integers of at least 0, one for each of `lengths`, but "
            f"is {costs!r:.80} instead."
        )
    check_count("costs", int(given.max()), 0)
    return given.astype(np.int64)
