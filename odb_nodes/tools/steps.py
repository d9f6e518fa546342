"""Remake a step of a run for all ranks in one process: its samples and its batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import check_count, check_type
from odb_nodes._support.text import counted
from odb_nodes.core.alignment import RankAligner
from odb_nodes.core.alignment.aligned_round import info_of_step
from odb_nodes.core.alignment.exchange import Exchange
from odb_nodes.core.alignment.peers import VirtualTeam
from odb_nodes.core.contract.again import restore_items
from odb_nodes.core.contract.graph import begin_epoch, close_nodes, walk
from odb_nodes.core.contract.node import can_restore
from odb_nodes.core.contract.state_file import load_state
from odb_nodes.core.loader import Loader, ODBDataLoader
from odb_nodes.core.nodes import GroupCollator, PlannedGroups, WindowBucketer
from odb_nodes.core.planning.rank_plan import SettledRound
from odb_nodes.core.planning.rounds import GroupCost, step_totals
from odb_nodes.core.sample import ItemKey, Sample
from odb_nodes.core.sample_block import NO_SAMPLES, SampleBlock
from odb_nodes.core.step_info import STEP_INFO_KEY, StepInfo
from odb_nodes.errors import StateError
from odb_nodes.tools.inspection import part_of, read_inspections
from odb_nodes.training.checkpoints.rank_states import rank_files
from odb_nodes.training.ledger.history import read_steps

__all__ = ["RemadeStep", "remake_from_checkpoint", "remake_from_ledger"]

_TIMEOUT_S = 600.0

MakeLoader = Callable[[Any], "ODBDataLoader | Loader[Any]"]


@dataclass(frozen=True, kw_only=True)
class RemadeStep:
    """A remade step of one rank.

    Attributes:
        rank: the rank.
        info: its `StepInfo`; `keys`, `row_sources` and `left_out` name the samples.
        tokens: length of each sample, in the order of the rows.
        targets: supervised tokens of each sample.
        batch: its batch, bit for bit; `None` for a filler step from a ledger, which does not record
            the sample of a filler.
    """

    rank: int
    info: StepInfo
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    batch: Mapping[str, Any] | None

    def __str__(self) -> str:
        info = self.info
        head = (
            f"rank {self.rank}, epoch {info.epoch}, step {info.step}: "
            f"{counted(info.local_samples, 'sample')}, "
            f"{info.local_targets:,} of {counted(info.optimizer_targets, 'target')}, "
            f"loss_scale {info.loss_scale:.6g}{', filler' if info.is_filler else ''}"
        )
        rows = zip(info.row_sources, info.keys, self.tokens, self.targets, strict=True)
        lines = [
            f"  {f'{source} ' if source else ''}{key}: "
            f"{counted(tokens, 'token')}, {counted(targets, 'target')}"
            for source, key, tokens, targets in rows
        ]
        out = [
            f"  left out: {sample.source} {sample.key} ({sample.reason})"
            for sample in info.left_out
        ]
        return "\n".join([head, *lines, *out])

    def as_dict(self) -> dict[str, Any]:
        """Return the step as plain data and tensors."""
        info = vars(self.info) | {
            "per_rank_sources": sorted(self.info.per_rank_sources),
            "local_sources": {name: (*count,) for name, count in self.info.local_sources.items()},
            "left_out": [(*sample,) for sample in self.info.left_out],
        }
        return {
            "rank": self.rank,
            "info": info,
            "tokens": list(self.tokens),
            "targets": list(self.targets),
            "batch": None if self.batch is None else dict(self.batch),
        }


def remake_from_ledger(
    make_loader: MakeLoader, folder: str | os.PathLike[str], *, epoch: int, step: int
) -> list[RemadeStep]:
    """Remake a step that a `Ledger` has recorded; one `RemadeStep` for each rank.

    Its samples are read by their keys, so no checkpoint is needed, and no earlier step is remade.
    The loader must have the data, functions, budget and seed of the run. If the ledger lacks other
    steps of the same optimizer step, as in a run that was stopped within it, `loss_scale` is NaN
    and the totals of the optimizer step are 0: they are unknown.

    Args:
        make_loader: `process_group` -> loader of one rank.
        folder: the folder of the ledger.
        epoch: number of the epoch.
        step: number of the step in the epoch.

    Raises:
        ValueError: a source cannot read items by their keys; see `remake_from_checkpoint`.
        StateError: the ledger has no such step, or a sample of the step has no key.
    """
    epoch, step = check_count("epoch", epoch, 0), check_count("step", step, 0)
    if not (recorded := read_steps(folder, epoch, [step])):
        raise StateError(f"the ledger in `{folder}` has no step {step} of epoch {epoch}.")
    ranks = len(recorded[step])
    with _graphs(make_loader, ranks, processes=ranks) as graphs:
        accumulate = 1 if graphs[0].aligner is None else graphs[0].aligner.accumulate
        optimizer_step = range(step - step % accumulate, step - step % accumulate + accumulate)
        records = read_steps(folder, epoch, optimizer_step)
        steps = [records[number] for number in sorted(records)]
        ends = all(record.ends_epoch for record in steps[-1])
        is_whole = sorted(records) == [*optimizer_step[: len(steps)]] and (
            len(steps) == accumulate or ends
        )
        groups: list[list[SampleBlock]] = []  # rank -> step of the optimizer step -> samples
        for rank, graph in enumerate(graphs):
            begin_epoch(graph.samples, epoch)
            groups.append(
                [_restored(graph, records_of_step[rank], len(graphs)) for records_of_step in steps]
            )
            close_nodes(graph.samples, _TIMEOUT_S)
        index = sorted(records).index(step)
        remade = [
            _remade(rank, graph, *_with_info(graph, groups, steps, rank, index))
            for rank, graph in enumerate(graphs)
        ]
    unknown: Any = {"loss_scale": nan, "optimizer_samples": 0, "optimizer_targets": 0}
    if is_whole:
        return remade
    return [
        replace(remade_step, info=replace(remade_step.info, **unknown)) for remade_step in remade
    ]


def remake_from_checkpoint(
    make_loader: MakeLoader, states: str | os.PathLike[str] | Sequence[Any], *, further: int = 0
) -> list[RemadeStep]:
    """Remake the step that follows a checkpoint; one `RemadeStep` for each rank.

    All ranks run in this process, in turn. It works for every source, and without a ledger.

    Args:
        make_loader: `process_group` -> loader of one rank.
        states: the folder of a checkpoint, with a file of each rank; or the states of the ranks in
            order: states of loaders, or dicts that hold the state of a loader.
        further: number of steps to remake after the first; the last of them is returned.

    Raises:
        StateError: the folder lacks the state of a rank, or a state does not fit the loader.
    """
    further = check_count("further", further, 0)
    if isinstance(states, (str, os.PathLike)):
        states = [*map(load_state, rank_files(states))]
    collator_states: list[Any] = []
    for rank, state in enumerate(states):
        graphs = part_of(state, "VirtualRanks").get("sources", {"": state})
        collator_states += [
            part_of(graph_state, "GroupCollator") for graph_state in graphs.values()
        ]
        if not collator_states[-1]:
            raise StateError(
                f"the state of rank {rank} holds none of a `GroupCollator`: it is {state!r:.200}."
            )
    with _graphs(make_loader, len(collator_states), len(states)) as graphs:
        aligners = [graph.aligner for graph in graphs if graph.aligner is not None]
        for graph, state in zip(graphs, collator_states, strict=True):
            graph.collator.reset(state)
        for steps_done in range(further + 1):
            try:
                if aligners:  # they settle a round together
                    prepared = [aligner.prepare_step() for aligner in aligners]
                    aligners[0].peers.drive(prepared, lambda: aligners[0].where)
                items = [graph.collator.take_group() for graph in graphs]
            except StopIteration:
                raise StateError(
                    f"the epoch has {steps_done} steps after this state, but step {further + 1} "
                    "was asked for."
                ) from None
        shift = 0 if aligners else further
        return [
            _remade(rank, graph, group, replace(info, step=info.step + shift))
            for rank, (graph, (group, info)) in enumerate(zip(graphs, items, strict=True))
        ]


def remake_from_folder(
    make_loader: MakeLoader, folder: Path, *, epoch: int | None, step: int
) -> list[RemadeStep]:
    """Remake a step from a ledger, or from a checkpoint that was saved before it."""
    if any(folder.glob("rank-*.ledger")):
        return remake_from_ledger(make_loader, folder, epoch=epoch or 0, step=step)
    name, (first, *_) = read_inspections(folder)
    if epoch is not None and epoch != int(first.facts["epoch"]):
        raise ValueError(
            f"--epoch must be {first.facts['epoch']}, in which `{name}` was saved, but is {epoch}."
        )
    if step < (done := int(first.facts["step"])):
        raise ValueError(
            f"--step must be at least {done}, the first step after `{name}`, but is {step}."
        )
    return remake_from_checkpoint(make_loader, name, further=step - done)


class _Graph(NamedTuple):
    """The nodes of the graph of one rank that make a step."""

    collator: GroupCollator
    aligner: RankAligner | None
    samples: BaseNode[Any]


@contextmanager
def _graphs(make_loader: MakeLoader, ranks: int, processes: int) -> Iterator[list[_Graph]]:
    """Make the graphs of all ranks in this process.

    processes: number of processes of the run, by which losses are weighted.
    """
    graphs = []
    with ExitStack() as stack:
        for group in VirtualTeam(ranks, Exchange(), _TIMEOUT_S, processes).ranks():
            loader = make_loader(group)
            check_type("make_loader(process_group)", loader, ODBDataLoader | Loader)
            stack.callback(close_nodes, loader.root, _TIMEOUT_S)
            nodes = [*walk(loader.root)]
            collator = _only(nodes, GroupCollator)
            aligner = next((node for node in nodes if isinstance(node, RankAligner)), None)
            samples: Any = next((node for node in nodes if isinstance(node, PlannedGroups)), None)
            if samples is None:
                samples = _only(nodes, WindowBucketer).source
            graphs.append(_Graph(collator, aligner, samples))
        yield graphs


def _only(nodes: Sequence[BaseNode[Any]], kind: type[Any]) -> Any:
    """Return the only node of a class."""
    matching = [node for node in nodes if isinstance(node, kind)]
    if len(matching) != 1:
        raise ValueError(f"the graph must have one `{kind.__name__}`, but has {len(matching)}.")
    return matching[0]


def _restored(graph: _Graph, record: StepInfo, world_size: int) -> SampleBlock:
    """Return the samples of a recorded step of a rank."""
    if None in record.keys:
        raise StateError("a sample of this step has no key, so it cannot be read again.")
    if not can_restore(graph.samples):
        raise ValueError(
            "a source of this loader cannot read items by their keys. Make the step again from a "
            "checkpoint before it: `remake_from_checkpoint`."
        )
    per_rank_sources = record.per_rank_sources
    wanted: list[Any] = [*zip(record.row_sources, record.keys, strict=True)]
    items = [
        ItemKey(source, key, 1 if source in per_rank_sources else world_size, repeat)
        for (source, key), repeat in zip(wanted, record.row_repeats, strict=True)
    ]
    samples = list(restore_items(graph.samples, items))
    for sample, (source, key) in zip(samples, wanted, strict=True):
        if not isinstance(sample, Sample) or (sample.source, sample.key) != (source, key):
            raise StateError(
                f"the sample that is read for key {key} is {sample!r:.200}: the data or the "
                "processing changed, or keys are your own (`Observation.key`), by which nothing "
                "can be read. Make the step again from a checkpoint before it."
            )
    return SampleBlock.of(samples)


def _with_info(
    graph: _Graph,
    groups: Sequence[Sequence[SampleBlock]],
    records: Sequence[Sequence[StepInfo]],
    rank: int,
    index: int,
) -> tuple[Sequence[Sample], StepInfo]:
    """Return the samples of a rank at a step of an optimizer step, and its `StepInfo`."""
    group, record = groups[rank][index], records[index][rank]
    names = ("epoch", "ends_epoch", "left_out")
    facts: dict[str, Any] = {name: getattr(record, name) for name in names}
    if graph.aligner is None:
        return group, replace(graph.collator.info_of(group, record.step), **facts)
    cost_estimator = graph.aligner.cost_estimator
    nothing = GroupCost(0, 0, 0, tasks=(0,) * len(cost_estimator.tasks))
    costs = [
        [cost_estimator(group) if group else nothing for group in of_rank] for of_rank in groups
    ]
    settled = SettledRound(step_totals(costs))
    rows = NO_SAMPLES if record.is_filler else group
    return rows, info_of_step(
        settled, index, rows, graph.aligner.rule, cost_estimator, step=record.step, **facts
    )


def _remade(rank: int, graph: _Graph, group: Sequence[Sample], info: StepInfo) -> RemadeStep:
    rows = [] if info.is_filler else group
    batch = graph.collator.collate(group, info) if group else None
    if batch is not None:
        info = batch.pop(STEP_INFO_KEY)
    return RemadeStep(
        rank=rank,
        info=info,
        tokens=tuple(sample.tokens for sample in rows),
        targets=tuple(sample.targets for sample in rows),
        batch=batch,
    )
