"""How many optimizer steps an epoch will have, from the lengths of some of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from odb_nodes.loader.options import LoaderOptions
from odb_nodes.planning import SimulationOptions
from odb_nodes.planning.simulation import SimulationKeywords
from odb_nodes.sample import Observe
from odb_nodes.sources import JsonlSource
from odb_nodes.tools.estimate import LOOKED_AT, job_of
from odb_nodes.tools.lengths import is_map_style, observe_lengths
from odb_nodes.tools.simulate import MOST_DRAWN, TableEpoch

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LOOKED_AT", "check_can_estimate", "estimate_steps"]


def check_can_estimate(
    dataset: Any, remedy: str, what: str = "the steps of an epoch can be estimated"
) -> None:
    """Reject a dataset that cannot be looked at, on all ranks, though one rank may do so."""
    if not (is_map_style(dataset) or isinstance(dataset, JsonlSource)):
        raise TypeError(
            f"{what} only where the dataset is map-style with a length, or a `JsonlSource`, but it "
            f"is `{type(dataset).__name__}`. {remedy}"
        )


def estimate_steps(
    dataset: Any,
    *,
    process_fn: Callable[[Any], Any] | None = None,
    observe: Observe | None = None,
    looked_at: int = LOOKED_AT,
    **options: Unpack[SimulationKeywords],
) -> int:
    """Return about how many optimizer steps an epoch has.

    Processes some samples drawn at random, then groups as many lengths as there are, drawn from
    theirs. On lengths with a long tail, 512 samples give the number to within some percent.

    Args:
        dataset: the map-style dataset to train on, with a length, or a `JsonlSource`.
        process_fn: item of the dataset -> processed sample.
        observe: processed sample -> its tokens; see `LengthObserver`.
        looked_at: number of samples to process.
        options: the fields of `SimulationOptions`: `world_size` and `budget`, and where they differ
            from the defaults `window`, `accumulate` and `seed`, which also seeds what is drawn.

    Raises:
        TypeError, ValueError: an option is not valid.
    """
    job = SimulationOptions(**options)
    table = observe_lengths(
        dataset, process_fn=process_fn, observe=observe, samples=looked_at, seed=job.seed
    )
    # One rank with its share of the samples: as many steps, at the same cost for any number.
    share = math.ceil(table.num_samples / job.world_size)
    epoch = TableEpoch(table=replace(table, sizes=(share,)), shuffle=False, samples=MOST_DRAWN)
    report = epoch.report(replace(job, world_size=1, cost_fn=None))
    return max(1, math.ceil(report.steps / job.accumulate))


def estimate_loader_steps(
    dataset: Any, options: LoaderOptions, *, world_size: int, looked_at: int
) -> int:
    """Return `estimate_steps` of an `ODBDataLoader` with these options, on `world_size` ranks."""
    process_fn: Any = options.process_fn  # No dict: that goes with a dict of datasets.
    return estimate_steps(
        dataset,
        process_fn=process_fn,
        observe=options.observe,
        looked_at=looked_at,
        **vars(job_of(options, world_size)),
    )
