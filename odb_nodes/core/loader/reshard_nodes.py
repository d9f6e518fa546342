"""Turns the states of a graph on N ranks into states on M ranks.

All nodes are set to the beginning of an epoch. Between two epochs nothing else changes. Within an
epoch, the planned round is dissolved: the waiting samples, in pools and in planned groups, are
dealt to the pools of the new ranks, and each source gets the items that no rank has read. If the
epoch is planned from known lengths, the new ranks get the progress of each old rank, and plan the
remaining samples of all of them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.alignment.aligned_round import ordinals_of
from odb_nodes.core.alignment.rank_aligner import AlignerState
from odb_nodes.core.contract import EpochState, NodeState
from odb_nodes.core.contract.state import DIGEST, SourceState, unseal
from odb_nodes.core.nodes.exclusions import ExcludedKeys
from odb_nodes.core.nodes.group_collator import CollatorState
from odb_nodes.core.nodes.length_observer import ObserverState
from odb_nodes.core.nodes.planned_groups import PlannedState
from odb_nodes.core.nodes.sample_records import NO_RECORDS, among, from_records, to_records
from odb_nodes.core.nodes.sample_store import from_bits, to_bits
from odb_nodes.core.nodes.window_bucketer import BucketerState
from odb_nodes.core.planning.budget import Limits
from odb_nodes.core.planning.group_planner import RoundSettings
from odb_nodes.core.planning.later_samples import LaterSamples
from odb_nodes.core.planning.resumed_plan import EarlierRanks, RankProgress
from odb_nodes.core.processing.parallel_processor import ProcessorState
from odb_nodes.core.sample_block import ITEM, TOKENS, SampleBlock
from odb_nodes.core.sources.sharded_sampler import SamplerState, Share, divide_unread
from odb_nodes.core.sources.source_mixer import MixerState
from odb_nodes.errors import StateError

S = TypeVar("S", bound=NodeState)
T = TypeVar("T")
N = TypeVar("N", int, float)
States = Sequence[SourceState]  # the states of one node, by rank

_UP_TO_THE_END = "Keep the number of ranks up to the end of the epoch"
_AFTER_THE_LAST = f"{_UP_TO_THE_END}: a state that is saved after its last step can be resharded."
_LATER = "Keep the number of ranks, and reshard a later checkpoint."


class Ranks(NamedTuple):
    """The number of old ranks, which have saved states, and of new ranks."""

    before: int
    after: int

    def split(self, total: int) -> list[int]:
        """Return a part of a number for each new rank; parts differ by at most 1."""
        return [total // self.after + (rank < total % self.after) for rank in range(self.after)]

    def split_each(self, totals: Mapping[str, int]) -> list[dict[str, int]]:
        """Return parts of several numbers for each new rank, by name."""
        return self.of_each({name: self.split(total) for name, total in totals.items()})

    def of_each(self, by_name: Mapping[str, Sequence[T]]) -> list[dict[str, T]]:
        """Return for each new rank its value by each name."""
        return [
            {name: values[rank] for name, values in by_name.items()} for rank in range(self.after)
        ]

    def redistribute(self, states: Sequence[T]) -> list[Sequence[T]]:
        """Return for each new rank the old states whose counts it takes over."""
        return [states[rank :: self.after] for rank in range(self.after)]


# --- the states of a node on all ranks ------------------------------------------------------------


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
class Node(Generic[S]):
    """The states of a node on all old ranks, and the numbers of ranks."""

    name: str
    config: Mapping[str, Any]  # of rank 0, including `rank`
    sealed: States
    states: Sequence[S]  # the opened states
    ranks: Ranks

    @classmethod
    def opened(cls, sealed: States, declared: type[S], ranks: Ranks) -> Node[S]:
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

        Args:
            by_rank: field -> its value on each new rank.
            alike: field -> its value on all new ranks.
        """
        states = _at_epoch_start(self.sealed, self.ranks)
        fields_of_ranks = self.ranks.of_each(by_rank)
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
    of_rank = ("rank", "world_size")
    return {name: value for name, value in config_of(state).items() if name not in of_rank}


# --- at the beginning of an epoch -----------------------------------------------------------------

_SHARE = {"position": 0, "done": 0, "start": 0, "extra": None}
_EPOCH_START: Mapping[str, Mapping[str, Any]] = {
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


def _at_epoch_start(sealed: States, ranks: Ranks) -> list[SourceState]:
    """Return states of the new ranks with all known nodes at the beginning of an epoch.

    They may share parts with the old states.
    """
    return [_begun(sealed[rank % ranks.before], rank, ranks) for rank in range(ranks.after)]


def _begun(state: Any, rank: int, ranks: Ranks) -> Any:
    if not isinstance(state, Mapping):
        return state
    new = {key: _begun(value, rank, ranks) for key, value in state.items()}
    if not (name := node_of(state)):
        return new
    new.pop(DIGEST, None)  # of a node below a torchdata node: the loader's digest covers it
    new |= _EPOCH_START.get(name, {})
    if name == "WindowBucketer":
        is_replay = new["mode"] == "replay"
        new["held"] = (0, None, None, *((NO_RECORDS, None) if is_replay else (None, [])))
    if name == "SourceMixer":
        new |= {field: dict.fromkeys(new["sources"], 0) for field in ("samples", "tokens")}
    if new["config"].get("world_size") == ranks.before:  # otherwise each rank has different data
        new["config"] |= {"rank": rank, "world_size": ranks.after}
    return new


def _started(state: Any) -> Any:
    """Make all nodes begin the next epoch.

    The state of a source may be from before its first item, when its epoch has not begun.
    """
    if not isinstance(state, Mapping):
        return state
    new = {key: _started(value) for key, value in state.items()}
    return {**new, "started": True} if node_of(state) and "started" in state else new


# --- from the last node to the pool ---------------------------------------------------------------


def reshard_graph(graphs: States, ranks: Ranks, *, is_over: bool) -> list[SourceState]:
    """Return the states of a graph on the new ranks.

    `is_over`: the epoch has ended or was left, so that the next one follows.
    """
    if node_of(graphs[0]) == "RankAligner":
        return _reshard_aligner(Node.opened(graphs, AlignerState, ranks), is_over)
    node = Node.opened(graphs, CollatorState, ranks)
    sources = reshard_graph(node.sources, ranks, is_over=is_over)
    if not is_over:
        node.check_same("step")
    samples = ranks.split(sum(state.samples for state in node.states))
    return node.on_new_ranks({"source": sources, "samples": samples})


def _reshard_aligner(node: Node[AlignerState], is_over: bool) -> list[SourceState]:
    """Return states of the aligner without a round."""
    states, ranks = node.states, node.ranks
    node.check_same("epoch", "cycle")
    is_over = is_over or all(state.is_at_end for state in states)
    requests = [state.requested_max_tokens for state in states if state.requested_max_tokens]
    alike: dict[str, Any] = {
        "started": any(state.started for state in states),
        "requested_max_tokens": min(requests, default=0),
        "last": is_over,
    }
    if not is_over and any(state.step or state.round or state.groups[0] for state in states):
        sources = _reshard_pool(node)
        settings = RoundSettings(*states[0].settings)
        is_last = settings.is_last and ranks.after > 1
        alike["settings"] = settings._replace(caps=(), is_last=is_last).to_state()
    elif (declared := _OF_GROUPS.get(node_of(node.sources[0]))) is not None:
        pools = Node.opened(node.sources, declared, ranks)
        sources = pools.on_new_ranks(_left_out(pools))
    else:
        sources = _at_epoch_start(node.sources, ranks)
    if is_over and alike["started"]:
        sources = [*map(_started, sources)]
    by_rank = {"source": sources, **node.counted(left_out=[], unemitted_samples=0)}
    return node.on_new_ranks(by_rank, alike)


_OF_GROUPS: Mapping[str, type[Any]] = {
    "PlannedGroups": PlannedState,
    "WindowBucketer": BucketerState,
}
"""Nodes that may be directly below a `RankAligner` to reshard within an epoch."""


def _left_out(pools: Node[Any]) -> dict[str, list[Any]]:
    """Return the left-out samples that each new rank counts, by field."""
    old_pools = pools.ranks.redistribute(pools.states)
    skipped = [[Counter(pool.skipped_samples) for pool in old] for old in old_pools]
    keys = reduce(or_, (ExcludedKeys.from_state(pool.excluded) for pool in pools.states))
    return {
        "excluded": [keys.to_state()] * pools.ranks.after,
        "skipped_samples": [dict(sum(reasons, Counter())) for reasons in skipped],
        **pools.counted(excluded_samples=0, dropped_samples=0, oversize_samples=0, left_out=[]),
    }


def _reshard_pool(aligner: Node[AlignerState]) -> list[SourceState]:
    """Deal all samples that were read, but are in no step, to the pools of the new ranks."""
    ranks = aligner.ranks
    aligner.check_same("step", "emitted", "round", "settings")
    if aligner.config["uneven"] == "stop" and any(state.last for state in aligner.states):
        raise StateError(
            'the last round of an epoch with `uneven="stop"` has begun, which leaves out samples '
            "that some ranks still have: keep the number of ranks up to the end of the epoch."
        )
    if (name := node_of(aligner.sources[0])) == "PlannedGroups":
        return _reshard_planned(aligner)
    if name != "WindowBucketer":
        raise StateError(
            "states can be resharded within an epoch where a `WindowBucketer` or `PlannedGroups` "
            "is right below the `RankAligner`, but there is "
            f"{f'a `{name}`' if name else 'another node'}, which may hold samples. Reshard a state "
            "that was saved after the last step of an epoch."
        )
    pools = Node.opened(aligner.sources, BucketerState, ranks)
    pools.check_same("mode", "excluded")
    waiting = among(_waiting(aligner.states, pools.states), ranks.after)
    owners = dealt_by_tokens(waiting.tokens, ranks.after)
    records = [waiting.take(np.flatnonzero(owners == rank)) for rank in range(ranks.after)]
    left_out = [
        pool.excluded_samples + pool.dropped_samples + sum(pool.skipped_samples.values())
        for pool in pools.states
    ]
    pulled = sum(pool.pulled for pool in pools.states)
    emitted = ranks.split(pulled - len(waiting) - sum(left_out))
    counted = [*map(sum, ranks.redistribute(left_out))]
    done = [*map(sum, zip(emitted, counted, map(len, records), strict=True))]
    since_states = [ItemsRead(pool.pulled_since_source) for pool in pools.states]
    sources = _reshard_source(pools.sources, ranks, Reading(since_states, done))
    aligner.check_same("totals_digest")  # last: other errors say what differs
    limits = reduce(Limits.tightened, (Limits(*pool.limits) for pool in pools.states))
    if agreed := RoundSettings(*aligner.states[0].settings).max_tokens:
        limits = limits._replace(tokens=min(agreed, limits.tokens))
    pooled = []
    for samples, stop in zip(records, done, strict=True):
        ordinals = np.arange(stop - len(samples), stop)
        pooled.append((*to_bits(ordinals, ordinals), to_records(samples), None))
    alike = {
        "limits": (*limits,),
        "has_own_limits": agreed > 0 or any(pool.has_own_limits for pool in pools.states),
        "largest_groups": max(pool.largest_groups for pool in pools.states),
        "window": pools.states[0].window,
    }
    by_rank: dict[str, list[Any]] = {
        "source": sources,
        "pulled": done,
        "held": pooled,
        **_left_out(pools),
    }
    return pools.on_new_ranks(by_rank, alike)


def _reshard_planned(aligner: Node[AlignerState]) -> list[SourceState]:
    """Make the new ranks plan the remaining samples of all old ranks together.

    These include the groups that wait in the aligner. Samples put off to the end of the epoch are
    dealt out.
    """
    planned = Node.opened(aligner.sources, PlannedState, aligner.ranks)
    planned.check_same("epoch", "cycle", "limits", "excluded", "earlier")
    waiting = [np.empty((2, 0), np.int64)]
    for state in aligner.states:
        if state.given is not None:
            *_, records, _ = state.given
            stored, _ = from_bits(state.given)
            waits = np.isin(stored, np.concatenate([*ordinals_of(state.groups), stored[:0]]))
            waiting.append(from_records(records).facts[[ITEM, TOKENS]][:, waits])
    above = np.concatenate(waiting, axis=1).astype("<i8").tobytes() or None
    ranks = [RankProgress(state.is_alone, state.rows, state.taken) for state in planned.states]
    first = planned.states[0]
    earlier = EarlierRanks(ranks, Limits(*first.limits), above)
    alike = {
        "started": any(state.started for state in planned.states),
        "earlier": [*first.earlier, earlier.to_state()],
    }
    try:
        later = LaterSamples.of_states(*(state.later for state in planned.states))
    except ValueError as error:
        raise StateError(
            f"the state of {planned.name} is damaged: {error} Use an earlier checkpoint."
        ) from error
    owners = dealt_by_tokens(later.tokens, aligner.ranks.after)
    by_rank: dict[str, list[Any]] = {
        "later": [later.part(owners == rank).to_state() for rank in range(aligner.ranks.after)],
        **planned.counted(seen=0, moved=0),
        **_left_out(planned),
    }
    aligner.check_same("totals_digest")  # last: other errors say what differs
    return planned.on_new_ranks(by_rank, alike)


def _waiting(aligners: Sequence[AlignerState], pools: Sequence[BucketerState]) -> SampleBlock:
    """Return the records of all samples that were read, but are in no step: the oldest first."""
    parts, ages = [], []
    for aligner, pool in zip(aligners, pools, strict=True):
        *_, records_state, payload = pool.held
        records = from_records(records_state, is_numbered=pool.numbered)
        if payload is not None or (pool.numbered and len(records)):
            if pool.mode == "replay":
                _check_has_rules(pool.source)
            raise StateError(
                "the states cannot be resharded within an epoch: the source cannot read samples by "
                'keys that all ranks share, or the pool is saved with `state="payload"`, so no '
                f"other rank can make the samples that wait. {_AFTER_THE_LAST}"
            )
        stored, pooled = from_bits(pool.held)
        waits = np.isin(stored, np.concatenate([pooled, *ordinals_of(aligner.groups)]))  # no filler
        parts.append(records.take(np.flatnonzero(waits)))
        ages.append(pool.pulled - stored[waits])
    return SampleBlock.joined(parts).take(np.argsort(-np.concatenate(ages), kind="stable"))


def dealt_by_tokens(tokens: IntArray, world_size: int) -> IntArray:
    """Return the rank of each sample, (n,): equal numbers of samples, and about equal tokens.

    In order of length, the longest first, they go to ranks 0, 1, 2, 2, 1, 0, 0, ...
    """
    turn, place = np.divmod(np.arange(len(tokens)), world_size)
    to_and_fro = np.where(turn % 2, world_size - 1 - place, place)
    owners = np.empty(len(tokens), np.int64)
    owners[np.argsort(-tokens, kind="stable")] = to_and_fro
    return owners


# --- the unread data, source by source ------------------------------------------------------------


class ItemsRead(NamedTuple):
    """The items that a rank has read of a source after the source's state."""

    items: int
    by_source: Mapping[str, tuple[int, int]] = {}  # in a mixture; see `ProcessorState`


@dataclass(frozen=True)
class Reading:
    """How far the old ranks have read a source, and what the new ranks count of that."""

    since_states: Sequence[ItemsRead]  # of each old rank
    done: Sequence[int]  # of each new rank, the samples of the epoch that it counts as read


def _reshard_source(states: States, ranks: Ranks, reading: Reading) -> list[SourceState]:
    """Return the states of a source on the new ranks, which read the unread items."""
    declared, rule = _rule_of(states[0])
    sizes = [config_of(state).get("world_size") for state in states]
    if "world_size" in config_of(states[0]) and {*sizes} != {ranks.before}:
        raise StateError(
            f"`{node_of(states[0])}` cannot be resharded within an epoch: each rank has different "
            f"data, which no other rank can read. {_UP_TO_THE_END}."
        )
    return rule(Node.opened(states, declared, ranks), reading)


def _rule_of(state: object) -> tuple[type[NodeState], Rule]:
    """Return state class and rule of a node; raise a `StateError` if it has no rule."""
    if (rule := _OF_SOURCES.get(name := node_of(state))) is not None:
        return rule
    raise StateError(
        f"{f'`{name}`' if name else 'a node without a sealed state'} cannot be resharded within "
        "an epoch: its state does not name the unread items by numbers that all ranks share. Do "
        f"its work in `process_fn`, which can be resharded. {_AFTER_THE_LAST}"
    )


def _check_has_rules(state: SourceState) -> None:
    """Raise a `StateError` if a node, or a node below it, has no rule."""
    _rule_of(state)
    for source in [state["source"]] if "source" in state else state.get("sources", {}).values():
        _check_has_rules(source)


def _reshard_observer(node: Node[ObserverState], reading: Reading) -> list[SourceState]:
    sources = _reshard_source(node.sources, node.ranks, reading)
    return node.on_new_ranks({"source": sources, "position": reading.done})


def _reshard_processor(node: Node[ProcessorState], reading: Reading) -> list[SourceState]:
    started = _has_started(node, "epoch")
    since_states = [
        ItemsRead(state.taken + since.items, state.taken_of)
        for state, since in zip(node.states, reading.since_states, strict=True)
    ]
    sources = _reshard_source(node.sources, node.ranks, Reading(since_states, reading.done))
    return node.on_new_ranks({"source": sources, "position": reading.done}, {"started": started})


def _reshard_sampler(node: Node[SamplerState], reading: Reading) -> list[SourceState]:
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


def _has_started(node: Node[Any], *alike: str) -> bool:
    """Check that all ranks are in the same pass over a source; tell whether any has begun it."""
    states: Sequence[EpochState] = node.states
    cycles = [state.cycle for state in states]
    if (most := max(cycles)) > min(cycles):
        raise StateError(
            f"`{node.name}` has begun again on rank {cycles.index(most)}, which is exhausted "
            f'(`stop` is "cycle"), but not yet on rank {cycles.index(min(cycles))}. {_LATER}'
        )
    node.check_same(*alike)
    return any(state.started for state in states)


def _reshard_mixer(node: Node[MixerState], reading: Reading) -> list[SourceState]:
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
            sources[name] = _reshard_source([state.sources[name] for state in states], ranks, below)
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
        "sources": ranks.of_each(sources),
        "samples": ranks.split_each(samples),
        "tokens": ranks.split_each(tokens),
    }
    return node.on_new_ranks(by_rank, alike)


def _totals(counts: Sequence[Mapping[str, N]]) -> dict[str, N]:
    """Return the sums of counts by source."""
    return {name: sum(of_rank[name] for of_rank in counts) for name in counts[0]}


def _read_by_source(rank: int, state: MixerState, since: ItemsRead) -> dict[str, ItemsRead]:
    """Return the items that a rank has read of each source after the state of a mixture."""
    of_sources = dict.fromkeys(state.sources, ItemsRead(0))
    for key, (items, cycle) in since.by_source.items():
        name = max((name for name in state.sources if f"{key}/".startswith(f"{name}/")), key=len)
        if state.sources[name].get("cycle", cycle) != cycle:
            raise StateError(
                f"source {name!r} has just begun again on rank {rank}, and the state does not have "
                f"that yet. {_LATER}"
            )
        inner = {key[len(name) + 1 :]: (items, cycle)} if key != name else {}
        before = of_sources[name]
        of_sources[name] = ItemsRead(before.items + items, {**before.by_source, **inner})
    attributed = sum(of_source.items for of_source in of_sources.values())
    if attributed != since.items:
        raise StateError(
            f"the state of `SourceMixer` on rank {rank} is {since.items} samples behind the "
            f"position that it was saved at, and has the sources of only {attributed}. {_LATER}"
        )
    return of_sources


def _done_by_source(totals: Mapping[str, int], done: Sequence[int]) -> dict[str, list[int]]:
    """Return the samples of each source that each new rank counts as read.

    Laid end to end, the sources and the ranks cover the same line: a rank counts the parts of the
    sources that lie beside it.
    """
    largest = max(totals, key=lambda name: totals[name])
    skipped = sum(done) - sum(totals.values())  # samples that a mixture does not count
    of_sources = {**totals, largest: totals[largest] + skipped}
    places = [*pairwise([0, *accumulate(done)])]
    bounds = pairwise([0, *accumulate(of_sources.values())])
    return {
        name: [max(0, min(stop, last) - max(start, first)) for start, stop in places]
        for name, (first, last) in zip(of_sources, bounds, strict=True)
    }


Rule = Callable[[Node[Any], Reading], list[SourceState]]
_OF_SOURCES: Mapping[str, tuple[type[NodeState], Rule]] = {
    "JsonlSource": (SamplerState, _reshard_sampler),
    "LengthObserver": (ObserverState, _reshard_observer),
    "ParallelProcessor": (ProcessorState, _reshard_processor),
    "ShardedSampler": (SamplerState, _reshard_sampler),
    "SourceMixer": (MixerState, _reshard_mixer),
}
"""Source -> its state class, and the function that reshards its states within an epoch."""
