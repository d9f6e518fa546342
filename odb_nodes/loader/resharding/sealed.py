"""Read and write the sealed states of one node on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from odb_nodes.contract import NodeState, copy_state
from odb_nodes.contract.state import seal, unseal
from odb_nodes.errors import StateError

S = TypeVar("S", bound=NodeState)

LATER = "Go on with as many ranks as before, and reshard a later checkpoint."
"""What to do where only some places of an epoch will not do."""

OF_A_RANK = ("rank", "world_size")
"""Fields of a fingerprint that are others on other ranks."""


class Ranks(NamedTuple):
    """Numbers of ranks: of those that have saved, and of those that go on."""

    before: int
    after: int

    def split(self, total: int) -> list[int]:
        """Return parts of a number for the ranks that go on, which differ by 1 at most."""
        return [total // self.after + (rank < total % self.after) for rank in range(self.after)]

    def summed(self, counts: Sequence[int]) -> list[int]:
        """Return counts of the ranks as those of the ranks that go on: each in one place."""
        return [sum(counts[rank :: self.after]) for rank in range(self.after)]

    def joined(self, lists: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Return lists of the ranks as those of the ranks that go on: each item in one place."""
        return [
            [item for one in lists[rank :: self.after] for item in one]
            for rank in range(self.after)
        ]


def node_of(state: Any) -> str:
    """Return the name of the node that has saved a state; "" where it is not sealed."""
    name = state.get("node") if isinstance(state, Mapping) else None
    return name if isinstance(name, str) else ""


def config_of(state: Any) -> Mapping[str, Any]:
    """Return the configuration of the node that has saved a state; none where it is damaged."""
    config = state.get("config") if isinstance(state, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def opened(states: Sequence[Any], declared: type[S]) -> list[S]:
    """Return what the states of a node on all ranks hold.

    Raises:
        StateError: one is damaged, or of another node or configuration than the first.
    """
    node, first = node_of(states[0]), states[0].get("config")
    found = []
    for rank, state in enumerate(states):
        config = state.get("config") if isinstance(state, Mapping) else None
        if node_of(state) != node or _common(config) != _common(first):
            raise StateError(
                f"the states of rank 0 and rank {rank} are of different graphs: `{node}` with "
                f"{_common(first)}, and `{node_of(state)}` with {_common(config)}. Reshard the "
                "states of one checkpoint."
            )
        found.append(unseal(state, node, declared, config or {}))
    return found


def _common(config: Any) -> Any:
    if not isinstance(config, Mapping):
        return config
    return {name: value for name, value in config.items() if name not in OF_A_RANK}


def check_alike(node: str, values: Sequence[NodeState], fields: Sequence[str]) -> None:
    """Check that the states of all ranks stand at the same place.

    Raises:
        StateError: they do not; names field and ranks.
    """
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
    """Return states like another one, of the ranks that go on.

    Args:
        state: whose node and configuration they have.
        values: what each of them holds; a source's state in it is not copied.
    """
    config, sealed = dict(state["config"]), []
    for rank, one in enumerate(values):
        own = zip(OF_A_RANK, (rank, len(values)), strict=True)
        config |= {name: value for name, value in own if name in config}
        sealed.append(seal(node_of(state), copy_state(config), vars(one)))
    return sealed
