"""What decides the groups and steps of a job, beside its data and its budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from odb_nodes._core.checks import check_choice, check_count, check_integer, check_number
from odb_nodes.planning.auto_window import AUTO, WindowSize, check_window
from odb_nodes.planning.rounds import Uneven


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How samples become groups, and groups the steps of all ranks. See `ODBDataLoader`."""

    window: WindowSize = AUTO
    round_size: int = 32
    uneven: Uneven = "fill"
    dearest_first: int = 0
    diversity: float = 0.0

    def __post_init__(self) -> None:
        check_window("window", self.window)
        check_count("round_size", self.round_size)
        check_choice("uneven", self.uneven, get_args(Uneven))
        check_count("dearest_first", self.dearest_first, 0)
        check_number("diversity", self.diversity, "[0, 1]")


@dataclass(frozen=True, kw_only=True)
class JobOptions(PlanOptions):
    """`PlanOptions`, and what a trainer decides for the whole job. See `ODBDataLoader`."""

    accumulate: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("accumulate", self.accumulate)
        check_integer("seed", self.seed)
