"""States between two epochs: each node begins the next one, whatever it reads, and on any rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from odb_nodes.contract import copy_state
from odb_nodes.loader.resharding.sealed import Ranks, node_of
from odb_nodes.nodes.sample_records import NO_RECORDS

_SHARE = {"done": 0, "start": 0, "extra": None}
_AT_THE_BEGINNING: Mapping[str, Mapping[str, Any]] = {
    "IterableSource": {"position": 0, "ended": False, "iterable": None, "items_digest": 0},
    "JsonlSource": {"position": 0, **_SHARE},
    "LengthObserver": {"position": 0},
    "ParallelProcessor": {"taken": 0, "position": 0, "taken_of": {}},
    "ShardedSampler": {"position": 0, **_SHARE},
    "SourceMixer": {
        "exhausted": [],
        "ended": False,
        "weights": {},
        "targets": {},
        "had": [],
    },
    "WindowBucketer": {
        "pulled": 0,
        "pulled_since_source": 0,
        "ended": False,
        "is_cut": False,
        "planned": None,
        "dearest_groups": 0,
        "caps": None,
    },
}
"""Node -> fields of its state where nothing of the epoch is read."""


def begun_anew(states: Sequence[Any], ranks: Ranks) -> list[Any]:
    """Return the states of a graph whose epoch has ended, or not begun, as those of other ranks.

    A node that this library does not know keeps the state of one of the ranks.

    Args:
        states: the state of the graph, or a part of it, on each rank.
        ranks: numbers of ranks.
    """
    return [_anew(states[rank % ranks.before], rank, ranks) for rank in range(ranks.after)]


def _anew(value: Any, rank: int, ranks: Ranks) -> Any:
    config: Any
    if not isinstance(value, Mapping):
        return copy_state(value)
    state = {key: _anew(one, rank, ranks) for key, one in value.items()}
    node = node_of(value)
    if node:
        state.pop("digest", None)  # of a node below one of torchdata: the loader's will cover it
    state |= _AT_THE_BEGINNING.get(node, {})
    if node == "WindowBucketer":
        is_replay = state["mode"] == "replay"
        state["pool"] = (None, NO_RECORDS, None) if is_replay else (None, None, [])
    if node == "SourceMixer":
        state |= {name: dict.fromkeys(state["sources"], 0) for name in ("samples", "tokens")}
    config = state.get("config")
    if node and config.get("world_size") == ranks.before:  # else its data are the rank's own
        config |= {"rank": rank, "world_size": ranks.after}
    return state
