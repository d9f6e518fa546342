"""Divides the data that no rank has read among M ranks, source by source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

from odb_nodes.core.contract import EpochState, NodeState
from odb_nodes.core.contract.state import SourceState
from odb_nodes.core.loader.reshard_states import NodeStates, Ranks, States, config_of, node_of
from odb_nodes.core.nodes.length_observer import ObserverState
from odb_nodes.core.processing.parallel_processor import ProcessorState
from odb_nodes.core.sources.sharded_sampler import SamplerState, Share, divide_unread
from odb_nodes.core.sources.source_mixer import MixerState
from odb_nodes.errors import StateError

N = TypeVar("N", int, float)

_KEEP_RANKS = "Keep the number of ranks up to the end of the epoch"
AFTER_THE_LAST = f"{_KEEP_RANKS}: a state that is saved after its last step can be resharded."
_LATER = "Keep the number of ranks, and reshard a later checkpoint."


class ItemsRead(NamedTuple):
    """The items that a rank has read of a source after the source's state."""

    items: int
    by_source: Mapping[str, tuple[int, int]] = {}  # in a mixture; see `ProcessorState`


@dataclass(frozen=True)
class Reading:
    """How far the old ranks have read a source, and how the new ranks count what was read."""

    since_states: Sequence[ItemsRead]  # by old rank
    done: Sequence[int]  # samples of the epoch that each new rank counts as read


def reshard_source(states: States, ranks: Ranks, reading: Reading) -> list[SourceState]:
    """Return the states of a source on the new ranks, which read the unread items."""
    declared, rule = _rule_of(states[0])
    sizes = [config_of(state).get("world_size") for state in states]
    if "world_size" in config_of(states[0]) and {*sizes} != {ranks.before}:
        raise StateError(
            f"`{node_of(states[0])}` cannot be resharded within an epoch: each rank has different "
            f"data, which no other rank can read. {_KEEP_RANKS}."
        )
    return rule(NodeStates.opened(states, declared, ranks), reading)


def _rule_of(state: object) -> tuple[type[NodeState], Rule]:
    """Return state class and rule of a node; raise a `StateError` if it has no rule."""
    if (rule := _RULES.get(name := node_of(state))) is not None:
        return rule
    raise StateError(
        f"{f'`{name}`' if name else 'a node without a sealed state'} cannot be resharded within "
        "an epoch: its state does not name the unread items by numbers that all ranks share. Do "
        f"its work in `process_fn`, which can be resharded. {AFTER_THE_LAST}"
    )


def check_has_rules(state: SourceState) -> None:
    """Raise a `StateError` if a node, or a node below it, has no rule."""
    _rule_of(state)
    for source in [state["source"]] if "source" in state else state.get("sources", {}).values():
        check_has_rules(source)


def _reshard_observer(node: NodeStates[ObserverState], reading: Reading) -> list[SourceState]:
    sources = reshard_source(node.sources, node.ranks, reading)
    return node.on_new_ranks({"source": sources, "position": reading.done})


def _reshard_processor(node: NodeStates[ProcessorState], reading: Reading) -> list[SourceState]:
    started = _has_started(node, "epoch")
    since_states = [
        ItemsRead(state.taken + since.items, state.taken_of)
        for state, since in zip(node.states, reading.since_states, strict=True)
    ]
    sources = reshard_source(node.sources, node.ranks, Reading(since_states, reading.done))
    return node.on_new_ranks({"source": sources, "position": reading.done}, {"started": started})


def _reshard_sampler(node: NodeStates[SamplerState], reading: Reading) -> list[SourceState]:
    has_items = any(since.items for since in reading.since_states)
    started = _has_started(node, "epoch", "start") or has_items
    unread = [
        Share(rank, node.ranks.before, state).after(state.position + since.items)
        for rank, (state, since) in enumerate(zip(node.states, reading.since_states, strict=True))
    ]
    shares = divide_unread(unread, node.ranks.after, node.config["size"])
    extra = [share.extra for share in shares]
    return node.on_new_ranks(
        {"position": reading.done, "done": reading.done, "extra": extra},
        {"started": started, "start": shares[0].start},
    )


def _has_started(node: NodeStates[Any], *alike: str) -> bool:
    """Check that all ranks are in the same pass over a source; return whether a rank has begun."""
    states: Sequence[EpochState] = node.states
    cycles = [state.cycle for state in states]
    if (most := max(cycles)) > min(cycles):
        raise StateError(
            f"`{node.name}` has begun again on rank {cycles.index(most)}, which is exhausted "
            f'(`stop` is "cycle"), but not yet on rank {cycles.index(min(cycles))}. {_LATER}'
        )
    node.check_same(*alike)
    return any(state.started for state in states)


def _reshard_mixer(node: NodeStates[MixerState], reading: Reading) -> list[SourceState]:
    ranks, config = node.ranks, node.config
    since_states, states = [], []
    for rank, (state, since) in enumerate(zip(node.states, reading.since_states, strict=True)):
        by_source = _read_by_source(rank, state, since)
        samples_of_rank = {name: n + by_source[name].items for name, n in state.samples.items()}
        since_states.append(by_source)
        states.append(replace(state, samples=samples_of_rank))
    samples = _totals([state.samples for state in states])
    tokens = _totals([state.tokens for state in states])
    targets = _totals([state.targets for state in states])
    sources = {}
    for name, done in _done_by_source(samples, reading.done).items():
        below = Reading([by_source[name] for by_source in since_states], done)
        try:
            sources[name] = reshard_source([state.sources[name] for state in states], ranks, below)
        except StateError as error:
            raise StateError(f"source {name!r}: {error}") from error
    is_over = any if config["stop"] == "first_exhausted" else all
    farthest_back = min(states, key=lambda state: sum(getattr(state, config["by"]).values()))
    alike = {
        "exhausted": [
            name for name in states[0].exhausted if all(name in state.exhausted for state in states)
        ],
        "had": [
            name for name in sources if samples[name] or any(name in state.had for state in states)
        ],
        "ended": is_over(state.ended for state in states),
        "weights": farthest_back.weights,
        "targets": {name: target / ranks.after for name, target in targets.items()},
    }
    by_rank: dict[str, list[Any]] = {
        "sources": ranks.per_rank(sources),
        "samples": ranks.split_each(samples),
        "tokens": ranks.split_each(tokens),
    }
    return node.on_new_ranks(by_rank, alike)


def _totals(counts: Sequence[Mapping[str, N]]) -> dict[str, N]:
    """Return the sum over ranks of the counts of each source."""
    return {name: sum(by_source[name] for by_source in counts) for name in counts[0]}


def _read_by_source(rank: int, state: MixerState, since: ItemsRead) -> dict[str, ItemsRead]:
    """Return the items that a rank has read of each source after the state of a mixture."""
    by_source = dict.fromkeys(state.sources, ItemsRead(0))
    for key, (items, cycle) in since.by_source.items():
        name = max((name for name in state.sources if f"{key}/".startswith(f"{name}/")), key=len)
        if state.sources[name].get("cycle", cycle) != cycle:
            raise StateError(
                f"source {name!r} has just begun again on rank {rank}, and the saved state is from "
                f"before. {_LATER}"
            )
        inner = {key[len(name) + 1 :]: (items, cycle)} if key != name else {}
        before = by_source[name]
        by_source[name] = ItemsRead(before.items + items, {**before.by_source, **inner})
    attributed = sum(read.items for read in by_source.values())
    if attributed != since.items:
        raise StateError(
            f"the state of `SourceMixer` on rank {rank} is {since.items} samples behind the "
            f"position that it was saved at, and names the source of only {attributed}. {_LATER}"
        )
    return by_source


def _done_by_source(totals: Mapping[str, int], done: Sequence[int]) -> dict[str, list[int]]:
    """Return the samples of each source that each new rank counts as read.

    The sources, laid end to end, cover the same line as the ranks: a rank counts the parts of the
    sources that lie beside the rank.
    """
    largest = max(totals, key=lambda name: totals[name])
    skipped = sum(done) - sum(totals.values())  # samples that a mixture does not count
    counts = {**totals, largest: totals[largest] + skipped}
    places = [*pairwise([0, *accumulate(done)])]
    bounds = pairwise([0, *accumulate(counts.values())])
    return {
        name: [max(0, min(stop, last) - max(start, first)) for start, stop in places]
        for name, (first, last) in zip(counts, bounds, strict=True)
    }


Rule = Callable[[NodeStates[Any], Reading], list[SourceState]]
_RULES: Mapping[str, tuple[type[NodeState], Rule]] = {
    "JsonlSource": (SamplerState, _reshard_sampler),
    "LengthObserver": (ObserverState, _reshard_observer),
    "ParallelProcessor": (ProcessorState, _reshard_processor),
    "ShardedSampler": (SamplerState, _reshard_sampler),
    "SourceMixer": (MixerState, _reshard_mixer),
}
"""Source -> its state class, and the function that reshards its states within an epoch."""
