"""States of virtual ranks, for another number of processes that host them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from odb_nodes.alignment.rank_aligner import AlignerState
from odb_nodes.alignment.virtual_ranks import VirtualState
from odb_nodes.contract import copy_state
from odb_nodes.contract.state import unseal
from odb_nodes.errors import StateError
from odb_nodes.loader.resharding.rounds import check_between_optimizer_steps
from odb_nodes.loader.resharding.sealed import (
    check_alike,
    config_of,
    node_of,
    opened,
    sealed_for_ranks,
)
from odb_nodes.nodes.group_collator import CollatorState

NODE = "VirtualRanks"


def rehost(states: Sequence[Any], world_size: int, *, left: bool) -> list[dict[str, Any]]:
    """Return the states of `VirtualRanks` as those of another number of processes.

    The states of the virtual ranks stay as they are.

    Args:
        states: its state in each process, in their order.
        world_size: number of processes from now on.
        left: the epoch was left, so that the next one follows.

    Raises:
        StateError: they are within an optimizer step, or `world_size` does not divide the number of
            virtual ranks.
    """
    found = opened(states, VirtualState)
    graphs = {name: one for state in found for name, one in state.sources.items()}
    if len(graphs) % world_size:
        raise StateError(
            f"the states are of {len(graphs)} virtual ranks, which {world_size} ranks cannot host "
            "alike: their number must divide it."
        )
    if not left:
        check_alike(NODE, found, ("turn",))
        _check_place([*graphs.values()], out=found[0].turn, hosted=len(found[0].sources))
    hosted = len(graphs) // world_size
    names = [*graphs]
    values = [
        replace(
            found[0],
            sources={name: copy_state(graphs[name]) for name in names[first : first + hosted]},
            **dict.fromkeys(("turn", "samples", "step_digest"), 0),
        )
        for first in range(0, len(names), hosted)
    ]
    return sealed_for_ranks(states[0], values)


def batches_per_step(state: Mapping[str, Any]) -> int:
    """Return how many batches of a step a process takes, by a state of an `ODBDataLoader`."""
    root = state["root"]
    return len(root["sources"]) if node_of(root) == NODE else 1


def process_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return which process has saved a state of `VirtualRanks`, and of how many."""
    found = unseal(state, NODE, VirtualState, config_of(state))
    if not found.sources or not all(name.isdecimal() for name in found.sources):
        raise StateError(f"`{NODE}.sources` must have the numbers of ranks, but is damaged.")
    first = min(map(int, found.sources))
    size = config_of(state).get("world_size")
    return {"rank": first // len(found.sources), "world_size": size}


def _check_place(graphs: Sequence[Any], *, out: int, hosted: int) -> None:
    """Check that all graphs stand at the same place, between two optimizer steps."""
    check_alike("GroupCollator", opened(graphs, CollatorState), ("step",))
    aligners = [graph["source"] for graph in graphs]
    if any(node_of(one) != "RankAligner" for one in aligners):
        raise StateError("the states of virtual ranks must hold those of a `RankAligner` each.")
    config = aligners[0]["config"]
    for at in opened(aligners, AlignerState):
        check_between_optimizer_steps(at, config, out=out, hosted=hosted)
