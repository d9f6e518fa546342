"""Make a step of a run again, of all its ranks, in one process: its samples, and its batches.

python -m odb_nodes.tools.steps train:make_loader --ledger run/ledger --epoch 2 --step 1204
python -m odb_nodes.tools.steps train:make_loader --checkpoint run/checkpoint-1200 --out step.pt
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any, TypeVar

import numpy as np
import torch
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_count, check_type
from odb_nodes._core.command_line import check_is_writable, file_of, load_function
from odb_nodes.alignment import RankAligner
from odb_nodes.alignment.aligned_round import AlignedRound
from odb_nodes.alignment.exchange.base import Exchange
from odb_nodes.alignment.exchange.in_process import InProcessHub
from odb_nodes.contract.graph import begin_epoch, close_nodes, walk
from odb_nodes.contract.node import can_restore, restore_items
from odb_nodes.contract.state_file import load_state
from odb_nodes.errors import StateError
from odb_nodes.ledger.steps import StepRecord, read_steps
from odb_nodes.loader import Loader, ODBDataLoader
from odb_nodes.loader.rank_states import rank_files
from odb_nodes.nodes import GroupCollator, WindowBucketer
from odb_nodes.planning.rounds import FILLER, GroupCost, step_totals
from odb_nodes.sample import ItemKey, Sample
from odb_nodes.sample_block import SampleBlock
from odb_nodes.step_info import StepInfo
from odb_nodes.tools.lengths import files_read
from odb_nodes.tools.remade_step import RemadeStep
from odb_nodes.tools.step_arguments import parse_arguments

__all__ = ["RemadeStep", "main", "remake_from_checkpoint", "remake_from_ledger"]

_TIMEOUT_S = 600.0

N = TypeVar("N", bound=BaseNode[Any])
MakeLoader = Callable[[Any], "ODBDataLoader | Loader[Any]"]


def remake_from_ledger(
    make_loader: MakeLoader, folder: str | os.PathLike[str], *, epoch: int, step: int
) -> list[RemadeStep]:
    """Make a step again whose samples a `Ledger` has recorded; one `RemadeStep` for each rank.

    Its samples are read by their keys, so no checkpoint is needed, and nothing before the step is
    made again. The loader must be the one of the run: the same data, functions, budget and seed.
    Where the ledger lacks steps of the same optimizer step, as where a run was stopped within one,
    `loss_scale` is NaN, and the totals of the optimizer step are 0: nobody can know them.

    Args:
        make_loader: makes the loader of one rank, for the `process_group` that it is given.
        folder: the folder of the ledger.
        epoch: number of the epoch.
        step: number of the step in it.

    Raises:
        ValueError: a source cannot read items by their keys; see `remake_from_checkpoint`.
        StateError: the ledger has no such step, or a sample of it has no key.
    """
    check_count("epoch", epoch, 0)
    check_count("step", step, 0)
    if not (found := read_steps(folder, epoch, [step])):
        raise StateError(f"the ledger in `{folder}` has no step {step} of epoch {epoch}.")
    hub = InProcessHub(len(found[step]), _TIMEOUT_S)
    groups: list[list[SampleBlock]] = []  # rank -> step of the optimizer step -> samples
    with ExitStack() as stack:
        ranks = range(hub.world_size)
        graphs = [stack.enter_context(_graph(make_loader, hub.exchange(rank))) for rank in ranks]
        first = step - step % graphs[0].accumulate
        records = read_steps(folder, epoch, range(first, first + graphs[0].accumulate))
        steps = [records[one] for one in sorted(records)]
        is_whole = len(steps) == graphs[0].accumulate or (
            [*records] == [*range(first, first + len(steps))]
            and all(one.ends_epoch for one in steps[-1])
        )
        for rank, graph in enumerate(graphs):
            begin_epoch(graph.samples, epoch)
            groups.append([graph.restore_items(one[rank], hub.world_size) for one in steps])
            close_nodes(graph.samples, _TIMEOUT_S)
        index = sorted(records).index(step)
        items = [_with_info(graphs[rank], groups, steps, rank, index) for rank in ranks]
        remade = [graphs[rank].remade(rank, *items[rank]) for rank in ranks]
        return remade if is_whole else [_without_weight(one) for one in remade]


def _without_weight(remade: RemadeStep) -> RemadeStep:
    info = dataclasses.replace(
        remade.info, loss_scale=nan, optimizer_samples=0, optimizer_targets=0
    )
    return dataclasses.replace(remade, info=info)


def remake_from_checkpoint(
    make_loader: MakeLoader, states: str | os.PathLike[str] | Sequence[Any], *, further: int = 0
) -> list[RemadeStep]:
    """Make the step again that follows a checkpoint; one `RemadeStep` for each rank.

    All ranks run in this process, each on a thread. It works for every source, and for steps of
    which there is no ledger.

    Args:
        make_loader: makes the loader of one rank, for the `process_group` that it is given.
        states: the folder of a checkpoint, with a file of each rank; or the states of the ranks in
            their order. Each is that of a loader, or holds it.
        further: steps to go on after the first one.

    Raises:
        StateError: the folder has not one state of each rank, or a state does not fit the loader.
    """
    check_count("further", further, 0)
    if isinstance(states, (str, os.PathLike)):
        states = [*map(load_state, rank_files(states))]
    hub = InProcessHub(len(states), _TIMEOUT_S)
    failures: list[BaseException] = []  # the first is the cause of the others

    def run(rank: int) -> RemadeStep | None:
        try:
            with _graph(make_loader, hub.exchange(rank)) as graph:
                graph.collator.reset(_collator_state(states[rank], graph.collator, rank))
                group, info = _group_after(graph.collator, further)
                if graph.aligner is None:
                    info = dataclasses.replace(info, step=info.step + further)
                return graph.remade(rank, group, info)
        except BaseException as error:
            failures.append(error)
            hub.abort()  # The others would wait for this one.
            return None

    with ThreadPoolExecutor(hub.world_size) as pool:
        remade = list(pool.map(run, range(hub.world_size)))
    if failures:
        raise failures[0]
    return [one for one in remade if one is not None]


@dataclass(frozen=True)
class _Graph:
    """The graph of one rank, and the nodes of it that make a step."""

    root: BaseNode[Any]
    collator: GroupCollator
    aligner: RankAligner | None
    samples: BaseNode[Any]

    @property
    def accumulate(self) -> int:
        """Steps of an optimizer step."""
        return 1 if self.aligner is None else self.aligner.accumulate

    def restore_items(self, record: StepRecord, world_size: int) -> SampleBlock:
        """Return the samples of a step of this rank."""
        if None in record.keys:
            raise StateError("a sample of this step has no key, so it cannot be read again.")
        if not can_restore(self.samples):
            raise ValueError(
                "a source of this loader cannot read items by their keys. Make the step again from "
                "a checkpoint before it: `remake_from_checkpoint`."
            )
        rows = zip(record.keys, record.sources, record.repeats, record.is_own, strict=True)
        items = [
            ItemKey(source, key, 1 if is_own else world_size, repeat)
            for key, source, repeat, is_own in rows
            if key is not None
        ]
        samples = list(restore_items(self.samples, items))
        for sample, key, source in zip(samples, record.keys, record.sources, strict=True):
            if not isinstance(sample, Sample) or (sample.key, sample.source) != (key, source):
                raise StateError(
                    f"the sample that is read for key {key} is {sample!r:.200}: the data or the "
                    "processing changed, or keys are of your own (`Observation.key`), by which "
                    "nothing can be read. Make the step again from a checkpoint before it."
                )
        return SampleBlock.of(samples)

    def remade(self, rank: int, group: Sequence[Sample], info: StepInfo) -> RemadeStep:
        """Return a step with its batch."""
        rows = [] if info.is_filler else group
        batch = self.collator.collate(group, info) if group else None
        if batch is not None:
            info = batch.pop("odb_step_info")
        return RemadeStep(
            rank=rank,
            info=info,
            tokens=tuple(sample.tokens for sample in rows),
            targets=tuple(sample.targets for sample in rows),
            batch=batch,
        )


@contextmanager
def _graph(make_loader: MakeLoader, exchange: Exchange) -> Iterator[_Graph]:
    loader = make_loader(exchange)
    check_type("make_loader(process_group)", loader, ODBDataLoader | Loader)
    root = loader.root
    try:
        collator = _only(root, GroupCollator)
        aligners = [node for node in walk(root) if isinstance(node, RankAligner)]
        yield _Graph(root, collator, (*aligners, None)[0], _only(root, WindowBucketer).source)
    finally:
        close_nodes(root, _TIMEOUT_S)


def _only(root: BaseNode[Any], kind: type[N]) -> N:
    found = [node for node in walk(root) if isinstance(node, kind)]
    if len(found) != 1:
        raise ValueError(f"the graph must have one `{kind.__name__}`, but has {len(found)}.")
    return found[0]


def _with_info(
    graph: _Graph,
    groups: Sequence[Sequence[SampleBlock]],
    records: Sequence[Sequence[StepRecord]],
    rank: int,
    index: int,
) -> tuple[Sequence[Sample], StepInfo]:
    """Return the samples of a rank at a step of an optimizer step, and its `StepInfo`."""
    group, record = groups[rank][index], records[index][rank]
    facts: dict[str, Any] = {
        "epoch": record.epoch,
        "ends_epoch": record.ends_epoch,
        "left_out": record.left_out,
    }
    if graph.aligner is None:
        info = dataclasses.replace(graph.collator.info_of(group, record.step), **facts)
        return group, info
    measure = graph.aligner.measure
    nothing = GroupCost(0, 0, 0, tasks=(0,) * len(measure.tasks))
    costs = [[measure(group) if group else nothing for group in of_rank] for of_rank in groups]
    own = [FILLER if of_ranks[rank].is_filler else at for at, of_ranks in enumerate(records)]
    again = AlignedRound(np.column_stack((own, step_totals(costs))))
    again.fill([*groups[rank]], None)
    rule = dataclasses.replace(graph.aligner.rule, world_size=len(groups))
    return again.take(index, rule, measure, step=record.step, **facts)


def _group_after(collator: GroupCollator, further: int) -> tuple[Sequence[Sample], StepInfo]:
    for taken in range(further + 1):
        try:
            group = collator.take_group()
        except StopIteration:
            raise StateError(
                f"the epoch has {taken} steps after this state, but step {further + 1} was asked "
                "for."
            ) from None
    return group


def _collator_state(state: Any, collator: GroupCollator, rank: int) -> dict[str, Any]:
    name = type(collator).__name__
    if found := _part(state, name):
        return found
    raise StateError(f"the state of rank {rank} holds none of a `{name}`: it is {state!r:.200}.")


def _part(state: Any, node: str) -> dict[str, Any]:
    """Return the state of a node that is somewhere within another one."""
    if isinstance(state, Mapping):
        if state.get("node") == node:
            return dict(state)
        parts: Sequence[Any] = [*state.values()]
    else:
        parts = state if isinstance(state, (list, tuple)) else []
    for part in parts:
        if found := _part(part, node):
            return found
    return {}


def main(arguments: Sequence[str] | None = None, prog: str = "odb_nodes.tools.steps") -> int:
    """Print a step of a run on all ranks, and write it to a file.

    Args:
        arguments: of the command line; default: those of this process.
        prog: what the command is called.
    """
    args = parse_arguments(arguments, prog)
    function = load_function(args.make_loader, "process_group")

    def make_loader(process_group: Any) -> ODBDataLoader | Loader[Any]:
        loader: ODBDataLoader | Loader[Any] = function(process_group)
        if args.out and isinstance(loader, ODBDataLoader | Loader):
            inputs = [file_of(args.make_loader), *files_read(loader.root)]
            check_is_writable(args.out, filter(None, inputs), force=args.force)
        return loader

    if args.checkpoint:
        remade = remake_from_checkpoint(make_loader, args.checkpoint, further=args.further)
    else:
        remade = remake_from_ledger(make_loader, args.ledger, epoch=args.epoch, step=args.step)
    print(*remade, sep="\n")
    if args.out:
        torch.save([one.as_dict() for one in remade], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
