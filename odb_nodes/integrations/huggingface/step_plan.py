"""How many optimizer steps a run of epochs is expected to take, and its schedule with them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The estimate that the learning-rate schedule of a run of epochs is made of.

    Half as many ranks take twice as many steps for an epoch. So a step of M ranks, where the
    estimate is of N, moves the schedule on by M / N of a step. Steps are counted as rank-steps, a
    step of M ranks as M of them: that is exact, whatever the numbers of ranks were.

    Attributes:
        steps_per_epoch: optimizer steps of an epoch, estimated, on `planned_ranks` ranks.
        planned_ranks: number of ranks of that estimate.
        ranks: number of ranks now.
        begun_at: optimizer steps before this call of `train`.
        rank_steps: these steps, each times the ranks that took it.
    """

    steps_per_epoch: int
    planned_ranks: int
    ranks: int
    begun_at: int
    rank_steps: int

    @property
    def is_of_these_ranks(self) -> bool:
        """Whether all steps are those of the ranks that the estimate is of."""
        return self.schedule_step(self.begun_at + 1) == self.begun_at + 1

    @property
    def steps_per_epoch_now(self) -> float:
        """Optimizer steps of an epoch on the ranks there are now."""
        return self.steps_per_epoch * self.planned_ranks / self.ranks

    def rank_steps_at(self, step: int) -> int:
        """Return the rank-steps of the first `step` optimizer steps, at least `begun_at`."""
        return self.rank_steps + (step - self.begun_at) * self.ranks

    def schedule_step(self, step: int) -> float:
        """Return where the schedule stands after `step` optimizer steps, in steps of its own."""
        return max(0, self.rank_steps_at(step)) / self.planned_ranks

    def schedule_steps(self, epochs: float) -> int:
        """Return the steps that the schedule is made for."""
        return math.ceil(self.steps_per_epoch * epochs)

    def steps(self, epochs: float) -> int:
        """Return the optimizer steps of the whole run, those before this call included."""
        left = self.schedule_steps(epochs) * self.planned_ranks - self.rank_steps
        return self.begun_at + max(0, math.ceil(left / self.ranks))
