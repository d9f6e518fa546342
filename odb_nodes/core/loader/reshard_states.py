"""The states of a node on N ranks, and on M ranks at the beginning of an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from odb_nodes.core.contract import NodeState
from odb_nodes.core.contract.state import DIGEST, SourceState, unseal
from odb_nodes.core.nodes.sample_records import NO_RECORDS
from odb_nodes.errors import StateError

S = TypeVar("S", bound=NodeState)
T = TypeVar("T")
States = Sequence[SourceState]  # the states of one node, by rank


class Ranks(NamedTuple):
    """The number of ranks that have saved states (old), and that load states (new)."""

    before: int
    after: int

    def split(self, total: int) -> list[int]:
        """Divide a number among the new ranks; the parts differ by at most 1."""
        return [total // self.after + (rank < total % self.after) for rank in range(self.after)]

    def split_each(self, totals: Mapping[str, int]) -> list[dict[str, int]]:
        """Divide several numbers among the new ranks, by name."""
        return self.per_rank({name: self.split(total) for name, total in totals.items()})

    def per_rank(self, by_name: Mapping[str, Sequence[T]]) -> list[dict[str, T]]:
        """Return a dict for each new rank, from name -> the value on each new rank."""
        return [
            {name: values[rank] for name, values in by_name.items()} for rank in range(self.after)
        ]

    def redistribute(self, states: Sequence[T]) -> list[Sequence[T]]:
        """Return for each new rank the old states whose counts it takes over."""
        return [states[rank :: self.after] for rank in range(self.after)]


def node_of(state: object) -> str:
    """Return the name of the node that saved a state; "" if the state is not sealed."""
    name = state.get("node") if isinstance(state, Mapping) else None
    return name if isinstance(name, str) else ""


def config_of(state: object) -> Mapping[str, Any]:
    """Return the configuration of the node that saved a state; empty if it is damaged."""
    config = state.get("config") if isinstance(state, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def check_same(node: str, values: Sequence[NodeState], *fields: str) -> None:
    """Raise a `StateError` if a field differs between ranks."""
    for name in fields:
        first = getattr(values[0], name)
        for rank, state in enumerate(values):
            if (value := getattr(state, name)) != first:
                raise StateError(
                    f"the states of {node} were saved at different steps: `{name}` is "
                    f"{first!r:.80} on rank 0, but {value!r:.80} on rank {rank}. Reshard the "
                    "states of one checkpoint."
                )


@dataclass(frozen=True)
class NodeStates(Generic[S]):
    """The states of a node on all old ranks, and the numbers of ranks."""

    name: str
    config: Mapping[str, Any]  # of rank 0, including `rank`
    sealed: States
    states: Sequence[S]  # the opened states
    ranks: Ranks

    @classmethod
    def opened(cls, sealed: States, declared: type[S], ranks: Ranks) -> NodeStates[S]:
        """Open the states of a node; raise a `StateError` if they are of different graphs."""
        name, first = node_of(sealed[0]), _common(sealed[0])
        states = []
        for rank, state in enumerate(sealed):
            if node_of(state) != name or _common(state) != first:
                raise StateError(
                    f"the states of rank 0 and rank {rank} are of different graphs: `{name}` with "
                    f"{first}, and `{node_of(state)}` with {_common(state)}. Reshard the states of "
                    "one checkpoint."
                )
            states.append(unseal(state, name, declared, config_of(state)))
        return cls(name, config_of(sealed[0]), sealed, states, ranks)

    @property
    def sources(self) -> list[SourceState]:
        """The states of the source."""
        return [state["source"] for state in self.sealed]

    def on_new_ranks(
        self, by_rank: Mapping[str, Sequence[Any]], alike: Mapping[str, Any] | None = None
    ) -> list[SourceState]:
        """Return states of the new ranks: at the beginning of an epoch, except for these fields.

        by_rank: field -> its value on each new rank; alike: field -> its value on all new ranks.
        """
        states = at_epoch_start(self.sealed, self.ranks)
        fields_of_ranks = self.ranks.per_rank(by_rank)
        return [
            {**state, **(alike or {}), **fields}
            for state, fields in zip(states, fields_of_ranks, strict=True)
        ]

    def counted(self, **zeros: Any) -> dict[str, list[Any]]:
        """Return the sums that each new rank takes over, by field; `zeros`: field -> empty sum."""
        old_ranks = self.ranks.redistribute(self.states)
        return {
            field: [sum((getattr(state, field) for state in states), zero) for states in old_ranks]
            for field, zero in zeros.items()
        }

    def check_same(self, *fields: str) -> None:
        """Raise a `StateError` if a field differs between ranks."""
        check_same(self.name, self.states, *fields)


def _common(state: object) -> dict[str, Any]:
    differing = ("rank", "world_size")
    return {name: value for name, value in config_of(state).items() if name not in differing}


# --- at the beginning of an epoch -----------------------------------------------------------------

_SHARE = {"position": 0, "done": 0, "start": 0, "extra": None}
EPOCH_START: Mapping[str, Mapping[str, Any]] = {
    "IterableSource": {"position": 0, "ended": False, "iterable": None, "items_digest": 0},
    "JsonlSource": _SHARE,
    "LengthObserver": {"position": 0},
    "ParallelProcessor": {"taken": 0, "position": 0, "taken_of": {}},
    "PlannedGroups": {
        "taken": 0,
        "is_at_end": False,
        "is_alone": False,
        "rows": None,
        "earlier": [],
        "later": None,
        "seen": 0,
        "moved": 0,
    },
    "RankAligner": {
        "totals": None,
        "groups": ([], None),
        "filler": None,
        "filler_of_another": None,
        "emitted": 0,
        "given": None,
        "given_ended": False,
    },
    "ShardedSampler": _SHARE,
    "SourceMixer": {"exhausted": [], "ended": False, "weights": {}, "targets": {}, "had": []},
    "WindowBucketer": {
        "pulled": 0,
        "pulled_since_source": 0,
        "ended": False,
        "is_cut": False,
        "largest_groups": 0,
        "caps": None,
    },
}
"""Node -> fields of its state at the beginning of an epoch."""


def at_epoch_start(sealed: States, ranks: Ranks) -> list[SourceState]:
    """Return states of the new ranks with all nodes of this library at the beginning of an epoch.

    The new states may share parts with the old states.
    """
    return [_begun(sealed[rank % ranks.before], rank, ranks) for rank in range(ranks.after)]


def _begun(state: Any, rank: int, ranks: Ranks) -> Any:
    if not isinstance(state, Mapping):
        return state
    new = {key: _begun(value, rank, ranks) for key, value in state.items()}
    if not (name := node_of(state)):
        return new
    new.pop(DIGEST, None)  # A node below a torchdata node has one: the loader's digest covers it.
    new |= EPOCH_START.get(name, {})
    if name == "WindowBucketer":
        is_replay = new["mode"] == "replay"
        new["held"] = (0, None, None, *((NO_RECORDS, None) if is_replay else (None, [])))
    if name == "SourceMixer":
        new |= {field: dict.fromkeys(new["sources"], 0) for field in ("samples", "tokens")}
    if new["config"].get("world_size") == ranks.before:  # The ranks share the data of this node.
        new["config"] |= {"rank": rank, "world_size": ranks.after}
    return new


def started(state: Any) -> Any:
    """Return a state from which all nodes begin the next epoch.

    A source whose state is from before its first item would otherwise begin the same epoch.
    """
    if not isinstance(state, Mapping):
        return state
    new = {key: started(value) for key, value in state.items()}
    return {**new, "started": True} if node_of(state) and "started" in state else new
