"""The graph of one rank of an `ODBDataLoader`, from its samples to its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torchdata.nodes import BaseNode

from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment import RankAligner
from odb_nodes.alignment.exchange import group_rank
from odb_nodes.alignment.peers import VirtualTeam
from odb_nodes.collate import PackedCollate, PaddingCollate
from odb_nodes.collate.for_budget import collate_for
from odb_nodes.collate.protocol import Collate
from odb_nodes.loader.options import LoaderOptions
from odb_nodes.loader.pinning import PinningCollate
from odb_nodes.loader.pipeline import sample_node
from odb_nodes.nodes import GroupCollator, WindowBucketer
from odb_nodes.processing import ParallelProcessor, WorkerOptions
from odb_nodes.processing.options import share_of
from odb_nodes.sources.datasets import dataset_of_rank
from odb_nodes.sources.source_mixer import SourceMixer


class RankGraph:
    """The graph of one rank.

    Args:
        dataset: the `dataset` of the `ODBDataLoader`.
        options: its options; `process_group` is that of this rank.

    Attributes:
        samples: the node that yields the processed samples.
        bucketer: forms the groups.
        aligner: gives all ranks the same steps.
        collator: makes the batches; the last node.
    """

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        collate = collate_for(options.budget, options.collate_fn)
        # A subclass is left out: its `__call__` may expect the samples as processing returned them.
        ours = type(collate) in (PaddingCollate, PackedCollate)
        self.samples = sample_node(
            dataset, options, getattr(collate, "prepare", None) if ours else None
        )
        self.bucketer = WindowBucketer(
            self.samples,
            options.budget,
            options.window,
            options.state,
            options.exclude,
            options.dearest_first,
            options.diversity,
        )
        pinning = None
        if options.pin_memory and torch.cuda.is_available():
            pinning = PinningCollate(collate)
        self.aligner = RankAligner(
            self.bucketer,
            options.process_group,
            options.round_size,
            options.uneven,
            options.loss_scaling,
            options.accumulate,
            options.seed,
            options.timeout_s,
            tasks=options.tasks,
        )
        rank, _ = group_rank(options.process_group)
        self.collator = GroupCollator(self.aligner, pinning or collate, options.seed, rank)
        if options.collate_in != "main":
            self._collate_in_workers(collate, pinning.pin if pinning else _as_it_is, options)

    def _collate_in_workers(
        self, collate: Collate, finish: Callable[[Any], Any], options: LoaderOptions
    ) -> None:
        processors, always = [*_processors(self.samples)], options.collate_in == "workers"
        why_not = "" if options.prefetch else "`prefetch` is 0"
        for one in processors:
            why_not = why_not or one.runner.cannot_make_batches(collate)
        if not why_not:
            self.collator.collate_in_workers(processors, collate, finish, always=always)
        elif always:
            warn_user(
                f'`collate_in="workers"` has no effect, since {why_not}: the trainer\'s process '
                "makes the batches."
            )


def _processors(samples: BaseNode[Any]) -> Iterator[ParallelProcessor[Any]]:
    """Yield the nodes whose results are samples: those of each source, or one for all."""
    last = samples.sources.values() if isinstance(samples, SourceMixer) else [samples]
    return (one for one in last if isinstance(one, ParallelProcessor))


def _as_it_is(batch: Any) -> Any:
    return batch


def graphs_of_team(dataset: Any, options: LoaderOptions, team: VirtualTeam) -> list[RankGraph]:
    """Return the graphs of the virtual ranks that this process hosts, which share its workers.

    Raises:
        TypeError: a dataset cannot be read for several ranks in one process.
    """
    workers = options.workers or WorkerOptions(num_workers=options.num_workers)
    workers = share_of(workers, team.hosted)
    shared = replace(options, workers=workers, num_workers=0, virtual_ranks=None)
    graphs = []
    for one in team.ranks():
        own = dataset_of_rank(dataset, one.rank, one.world_size)
        graphs.append(RankGraph(own, replace(shared, process_group=one)))
    return graphs
