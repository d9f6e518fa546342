"""The graph of one rank of an `ODBDataLoader`, from its samples to its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from odb_nodes._compat.torch import pin_memory
from odb_nodes._core.seeds import declares_draws
from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment import RankAligner
from odb_nodes.alignment.exchange import group_rank
from odb_nodes.alignment.peers import VirtualTeam
from odb_nodes.collate import PackedCollate, PaddingCollate
from odb_nodes.collate.for_budget import collate_for
from odb_nodes.collate.protocol import Collate, collate_group
from odb_nodes.loader.options import LoaderOptions
from odb_nodes.loader.pipeline import sample_node
from odb_nodes.nodes import GroupCollator, WindowBucketer
from odb_nodes.processing import ParallelProcessor, WorkerOptions
from odb_nodes.processing.options import share_of
from odb_nodes.sources.datasets import dataset_of_rank
from odb_nodes.sources.source_mixer import SourceMixer
from odb_nodes.step_info import StepInfo


class RankGraph:
    """The graph of one rank: `options.process_group` is that of this rank.

    Attributes:
        samples: the node that yields the processed samples.
        bucketer: forms the groups.
        aligner: gives all ranks the same steps.
        collator: makes the batches; the last node.
    """

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        collate = collate_for(options.budget, options.collate_fn)
        # A subclass is left out: its `__call__` may expect the samples as processing returned them.
        is_ours = type(collate) in (PaddingCollate, PackedCollate)
        prepare = getattr(collate, "prepare", None) if is_ours else None
        self.samples = sample_node(dataset, options, prepare)
        self.bucketer = WindowBucketer(
            self.samples,
            options.budget,
            options.window,
            options.state,
            options.exclude,
            options.dearest_first,
            options.diversity,
        )
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
        is_pinned = options.pin_memory and torch.cuda.is_available()
        pinning = _PinningCollate(collate) if is_pinned else None
        rank, _ = group_rank(options.process_group)
        self.collator = GroupCollator(self.aligner, pinning or collate, options.seed, rank)
        if options.collate_in != "main":
            self._collate_in_workers(collate, pinning.pin if pinning else _as_it_is, options)

    def _collate_in_workers(
        self, collate: Collate, finish: Callable[[Any], Any], options: LoaderOptions
    ) -> None:
        mixer, always = self.samples, options.collate_in == "workers"
        last = mixer.sources.values() if isinstance(mixer, SourceMixer) else [mixer]
        processors = [one for one in last if isinstance(one, ParallelProcessor)]
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


def _as_it_is(batch: Any) -> Any:
    return batch


class _PinningCollate:
    """Pins what a collate function returns, for the device that is current when this is made."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate
        self._device = torch.cuda.current_device()  # A new thread begins with device 0.
        self.draws_random_numbers = declares_draws(collate)

    def pin(self, batch: Any) -> Any:
        with torch.cuda.device(self._device):
            return pin_memory(batch)

    def __call__(self, samples: list[Any]) -> Any:
        return self.pin(self._collate(samples))

    def collate_step(self, samples: list[Any], info: StepInfo) -> Any:
        return self.pin(collate_group(self._collate, samples, info))


def graphs_of_team(dataset: Any, options: LoaderOptions, team: VirtualTeam) -> list[RankGraph]:
    """Return the graphs of the virtual ranks that this process hosts, which share its workers."""
    workers = options.workers or WorkerOptions(num_workers=options.num_workers)
    workers = share_of(workers, team.hosted)
    shared = replace(options, workers=workers, num_workers=0, virtual_ranks=None)
    graphs = []
    for one in team.ranks():
        own = dataset_of_rank(dataset, one.rank, one.world_size)
        graphs.append(RankGraph(own, replace(shared, process_group=one)))
    return graphs
