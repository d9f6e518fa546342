"""States of N ranks made into those of M ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from odb_nodes._core.checks import check_count, check_type
from odb_nodes._core.content import difference
from odb_nodes.alignment.rank_aligner import AlignerState
from odb_nodes.alignment.virtual_ranks import VirtualState
from odb_nodes.contract import copy_state
from odb_nodes.contract.state import (
    DIGEST,
    ENVELOPE,
    add_digest,
    bounded_depth,
    check_digest,
    seal_whole,
    unseal,
    unseal_whole,
)
from odb_nodes.errors import StateError
from odb_nodes.loader.loader import LoaderState
from odb_nodes.loader.reshard_nodes import (
    Ranks,
    check_between_optimizer_steps,
    check_same,
    config_of,
    node_of,
    opened,
    reshard_graph,
)
from odb_nodes.nodes.group_collator import CollatorState

Rule = Callable[[Sequence[Any], int], list[Any]]

_VIRTUAL = "VirtualRanks"
_SAVE_BETWEEN_STEPS = (
    "and their gradients would be lost. Save where `StepInfo.ends_optimizer_step` is True, after "
    "the optimizer step."
)


@bounded_depth("each rank")
def reshard(states: Sequence[Any], world_size: int) -> list[Any]:
    """Return the states with which a job resumes on another number of ranks.

    The remaining samples of the epoch are dealt to the new ranks: those that wait in pools and
    rounds by their tokens, unread ones in turn. So each sample of the epoch comes once. The result
    depends on the states alone. If the number of ranks stays the same, states are only copied.

    Args:
        states: `state_dict()` of the loader of each rank, saved between the same two optimizer
            steps, in any order; alone, or in dicts whose other values are equal on all ranks. Of
            ranks that read the same data, as in a `DeviceMesh`, one is enough.
        world_size: the new number of ranks.

    Returns:
        The state of each new rank, in order. For another number of ranks, values beside the loader
        are those of the first rank, not copied.

    Raises:
        TypeError, ValueError: an argument is not valid.
        StateError: the state of a rank is missing or damaged; the states are of different steps, or
            within an optimizer step; or a node cannot be resharded within an epoch, which is named:
            `IterableSource`, compressed files, data of a rank of its own, pools of
            `state="payload"`, and nodes that this library does not know.
    """
    check_type("states", states, Sequence, "Give the states of all ranks.")
    world_size = check_count("world_size", world_size)
    if not states:
        raise ValueError("`states` must have the state of each rank, but is empty.")
    if _first_loader(states[0]) is None:
        raise StateError(
            "the states hold none of a loader: give what its `state_dict()` returned, alone or in "
            "a dict."
        )
    order = _order([_opened(_first_loader(state)) for state in states])
    states = [states[index] for index in order]
    if len(states) == world_size:
        return [copy_state(state) for state in states]
    return reshard_parts(states, world_size)


def reshard_parts(states: Sequence[Any], world_size: int, place: str = "state") -> list[Any]:
    """Return states in their order, of loaders or what holds them, as those of other ranks."""
    first = states[0]
    if all(map(_is_whole, states)):
        holder = node_of(first)
        if holder in _rules and all(node_of(one) == holder for one in states):
            return _rules[holder](states, world_size)
        bare = [_without_digest(one, place) for one in states]
        return [add_digest(one) for one in reshard_parts(bare, world_size, place)]
    if isinstance(first, Mapping) and all(
        isinstance(one, Mapping) and one.keys() == first.keys() for one in states
    ):
        parts = {
            key: reshard_parts([one[key] for one in states], world_size, f"{place}[{key!r}]")
            for key in first
        }
        return [{key: of[rank] for key, of in parts.items()} for rank in range(world_size)]
    for rank, one in enumerate(states):
        if difference(first, one):
            raise StateError(
                f"`{place}` must be equal on all ranks to be that of another number of ranks, but "
                f"is {first!r:.80} on rank 0, and {one!r:.80} on rank {rank}. Reshard the states "
                "of the loader alone; what is sharded (FSDP) torch.distributed.checkpoint can load."
            )
    return [first] * world_size  # not copied: it may be a model


def add_rule(holder: str, rule: Rule) -> None:
    """Let `reshard` follow a rule for states that `seal_whole` has sealed under another name.

    It is given those of all ranks and the number of ranks from now on, and returns a state of each.
    """
    _rules[holder] = rule


def data_place(state: Any) -> tuple[int, int] | None:
    """Return which rank has saved the state of a loader, of how many with data of their own."""
    try:
        place = _place_of(_opened(state))
    except StateError:  # which loading it will raise
        return None
    return place.get("rank", 0), place.get("world_size", 1)


def batches_per_step(state: Mapping[str, Any]) -> int:
    """Return how many batches of a step a process takes, by a state of an `ODBDataLoader`."""
    root = state["root"]
    return len(root["sources"]) if node_of(root) == _VIRTUAL else 1


def check_saved_between_steps(state: Any) -> None:
    """Raise a `StateError` where a state, or a value of it, is of a loader within a step."""
    for one in (state, *state.values()) if isinstance(state, Mapping) else ():
        if node_of(one) != "Loader" or not _is_whole(one) or one["left"]:
            continue
        root = one["root"]
        is_virtual = node_of(root) == _VIRTUAL
        out, graphs = (root["turn"], [*root["sources"].values()]) if is_virtual else (0, [root])
        inner = graphs[0]
        while node_of(inner) == "GroupCollator":
            inner = inner["source"]
        config, hosted = config_of(inner), len(graphs)
        if node_of(inner) != "RankAligner" or config["accumulate"] * hosted == 1:
            continue
        (at,) = opened([inner], AlignerState)
        check_between_optimizer_steps(at, config, _SAVE_BETWEEN_STEPS, out=out, hosted=hosted)


def _is_whole(state: Any) -> bool:
    return bool(node_of(state)) and {*ENVELOPE, DIGEST} <= state.keys()


def _first_loader(state: Any) -> Any:
    """Return the first state of a loader that is or is in a state; `None` where there is none."""
    if node_of(state) == "Loader" and _is_whole(state):
        return state
    inner = state.values() if isinstance(state, Mapping) else ()
    return next(filter(None, map(_first_loader, inner)), None)


def _without_digest(state: Any, place: str) -> dict[str, Any]:
    check_digest(state, f"{node_of(state)} in `{place}`")
    return {key: one for key, one in state.items() if key != DIGEST}


# --- loaders --------------------------------------------------------------------------------------


def _reshard_loader(states: Sequence[Any], world_size: int) -> list[dict[str, Any]]:
    found = [*map(_opened, states)]
    order = _order(found)
    if len(order) < len(found):
        raise StateError(
            f"{len(found)} ranks have saved loaders of {len(order)} ranks with data of their own: "
            "give `Checkpoints` the `process_group` of the loaders, their `DeviceMesh`, and each "
            "loader as a part of its own."
        )
    for rank, place in enumerate(order):
        if rank != place:
            raise StateError(
                f"the state of rank {rank} of a loader is where that of rank {place} should be: "
                "files or parts of the checkpoint were mixed up. Use an earlier checkpoint."
            )
    check_same("Loader", found, "ended", "left", "next_epoch", "next_weights")
    roots, left = [one.root for one in found], found[0].ended or found[0].left
    yielded = max(one.num_yielded for one in found)
    if node_of(roots[0]) == _VIRTUAL:
        new, between_epochs = _rehost(roots, world_size, left=left), left
        yielded = yielded * len(states) // world_size  # batches, of all ranks that are hosted
    else:
        ranks = Ranks(len(states), world_size)
        new, between_epochs = reshard_graph(roots, ranks, left=left)
    if not between_epochs:
        check_same("Loader", found, "num_yielded")
    return [seal_whole("Loader", replace(found[0], root=one, num_yielded=yielded)) for one in new]


_rules: dict[str, Rule] = {"Loader": _reshard_loader}


def _opened(state: Any) -> LoaderState:
    return unseal_whole(state, "Loader", LoaderState)


def _order(loaders: Sequence[LoaderState]) -> list[int]:
    """Return the indices of the states of all ranks of a job, by rank."""
    configs = [*map(_place_of, loaders)]
    found: list[Any] = [one.get("rank") for one in configs]
    given: list[Any] = [one.get("world_size") for one in configs]
    if any(type(one) is not int for one in found + given):
        raise StateError(
            f"the states must name their ranks, but are of ranks {found} of {given}: they are "
            "damaged. Use an earlier checkpoint."
        )
    size = given[0]
    if {*given} != {size}:
        raise StateError(
            f"the states must be of one job, but are of jobs of {sorted({*given})} ranks."
        )
    if missing := [*islice((rank for rank in range(size) if rank not in found), 9)]:
        raise StateError(
            f"the states must be those of all {size} ranks, but those of ranks {missing} are "
            "missing. Use a checkpoint that all ranks have saved."
        )
    firsts = {rank: found.index(rank) for rank in found}
    for loader, rank in zip(loaders, found, strict=True):  # Several may read the same data.
        if not 0 <= rank < size or difference(vars(loader), vars(loaders[firsts[rank]])):
            raise StateError(
                f"the states must be one of each rank, but are of ranks {sorted(found)} of {size}, "
                f"and not all of rank {rank} are equal: ranks that read the same data must save at "
                "the same step, and a loader of one process alone cannot be resharded."
            )
    return [firsts[rank] for rank in range(size)]


def _place_of(loader: LoaderState) -> Mapping[str, Any]:
    """Return a mapping that names which rank has saved the state of a loader, and of how many."""
    node = "Loader"
    inner: Any = loader.root
    while (name := node_of(inner)) == "GroupCollator":
        node, inner = name, inner.get("source")
    if name == "RankAligner":
        return config_of(inner)
    if name != _VIRTUAL:
        raise StateError(
            f"the states cannot be resharded: below the `{node}` must be a `RankAligner`, or a "
            f"node over one that this library knows, but is {f'a `{name}`' if name else 'none'}. "
            "Use `ODBDataLoader`, or build the graph so."
        )
    hosted = unseal(inner, name, VirtualState, config_of(inner)).sources
    if not hosted or not all(one.isdecimal() for one in hosted):
        raise StateError(f"`{name}.sources` must have the numbers of ranks, but is damaged.")
    size = config_of(inner).get("world_size")
    return {"rank": min(map(int, hosted)) // len(hosted), "world_size": size}


# --- virtual ranks --------------------------------------------------------------------------------


def _rehost(states: Sequence[Any], world_size: int, *, left: bool) -> list[dict[str, Any]]:
    """Return states of `VirtualRanks` for another number of processes, which host the same ones."""
    found = opened(states, VirtualState)
    graphs = [(name, one) for state in found for name, one in state.sources.items()]
    if len(graphs) % world_size:
        raise StateError(
            f"the states are of {len(graphs)} virtual ranks, which {world_size} ranks cannot host "
            "alike: their number must divide it."
        )
    if not left:
        check_same(_VIRTUAL, found, "turn")
        _check_place([one for _, one in graphs], out=found[0].turn, hosted=len(found[0].sources))
    hosted = len(graphs) // world_size
    common = {
        **states[0],
        "config": states[0]["config"] | {"world_size": world_size},
        "turn": 0,
        "samples": 0,
        "step_digest": 0,
    }
    return [
        {**common, "sources": dict(graphs[first : first + hosted])}
        for first in range(0, len(graphs), hosted)
    ]


def _check_place(graphs: Sequence[Any], *, out: int, hosted: int) -> None:
    """Check that virtual ranks stand at the same place, between two optimizer steps."""
    check_same("GroupCollator", opened(graphs, CollatorState), "step")
    aligners = [graph["source"] for graph in graphs]
    if any(node_of(one) != "RankAligner" for one in aligners):
        raise StateError("the states of virtual ranks must hold those of a `RankAligner` each.")
    for at in opened(aligners, AlignerState):
        check_between_optimizer_steps(at, config_of(aligners[0]), out=out, hosted=hosted)
