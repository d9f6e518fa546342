"""Options that decide the groups and steps of a job, beside its data and its budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from odb_nodes._support.checks import check_choice, check_integer, check_number, keep_count
from odb_nodes.core.planning.auto_window import AUTO, WindowSize, WindowStart, check_window
from odb_nodes.core.planning.rounds import Uneven
from odb_nodes.core.planning.step_time import StepTime, TimeFn, check_step_time


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How samples become groups, and groups the steps of all ranks. See `ODBDataLoader`."""

    window: WindowSize = AUTO
    window_start: WindowStart = "auto"
    round_size: int = 32
    uneven: Uneven = "fill"
    largest_first: int = 0
    diversity: float = 0.0
    step_time: StepTime | TimeFn | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", check_window("window", self.window))
        check_choice("window_start", self.window_start, get_args(WindowStart))
        keep_count(self, "round_size")
        check_choice("uneven", self.uneven, get_args(Uneven))
        keep_count(self, "largest_first", 0)
        diversity = check_number("diversity", self.diversity, "[0, 1]")
        object.__setattr__(self, "diversity", diversity)
        check_step_time(self.step_time)


@dataclass(frozen=True, kw_only=True)
class JobOptions(PlanOptions):
    """`PlanOptions`, and options of the trainer for the whole job. See `ODBDataLoader`."""

    accumulate: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_count(self, "accumulate")
        object.__setattr__(self, "seed", check_integer("seed", self.seed))
