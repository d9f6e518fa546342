"""Estimate steps, padding and balance of an epoch before its first batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Subset

from odb_nodes._support.checks import check_type
from odb_nodes._support.text import counted
from odb_nodes.core.alignment.exchange import group_rank
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.loader import ODBDataLoader
from odb_nodes.core.loader.options import LoaderOptions
from odb_nodes.core.loader.pipeline import lengths_before
from odb_nodes.core.nodes.exclusions import ExcludedKeys
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.planning import SimulationOptions
from odb_nodes.core.planning.known_epochs import known_window
from odb_nodes.core.planning.known_lengths import plan_known
from odb_nodes.core.planning.options import JobOptions
from odb_nodes.core.planning.simulation import SimulationKeywords
from odb_nodes.core.processing import WorkerOptions
from odb_nodes.core.sample import Observe, Sample
from odb_nodes.core.sources import JsonlSource
from odb_nodes.tools.lengths import LengthTable, is_map_style, observe_lengths
from odb_nodes.tools.simulate import MOST_DRAWN, SimulationReport, TableEpoch

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["EpochEstimate", "estimate_epoch", "estimate_steps", "table_of_loader"]

ESTIMATE_SAMPLES = 512
"""Default number of samples that an estimate processes."""


@dataclass(frozen=True, kw_only=True)
class EpochEstimate:
    """An estimate of the first epoch of a loader.

    Attributes:
        steps: number of batches of each rank.
        optimizer_steps: number of optimizer steps.
        relative_error: relative standard error of both numbers; 0 if all samples were processed.
            The error seldom exceeds twice this.
        padding_share: padding tokens / tokens of all batches.
        balance: sum over the steps of the ranks' mean tokens / sum of the largest batch's.
        report: further measures of the simulated steps.
    """

    steps: int
    optimizer_steps: int
    relative_error: float
    padding_share: float
    balance: float
    report: SimulationReport

    def __str__(self) -> str:
        about = f" (+- {2 * self.relative_error:.1%})" if self.relative_error else ""
        steps = counted(self.steps, "step")
        if self.optimizer_steps != self.steps:
            steps += f", {counted(self.optimizer_steps, 'optimizer step')}"
        return f"{steps}{about}, padding {self.padding_share:.1%}, balance {self.balance:.3f}"


def estimate_epoch(loader: ODBDataLoader, samples: int | None = ESTIMATE_SAMPLES) -> EpochEstimate:
    """Estimate the first epoch of a loader.

    It processes some samples in this thread, and plans the steps of all ranks from their lengths,
    without communication. Loader and random generators do not change.

    Args:
        loader: the loader, at any position.
        samples: number of samples of each dataset to process; `None` for all.

    Raises:
        TypeError: the dataset can be read only by iterating it, which might disturb the loader.
        ValueError: `samples` is not valid, or there is no step.
        SampleError: a sample cannot be processed.
    """
    table = table_of_loader(loader, samples)
    options = loader.options
    processes = group_rank(options.process_group)[1]
    job = replace(job_of(options, processes), lengths_known=knows_lengths(loader))
    shuffle = options.shuffle is not False and options.sampler is None
    shares_rest = options.state == "replay"
    epoch = TableEpoch(
        table=table, shuffle=shuffle, weights=options.weights, shares_rest=shares_rest
    )
    report = epoch.report(job)
    return EpochEstimate(
        steps=report.steps * job.world_size // processes,
        optimizer_steps=-(-report.steps // job.accumulate),
        relative_error=table.relative_error,
        padding_share=report.padding_share,
        balance=report.balance,
        report=report,
    )


def estimate_steps(
    dataset: Any,
    *,
    process_fn: Callable[[Any], Any] | None = None,
    observe: Observe | None = None,
    samples: int = ESTIMATE_SAMPLES,
    **options: Unpack[SimulationKeywords],
) -> int:
    """Return about how many optimizer steps an epoch has.

    It processes some samples drawn at random, and plans an epoch of as many samples as the dataset
    has, with lengths drawn from theirs. On lengths with a long tail, the error of 512 samples is
    some percent.

    Args:
        dataset: the map-style dataset to train on, with a length, or a `JsonlSource`.
        process_fn: item of the dataset -> processed sample.
        observe: processed sample -> its tokens; see `LengthObserver`.
        samples: number of samples to process.
        options: the fields of `SimulationOptions`: `world_size` and `budget`, and where they differ
            from the defaults `window`, `lengths_known`, `accumulate` and `seed`, which also seeds
            the draw.

    Raises:
        TypeError, ValueError: an option is not valid.
    """
    job = SimulationOptions(**options)
    table = observe_lengths(
        dataset, process_fn=process_fn, observe=observe, samples=samples, seed=job.seed
    )
    # One rank with its share of the samples has as many steps, and the cost does not grow with
    # the number of ranks.
    share = math.ceil(table.num_samples / job.world_size)
    epoch = TableEpoch(table=replace(table, sizes=(share,)), shuffle=False, samples=MOST_DRAWN)
    report = epoch.report(replace(job, world_size=1, step_time=None))
    return max(1, math.ceil(report.steps / job.accumulate))


def estimate_loader_steps(
    dataset: Any, options: LoaderOptions, *, world_size: int, samples: int
) -> int:
    """Return `estimate_steps` of an `ODBDataLoader` with these options, on `world_size` ranks.

    If the loader has known lengths, the steps are counted, and no sample is processed.
    """
    if (lengths := lengths_before(dataset, options)) is not None:
        plan = plan_known(
            np.arange(len(lengths.tokens)),
            lengths.tokens,
            options.budget,
            world_size=options.virtual_ranks or world_size,
            window=known_window(options.window, in_order=options.shuffle is False),
        )
        return max(1, math.ceil(len(plan) / options.accumulate))
    process_fn: Any = options.process_fn  # No dict: that goes with a dict of datasets.
    return estimate_steps(
        dataset,
        process_fn=process_fn,
        observe=options.observe,
        samples=samples,
        **vars(job_of(options, world_size)),
    )


def knows_lengths(loader: ODBDataLoader) -> bool:
    """Tell whether a loader plans its epochs by lengths that it knows."""
    return any(isinstance(node, PlannedGroups) for node in walk(loader.root))


def check_samples_can_be_drawn(
    dataset: Any, remedy: str, subject: str = "the steps of an epoch can be estimated"
) -> None:
    """Reject a dataset whose samples an estimate cannot draw; every rank calls it."""
    if not (is_map_style(dataset) or isinstance(dataset, JsonlSource)):
        raise TypeError(
            f"{subject} only where the dataset is map-style with a length, or a `JsonlSource`, "
            f"but it is `{type(dataset).__name__}`. {remedy}"
        )


def job_of(options: LoaderOptions, processes: int) -> SimulationOptions:
    """Return the job of loaders with these options in a number of processes."""
    return SimulationOptions(
        world_size=options.virtual_ranks or processes,
        budget=options.budget,
        **{field.name: getattr(options, field.name) for field in fields(JobOptions)},
    )


def table_of_loader(
    loader: ODBDataLoader, samples: int | None = None, workers: WorkerOptions | None = None
) -> LengthTable:
    """Return the lengths of the samples of a loader, as all its ranks read them.

    Args:
        loader: the loader.
        samples: number of samples of each dataset to process; `None` for all.
        workers: how processing runs in parallel. Default: in this thread.

    Raises:
        TypeError: the dataset can be read only by iterating it.
        ValueError: `samples` is not valid, or there is no sample.
        SampleError: a sample cannot be processed.
    """
    check_type("loader", loader, ODBDataLoader)
    options, dataset = loader.options, loader.dataset
    for part in dataset.values() if type(dataset) is dict else [dataset]:
        remedy = "Make a second dataset of it, and pass that to `observe_lengths` and `simulate`."
        check_samples_can_be_drawn(part, remedy, "an epoch can be estimated")
    indices = None if options.sampler is None else [*options.sampler]
    if indices is not None:
        dataset = Subset(dataset, indices)
    table = observe_lengths(
        dataset,
        process_fn=options.process_fn,
        observe=options.observe,
        samples=samples,
        seed=options.seed,
        workers=workers,
    )
    if indices is not None:
        keys = np.array(indices, dtype=np.int64)[table.keys]
        table = replace(table, keys=keys, streams=table.names)  # read in the sampler's order
    if options.sharded:  # The data of the other ranks is taken to be alike.
        world_size = group_rank(options.process_group)[1]
        table = replace(table, sizes=tuple(size * world_size for size in table.sizes))
    if exclude := ExcludedKeys.of(options.exclude):
        rows = zip(table.sources.tolist(), table.keys.tolist(), strict=True)
        candidates = (Sample(None, 1, 0, 0, table.names[number], key=key) for number, key in rows)
        table = table.skipping(np.array([sample in exclude for sample in candidates]))
    return table
