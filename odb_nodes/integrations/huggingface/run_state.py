"""What a run of a `Trainer` holds between and within two optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from odb_nodes.contract import NodeState, SourceState
from odb_nodes.step_info import StepInfo


@dataclass(kw_only=True)
class RunState(NodeState):
    """The position of a run on one rank, between two optimizer steps.

    Attributes:
        step: optimizer steps of the run that are done.
        epoch: number of epochs that have ended.
        samples: samples of all ranks that are done in the present epoch.
        rank_steps: the same, each times the number of ranks that took it.
        steps_per_epoch: optimizer steps per epoch, estimated; None where `max_steps` ends the run.
        planned_ranks: number of ranks of that estimate.
        loader: state of the loader.
        monitor: state of the `Monitor`; None where the run has none.
    """

    step: int
    epoch: int
    samples: int
    rank_steps: int
    steps_per_epoch: int | None
    planned_ranks: int
    loader: SourceState
    monitor: dict[str, Any] | None


@dataclass(kw_only=True)
class TakenStep:
    """The batches of an optimizer step that the `Trainer` has been given.

    Attributes:
        batches: the batches.
        infos: the `StepInfo` of each.
        own: how many batches there are without those that are repeated.
        wait_s: seconds that were spent waiting for each, on the mean.
    """

    batches: list[dict[str, Any]]
    infos: list[StepInfo]
    own: int
    wait_s: float


def repeated(info: StepInfo) -> StepInfo:
    """Return the `StepInfo` of a batch that is repeated to fill its optimizer step."""
    return replace(
        info,
        is_filler=True,
        local_samples=0,
        local_targets=0,
        local_sources={},
        local_tasks={},
        left_out=(),
        micro_step=info.micro_step + 1,
        ends_epoch=False,
    )
