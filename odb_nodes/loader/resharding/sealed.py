"""Read and write the sealed states of one node on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from odb_nodes.contract import NodeState, copy_state
from odb_nodes.contract.state import seal, unseal
from odb_nodes.errors import StateError

S = TypeVar("S", bound=NodeState)
T = TypeVar("T")

_OF_A_RANK = ("rank", "world_size")  # what a configuration has that differs between ranks


class Ranks(NamedTuple):
    """Numbers of ranks: of those that have saved, and of those that go on."""

    before: int
    after: int

    def split(self, total: int) -> list[int]:
        """Return parts of a number for the ranks that go on, which differ by 1 at most."""
        return [total // self.after + (rank < total % self.after) for rank in range(self.after)]

    def dealt(self, states: Sequence[T]) -> list[Sequence[T]]:
        """Return whose counts each of the ranks that go on takes over."""
        return [states[rank :: self.after] for rank in range(self.after)]


def node_of(state: Any) -> str:
    """Return the name of the node that has saved a state; "" where it is not sealed."""
    name = state.get("node") if isinstance(state, Mapping) else None
    return name if isinstance(name, str) else ""


def config_of(state: Any) -> Mapping[str, Any]:
    """Return the configuration of the node that has saved a state; none where it is damaged."""
    config = state.get("config") if isinstance(state, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def opened(states: Sequence[Any], declared: type[S]) -> list[S]:
    """Return what the states of a node on all ranks hold, which must be of the same graph."""
    node, first = node_of(states[0]), _common(states[0])
    found = []
    for rank, state in enumerate(states):
        if node_of(state) != node or _common(state) != first:
            raise StateError(
                f"the states of rank 0 and rank {rank} are of different graphs: `{node}` with "
                f"{first}, and `{node_of(state)}` with {_common(state)}. Reshard the states of "
                "one checkpoint."
            )
        found.append(unseal(state, node, declared, config_of(state)))
    return found


def _common(state: Any) -> dict[str, Any]:
    return {name: value for name, value in config_of(state).items() if name not in _OF_A_RANK}


def check_same(node: str, values: Sequence[NodeState], *fields: str) -> None:
    """Raise a `StateError` where a field is another one on another rank."""
    for name in fields:
        first = getattr(values[0], name)
        for rank, one in enumerate(values):
            if (found := getattr(one, name)) != first:
                raise StateError(
                    f"the states of {node} are of different places: `{name}` is {first!r:.80} on "
                    f"rank 0, but {found!r:.80} on rank {rank}. Reshard the states of one "
                    "checkpoint."
                )


def sealed_for_ranks(state: Mapping[str, Any], values: Sequence[NodeState]) -> list[dict[str, Any]]:
    """Return states of the ranks that go on, of the node and configuration of another state.

    The states of sources in `values` are not copied.
    """
    sealed = []
    for rank, one in enumerate(values):
        own = zip(_OF_A_RANK, (rank, len(values)), strict=True)
        config = dict(state["config"])
        config |= {name: value for name, value in own if name in config}
        sealed.append(seal(node_of(state), copy_state(config), vars(one)))
    return sealed


def deep_equal(one: Any, other: Any) -> bool:
    """Tell whether two values are equal; they may hold tensors, and NaN equals NaN."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(one, other) or (
            one.is_floating_point() and torch.allclose(one, other, 0, 0, equal_nan=True)
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(deep_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(deep_equal, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
