"""States of N ranks made into those of M ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from odb_nodes._core.checks import check_count, check_type
from odb_nodes.contract import copy_state
from odb_nodes.contract.state import (
    ENVELOPE,
    add_digest,
    bounded_depth,
    seal_whole,
    unseal_whole,
)
from odb_nodes.errors import StateError
from odb_nodes.loader.loader import LoaderState
from odb_nodes.loader.resharding.alike import alike
from odb_nodes.loader.resharding.rounds import reshard_aligner
from odb_nodes.loader.resharding.sealed import Ranks, check_alike, node_of, opened, sealed_for_ranks
from odb_nodes.loader.resharding.virtual import NODE as VIRTUAL
from odb_nodes.loader.resharding.virtual import process_of, rehost
from odb_nodes.nodes.group_collator import CollatorState

_DIGEST = "digest"

Rule = Callable[[Sequence[Any], int], list[Any]]

_rules: dict[str, Rule] = {}


def add_rule(holder: str, rule: Rule) -> None:
    """Let `reshard` follow a rule for states that are not a loader's.

    Args:
        holder: the name that they were sealed under, by `seal_whole`.
        rule: those of all ranks, and the number of ranks from now on -> the state of each of these.
    """
    _rules[holder] = rule


@bounded_depth("each rank")
def reshard(states: Sequence[Any], world_size: int) -> list[Any]:
    """Return the states of all ranks of a job that goes on with another number of ranks.

    The samples that no step has had are dealt to the ranks, by a rule that depends on the states
    alone: those that wait in pools and rounds by their tokens, those that nobody has read in turn.
    So each sample of the epoch comes once. The ranks begin a round at the same step; their next
    epochs are as in any run of as many ranks. States for as many ranks as before are only copied.

    Args:
        states: what `state_dict()` of a loader returned on each rank between the same two optimizer
            steps, in any order; alone or in a dict, beside data that are equal on all ranks.
        world_size: number of ranks from now on.

    Returns:
        The state of each rank, in their order. With another number of ranks, data beside a loader
        are the first rank's, and not copied.

    Raises:
        TypeError, ValueError: an argument is not valid.
        StateError: the state of a rank is missing or damaged; the states are of different places,
            or within an optimizer step; or a node cannot be resharded within an epoch, which is
            named: `IterableSource`, compressed files, data that each rank has for itself, pools of
            `state="payload"`, and nodes that this library does not know.
    """
    check_type("states", states, Sequence, "Give the states of all ranks.")
    world_size = check_count("world_size", world_size)
    if not states:
        raise ValueError("`states` must have the state of each rank, but is empty.")
    holders = _loaders_in(states[0], ())
    if not holders:
        raise StateError(
            "the states hold none of a loader: give what its `state_dict()` returned, alone or in "
            "a dict."
        )
    order = _order([_rank_of(_opened(_at(state, holders[0]))) for state in states])
    states = [states[index] for index in order]
    if len(states) == world_size:
        return [copy_state(state) for state in states]
    return reshard_parts(states, world_size)


def reshard_parts(states: Sequence[Any], world_size: int, place: str = "state") -> list[Any]:
    """Return states of loaders, in dicts or not, as those of other ranks.

    Args:
        states: of each rank, in their order.
        world_size: number of ranks from now on.
        place: the name that errors give the states.

    Raises:
        StateError: see `reshard`.
    """
    first = states[0]
    if _is_loader(first):
        return _reshard_loader(states, world_size)
    if all(map(_is_sealed_whole, states)):
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
        if not alike(first, one):
            raise StateError(
                f"`{place}` must be equal on all ranks to be that of another number of ranks, but "
                f"is {first!r:.80} on rank 0, and {one!r:.80} on rank {rank}. Reshard the states "
                "of the loader alone; what is sharded (FSDP) torch.distributed.checkpoint can load."
            )
    return [first] * world_size  # not copied: it may be a model


def _reshard_loader(states: Sequence[Any], world_size: int) -> list[dict[str, Any]]:
    found = [_opened(state) for state in states]
    order = _order([_rank_of(one) for one in found])
    for rank, place in enumerate(order):
        if rank != place:
            raise StateError(
                f"the state of rank {rank} of a loader is where that of rank {place} should be: "
                "files or parts of the checkpoint were mixed up. Use an earlier checkpoint."
            )
    name = node_of(states[0])
    check_alike(name, found, ("ended", "left", "next_epoch", "next_weights"))
    left = found[0].ended or found[0].left
    roots, between_epochs = _reshard_root([one.root for one in found], world_size, left=left)
    if not between_epochs:
        check_alike(name, found, ("num_yielded",))
    yielded = max(one.num_yielded for one in found)
    if node_of(found[0].root) == VIRTUAL:  # whose batches are those of several ranks
        yielded = yielded * len(states) // world_size
    return [seal_whole(name, replace(found[0], root=root, num_yielded=yielded)) for root in roots]


def _reshard_root(
    states: Sequence[Any], world_size: int, *, left: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Return the states of a graph, and whether they stand between two epochs."""
    node = node_of(states[0])
    if node == "RankAligner":
        return reshard_aligner(states, world_size, left=left)
    if node == VIRTUAL:
        return rehost(states, world_size, left=left), left
    found = opened(states, CollatorState)
    sources, between_epochs = _reshard_root([one.source for one in found], world_size, left=left)
    if not between_epochs:
        check_alike(node, found, ("step",))
    samples = Ranks(len(states), world_size).split(sum(one.samples for one in found))
    values = [
        replace(found[0], source=source, samples=own)
        for source, own in zip(sources, samples, strict=True)
    ]
    return sealed_for_ranks(states[0], values), between_epochs


def _is_sealed_whole(state: Any) -> bool:
    """Tell whether a state is one of `seal_whole`."""
    return bool(node_of(state)) and {*ENVELOPE, _DIGEST} <= state.keys()


def _without_digest(state: Any, place: str) -> dict[str, Any]:
    """Return a sealed state without its digest, which is that of what it holds.

    Raises:
        StateError: it is not.
    """
    bare = {key: one for key, one in state.items() if key != _DIGEST}
    if add_digest(bare)[_DIGEST] != state[_DIGEST]:
        raise StateError(
            f"`{place}` is damaged: its digest is not that of what was saved. Use an earlier "
            "checkpoint."
        )
    return bare


def _is_loader(state: Any) -> bool:
    """Tell whether a state is that of a `Loader`, by whatever name a subclass has."""
    return _is_sealed_whole(state) and LoaderState.__dataclass_fields__.keys() <= state.keys()


def _loaders_in(state: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the places of loaders in a state."""
    if _is_loader(state):
        return [path]
    inner = state.items() if isinstance(state, Mapping) else ()
    return [place for key, one in inner for place in _loaders_in(one, (*path, key))]


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state.get(key) if isinstance(state, Mapping) else None
    return state


def _opened(state: Any) -> LoaderState:
    """Return the state of a loader, once it is known to be whole."""
    return unseal_whole(state, node_of(state) or "Loader", LoaderState)


def _rank_of(state: LoaderState) -> Any:
    """Return the configuration that says which rank has saved the state of a loader."""
    node = "Loader"
    inner: Any = state.root
    while (name := node_of(inner)) == "GroupCollator":
        node, inner = name, inner.get("source")
    if name == VIRTUAL:
        return process_of(inner)
    if name != "RankAligner":
        raise StateError(
            f"the states cannot be resharded: below the `{node}` must be a `RankAligner`, or a "
            f"node over one that this library knows, but is {f'a `{name}`' if name else 'none'}. "
            "Use `ODBDataLoader`, or build the graph so."
        )
    return inner.get("config")


def _order(configs: Sequence[Any]) -> list[int]:
    """Return the indices of the states of all ranks, by rank.

    Raises:
        StateError: a rank is missing, or there are states of several jobs.
    """
    known = [one for one in configs if isinstance(one, Mapping) and "rank" in one]
    found: list[Any] = [one["rank"] for one in known]
    given: list[Any] = [one.get("world_size") for one in known]
    if any(type(one) is not int for one in found + given):
        raise StateError(
            f"the states must name their ranks, but are of ranks {found} of {given}: they are "
            "damaged. Use an earlier checkpoint."
        )
    sizes = sorted({*given})
    if len(known) != len(configs) or len(sizes) != 1:
        raise StateError(f"the states must be of one job, but are of jobs of {sizes} ranks.")
    if missing := [*islice((rank for rank in range(sizes[0]) if rank not in found), 9)]:
        raise StateError(
            f"the states must be those of all {sizes[0]} ranks, but those of ranks {missing} are "
            "missing. Use a checkpoint that all ranks have saved."
        )
    if len(found) != sizes[0]:
        raise StateError(
            f"the states must be one of each rank, but are of ranks {sorted(found)} of {sizes[0]}. "
            "Where several processes read the same data, reshard one state of each rank; a loader "
            "of one process alone cannot be resharded."
        )
    return sorted(range(len(configs)), key=lambda index: found[index])
