"""Turns the states of N ranks into states of M ranks; `reshard_nodes` does so below the loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from odb_nodes._support.checks import check_count, check_type
from odb_nodes._support.difference import difference
from odb_nodes.core.alignment.aligned_round import AlignerState
from odb_nodes.core.alignment.virtual_ranks import VirtualState
from odb_nodes.core.contract import copy_state
from odb_nodes.core.contract.state import (
    DIGEST,
    ENVELOPE,
    SourceState,
    add_digest,
    bounded_depth,
    check_digest,
    seal_whole,
    unseal,
    unseal_whole,
)
from odb_nodes.core.loader.loader import LoaderState
from odb_nodes.core.loader.reshard_nodes import reshard_graph
from odb_nodes.core.loader.reshard_states import NodeStates, Ranks, check_same, config_of, node_of
from odb_nodes.core.nodes.group_collator import CollatorState
from odb_nodes.errors import StateError
from odb_nodes.training.monitor.monitor import Monitor

_VIRTUAL = "VirtualRanks"
_RESHARD_BETWEEN_STEPS = (
    "and their gradients belong to the old ranks. Reshard a checkpoint that was saved when "
    "`StepInfo.ends_optimizer_step` was True."
)
_SAVE_BETWEEN_STEPS = (
    "and their gradients would be lost. Save when `StepInfo.ends_optimizer_step` is True, after "
    "the optimizer step."
)


@bounded_depth("each rank")
def reshard(states: Sequence[Any], world_size: int) -> list[Any]:
    """Return the states with which a job resumes on another number of ranks.

    The remaining samples of the epoch are divided among the new ranks, waiting samples by their
    tokens and unread samples in turn: each sample of the epoch comes once. The result depends on
    the states alone. If the number of ranks stays the same, the states are copied.

    Args:
        states: `state_dict()` of the loader of each rank, saved between the same two optimizer
            steps, in any order. The states may be in dicts, whose other values must be equal on all
            ranks or be states of monitors. If several ranks read the same data, as in a
            `DeviceMesh`, the state of one of them is enough.
        world_size: the new number of ranks.

    Returns:
        The state of each new rank, in order. If the number of ranks changes, values beside the
        loader are the objects of the first rank, not copies.

    Raises:
        TypeError, ValueError: an argument is not valid.
        StateError: the state of a rank is missing or damaged; the states are of different steps, or
            within an optimizer step; or a node cannot be resharded within an epoch. The error names
            the node: `IterableSource`, compressed files, separate data of each rank, pools with
            `state="payload"`, and nodes that are not from this library.
    """
    check_type("states", states, Sequence, "Give the states of all ranks.")
    world_size = check_count("world_size", world_size)
    if not states:
        raise ValueError("`states` must have the state of each rank, but is empty.")
    if _first_loader(states[0]) is None:
        raise StateError(
            "`states` must hold the states of loaders: give the `state_dict()` of each loader, "
            "alone or in a dict."
        )
    order = _order([_opened(_first_loader(state)) for state in states])
    states = [states[index] for index in order]
    if len(states) == world_size:
        return [copy_state(state) for state in states]
    return reshard_parts(states, world_size)


def reshard_parts(states: Sequence[Any], world_size: int, place: str = "state") -> list[Any]:
    """Return the states for `world_size` ranks. `states`: of the old ranks, in their order."""
    first = states[0]
    holder = node_of(states[0])
    if all(map(_is_whole, states)):
        if holder in _RESHARD_BY_NAME and all(node_of(state) == holder for state in states):
            return _RESHARD_BY_NAME[holder](states, world_size)
        bare = [_without_digest(state, place) for state in states]
        return [add_digest(state) for state in reshard_parts(bare, world_size, place)]
    if isinstance(first, Mapping) and all(
        isinstance(state, Mapping) and state.keys() == first.keys() for state in states
    ):
        parts = {
            key: reshard_parts([state[key] for state in states], world_size, f"{place}[{key!r}]")
            for key in first
        }
        return Ranks(len(states), world_size).per_rank(parts)
    for rank, state in enumerate(states):
        if difference(first, state):
            raise StateError(
                f"`{place}` must be equal on all ranks to be resharded, but is {first!r:.80} on "
                f"rank 0, and {state!r:.80} on rank {rank}. Reshard only the states of the loader; "
                "load sharded models (FSDP) with torch.distributed.checkpoint."
            )
    return [first] * world_size  # not copied: it may be a model


def _is_whole(state: object) -> bool:
    return (
        isinstance(state, Mapping) and {*ENVELOPE, DIGEST} <= state.keys() and node_of(state) != ""
    )


def _first_loader(state: object) -> SourceState | None:
    """Return the first state of a loader in a state, or the state itself; `None` without one."""
    if isinstance(state, dict) and node_of(state) == "Loader" and _is_whole(state):
        return state
    inner = state.values() if isinstance(state, Mapping) else ()
    return next(filter(None, map(_first_loader, inner)), None)


def _without_digest(state: Mapping[str, Any], place: str) -> dict[str, Any]:
    check_digest(state, f"{node_of(state)} in `{place}`")
    return {key: value for key, value in state.items() if key != DIGEST}


# --- loaders --------------------------------------------------------------------------------------


def _rank_of_loader(loader: LoaderState) -> tuple[int, int]:
    """Return (rank, world size) of a loader's state, among the ranks that read different data."""
    node = _below_collators(loader.root)
    name, config = node_of(node), config_of(node)
    rank, world_size = config.get("rank"), config.get("world_size")
    if name == _VIRTUAL:
        virtual_ranks = unseal(node, name, VirtualState, config).sources
        if not virtual_ranks or not all(number.isdecimal() for number in virtual_ranks):
            raise StateError(f"`{name}.sources` must have the numbers of ranks, but is damaged.")
        rank = min(map(int, virtual_ranks)) // len(virtual_ranks)
    elif name != "RankAligner":
        raise StateError(
            "the states cannot be resharded: below the `Loader` must be a `RankAligner`, alone or "
            f"under a `GroupCollator`, but is {f'a `{name}`' if name else 'none'}. Use "
            "`ODBDataLoader`, or such a graph."
        )
    if type(rank) is not int or type(world_size) is not int:
        raise StateError(
            f"the states must name their ranks, but a state is of rank {rank} of {world_size}: it "
            "is damaged. Use an earlier checkpoint."
        )
    return rank, world_size


def _order(loaders: Sequence[LoaderState]) -> list[int]:
    """Return for each rank of a job the index of its state."""
    places = [*map(_rank_of_loader, loaders)]
    ranks = [rank for rank, _ in places]
    sizes = sorted({size for _, size in places})
    if len(sizes) > 1:
        raise StateError(f"the states must be of one job, but are of jobs of {sizes} ranks.")
    (size,) = sizes
    if missing := [*islice((rank for rank in range(size) if rank not in ranks), 9)]:
        raise StateError(
            f"the states must be of all {size} ranks, but the states of ranks {missing} are "
            "missing. Use a checkpoint that all ranks have saved."
        )
    for loader, rank in zip(loaders, ranks, strict=True):  # Several may read the same data.
        first = loaders[ranks.index(rank)]
        if not 0 <= rank < size or difference(vars(loader), vars(first)):
            raise StateError(
                "the states must be one for each rank, but are of ranks "
                f"{sorted(ranks)} of {size}, and the states of rank {rank} differ: ranks that read "
                "the same data must save at the same step, and a loader of a single process cannot "
                "be resharded."
            )
    return [ranks.index(rank) for rank in range(size)]


def _opened(state: object) -> LoaderState:
    return unseal_whole(state, "Loader", LoaderState)


def _reshard_loaders(states: Sequence[object], world_size: int) -> list[dict[str, Any]]:
    loaders = [*map(_opened, states)]
    order = _order(loaders)
    if len(order) < len(loaders):
        raise StateError(
            f"{len(loaders)} ranks have saved loaders, but only {len(order)} ranks read different "
            "data: give `Checkpoints` the `process_group` of the loaders, their `DeviceMesh`, and "
            "each loader as a separate part."
        )
    for rank, place in enumerate(order):
        if rank != place:
            raise StateError(
                f"rank {rank} has the state of a loader of rank {place}: files or parts of the "
                "checkpoint were mixed up. Use an earlier checkpoint."
            )
    check_same("Loader", loaders, "ended", "left", "next_epoch", "next_weights")
    roots = [loader.root for loader in loaders]
    first = loaders[0]
    ranks = Ranks(len(loaders), world_size)
    is_over = first.ended or first.left
    is_virtual = node_of(roots[0]) == _VIRTUAL
    if is_virtual:
        new = _move_virtual_ranks(NodeStates.opened(roots, VirtualState, ranks), is_over)
    else:
        new = reshard_graph(roots, ranks, is_over=is_over)
    if not is_over:  # Ranks that have ended an epoch may have had different numbers of steps.
        check_same("Loader", loaders, "num_yielded")
        _check_between_steps(roots[0], _RESHARD_BETWEEN_STEPS)
    yielded = max(loader.num_yielded for loader in loaders)
    if is_virtual:
        yielded = yielded * ranks.before // ranks.after  # batches of all virtual ranks of a process
    return [seal_whole("Loader", replace(first, root=root, num_yielded=yielded)) for root in new]


def _move_virtual_ranks(node: NodeStates[VirtualState], is_over: bool) -> list[SourceState]:
    """Return states of `VirtualRanks` of the same virtual ranks on more or fewer processes."""
    graphs = [graph for state in node.states for graph in state.sources.items()]
    ranks_per_process, odd = divmod(len(graphs), node.ranks.after)
    if odd:
        raise StateError(
            f"the states have {len(graphs)} virtual ranks: the number of ranks must divide it, but "
            f"{node.ranks.after} does not."
        )
    if not is_over:
        collators = NodeStates.opened([graph for _, graph in graphs], CollatorState, node.ranks)
        collators.check_same("epoch", "step")
        aligners = NodeStates.opened(collators.sources, AlignerState, node.ranks)
        aligners.check_same("epoch", "step", "emitted")
    common = {
        **node.sealed[0],
        "config": {**node.config, "world_size": node.ranks.after},
        "turn": 0,
        "samples": 0,
        "step_digest": 0,
    }
    return [
        {**common, "sources": dict(graphs[first : first + ranks_per_process])}
        for first in range(0, len(graphs), ranks_per_process)
    ]


_RESHARD_BY_NAME: Mapping[str, Callable[[Sequence[Any], int], list[dict[str, Any]]]] = {
    "Loader": _reshard_loaders,
    "Monitor": Monitor.reshard_states,
}
"""Name in the seal of a state -> function that reshards such states."""


# --- the position in the state of a loader --------------------------------------------------------


def data_place(state: object) -> tuple[int, int] | None:
    """Return (rank, world size) of a loader's state; `None` if loading it will raise."""
    try:
        return _rank_of_loader(_opened(state))
    except StateError:
        return None


def batches_per_step(state: Mapping[str, Any]) -> int:
    """Return the number of virtual ranks in a state of an `ODBDataLoader`; 1 without them."""
    return len(_graphs_in(state["root"]))


def check_saved_between_steps(state: object) -> None:
    """Raise a `StateError` if a loader's state, or one in a dict, is within an optimizer step."""
    for loader in (state, *state.values()) if isinstance(state, Mapping) else ():
        if node_of(loader) == "Loader" and _is_whole(loader) and not loader["left"]:
            _check_between_steps(loader["root"], _SAVE_BETWEEN_STEPS)


def _check_between_steps(root: SourceState, advice: str) -> None:
    """Raise a `StateError` if the root of a loader is within an optimizer step."""
    graphs = _graphs_in(root)
    node = _below_collators(graphs[0])
    if node_of(node) != "RankAligner":
        return
    aligner = unseal(node, "RankAligner", AlignerState, config_of(node))
    accumulate = node["config"]["accumulate"]
    done = aligner.emitted % accumulate * len(graphs)
    if node_of(root) == _VIRTUAL:
        done += root["turn"]
    if done and not aligner.is_at_end:
        unit = "batches" if len(graphs) > 1 else "steps"
        raise StateError(
            f"the loader stands at step {aligner.step} of epoch {aligner.epoch}, within an "
            f"optimizer step of {accumulate * len(graphs)} {unit}, of which {done} are done, "
            f"{advice}"
        )


def _graphs_in(root: SourceState) -> list[SourceState]:
    """Return the graph of each virtual rank of a process; without virtual ranks, its graph."""
    return [*root["sources"].values()] if node_of(root) == _VIRTUAL else [root]


def _below_collators(state: SourceState) -> SourceState:
    while node_of(state) == "GroupCollator":
        state = state["source"]
    return state
