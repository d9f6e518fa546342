"""Where a monitor stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from odb_nodes.contract import NodeState
from odb_nodes.monitor.window import Share, Totals


@dataclass(kw_only=True)
class MonitorState(NodeState):
    """Where a monitor stands on one rank.

    Attributes:
        step: optimizer steps of the run so far.
        written: those that are in records.
        epoch: number of the epoch.
        epoch_written: optimizer steps in records before this epoch.
        seconds: duration of the steps that are in records.
        share: what was counted since, a `Share`.
        totals: what all ranks have counted in this epoch, a `Totals`; of rank 0.
        samples: losses of samples since, the fields of `SampleLoss`.
    """

    step: int = 0
    written: int = 0
    epoch: int = 0
    epoch_written: int = 0
    seconds: float = 0.0
    share: dict[str, Any] = field(default_factory=lambda: asdict(Share()))
    totals: dict[str, Any] = field(default_factory=lambda: asdict(Totals()))
    samples: list[tuple[str, int, int, int, int, float, int]] = field(default_factory=list)
