"""Plan the epochs of a job whose lengths are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_integer, keep_count
from odb_nodes._support.hashing import hash_ints
from odb_nodes.core.planning.auto_window import AUTO, WindowSize, check_window
from odb_nodes.core.planning.budget import TokenBudget
from odb_nodes.core.planning.known_lengths import EpochPlan, plan_known
from odb_nodes.core.planning.sample_costs import SampleCosts
from odb_nodes.core.planning.step_time import StepTime, TimeFn, check_step_time, step_time_of

WINDOW_IN_ORDER = 2048
"""Samples of a rank that `"auto"` plans together where the order of the dataset is kept."""


def known_window(window: WindowSize, *, in_order: bool = False) -> int | None:
    """Return how many samples of each rank are planned together; `None`: the whole epoch."""
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
    largest_first: int
    seed: int
    accumulate: int = 1
    step_time: StepTime | TimeFn | None = None

    def __post_init__(self) -> None:
        keep_count(self, "world_size")
        keep_count(self, "largest_first", 0)
        keep_count(self, "accumulate")
        check_step_time(self.step_time)
        step_time = step_time_of(self.step_time, self.budget)
        object.__setattr__(self, "step_time", step_time)
        object.__setattr__(self, "seed", check_integer("seed", self.seed))

    def plan(self, samples: SampleCosts, order: IntArray, epoch: int = 0) -> EpochPlan:
        """Plan an epoch of samples that come in this order, (n,).

        Raises:
            SampleError: a sample is too long under `oversize="error"`.
        """
        left_out = samples.are_left_out(self.budget)
        numbers = order[~left_out[order]] if left_out.any() else order
        return self.plan_all(numbers, samples.tokens, epoch)

    def plan_all(self, numbers: IntArray, tokens: IntArray, epoch: int) -> EpochPlan:
        """Plan samples in this order, including samples that are too long.

        tokens: length of each sample of the dataset, (n,).
        """
        return plan_known(
            numbers,
            tokens[numbers],
            self.budget,
            world_size=self.world_size,
            window=self.window,
            largest_first=self.largest_first,
            accumulate=self.accumulate,
            seed=hash_ints(self.seed, epoch, 1),
            step_time=self.step_time,
        )


def plan_epoch(
    lengths: npt.ArrayLike,
    budget: int | TokenBudget,
    *,
    world_size: int = 1,
    window: WindowSize = AUTO,
    largest_first: int = 0,
    accumulate: int = 1,
    seed: int = 0,
    step_time: StepTime | TimeFn | None = None,
) -> list[list[list[int]]]:
    """Plan the batches of samples whose lengths are known, such as rollouts or a packed dataset.

        for step in plan_epoch([len(ids) for ids in rollouts], 16_384, world_size=8):
            batch = [rollouts[index] for index in step[rank]]

    Each sample is planned exactly once, except samples that `oversize="drop"` leaves out. All ranks
    have the same number of steps, and the groups of a step cost about the same. The plan depends on
    the arguments alone.

    Args:
        lengths: tokens of each sample, (n,).
        budget: padded tokens of a group, or a `TokenBudget`.
        world_size: number of ranks.
        window: samples of each rank that are planned together: the groups of the first
            `window * world_size` samples come first. `"auto"`: all samples.
        largest_first: number of steps of the longest samples that come first.
        accumulate: steps of an optimizer step.
        seed: seed of the order of steps.
        step_time: as for `RankAligner`. A function gets samples with their tokens, and their index
            in `lengths` as `data`.

    Returns:
        For each step and rank the indices in `lengths` of the rank's group; none for a rank without
        remaining samples, which computes a filler batch in training.

    Raises:
        TypeError, ValueError: an argument is not valid.
        SampleError: a sample is too long under `oversize="error"`.
    """
    samples = SampleCosts.of_lengths(lengths)
    job = KnownJob(
        budget=TokenBudget.of(budget),
        world_size=world_size,
        window=known_window(window),
        largest_first=largest_first,
        accumulate=accumulate,
        seed=seed,
        step_time=step_time,
    )
    plan = job.plan(samples, np.arange(len(samples.tokens)))
    return [
        [plan.group(step, rank).tolist() for rank in range(job.world_size)]
        for step in range(len(plan))
    ]
