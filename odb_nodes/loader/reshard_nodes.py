"""The states of a graph on N ranks, made into those on M ranks.

All nodes are put to the beginning of an epoch. Between two epochs nothing is left to do. Within
one, a round that is planned ends: the samples that wait, in pools and in planned groups, are dealt
to the pools of the new ranks, and each source is told which of its items no rank has read. Where
an epoch is planned from known lengths, the new ranks are told how far each old rank had come, and
plan together what all of them have left.
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

from odb_nodes.alignment.aligned_round import ordinals_of
from odb_nodes.alignment.rank_aligner import AlignerState
from odb_nodes.contract import EpochState, NodeState
from odb_nodes.contract.state import DIGEST, SourceState, unseal
from odb_nodes.errors import StateError
from odb_nodes.nodes.exclusions import ExcludedKeys
from odb_nodes.nodes.group_collator import CollatorState
from odb_nodes.nodes.length_observer import ObserverState
from odb_nodes.nodes.planned_groups import PlannedState
from odb_nodes.nodes.sample_records import NO_RECORDS, among, from_records, to_records
from odb_nodes.nodes.sample_store import from_bits, to_bits
from odb_nodes.nodes.window_bucketer import BucketerState
from odb_nodes.planning.budget import Limits
from odb_nodes.planning.group_planner import RoundSettings
from odb_nodes.planning.later_samples import LaterSamples
from odb_nodes.planning.resumed_plan import EarlierRanks, RankProgress
from odb_nodes.processing.parallel_processor import ProcessorState
from odb_nodes.sample_block import ITEM, TOKENS, IntArray, SampleBlock
from odb_nodes.sources.sharded_sampler import SamplerState, Share, dealt
from odb_nodes.sources.source_mixer import MixerState

S = TypeVar("S", bound=NodeState)
T = TypeVar("T")
N = TypeVar("N", int, float)
States = Sequence[SourceState]  # the states of one node, by rank

_UP_TO_THE_END = "Go on with as many ranks as before up to the end of the epoch"
_AFTER_THE_LAST = f"{_UP_TO_THE_END}: a state that is saved after its last step can be resharded."
_LATER = "Go on with as many ranks as before, and reshard a later checkpoint."


class Ranks(NamedTuple):
    """Numbers of ranks: of those that have saved, and of those that go on."""

    before: int
    after: int

    def split(self, total: int) -> list[int]:
        """Return parts of a number for the ranks that go on, which differ by 1 at most."""
        return [total // self.after + (rank < total % self.after) for rank in range(self.after)]

    def split_each(self, totals: Mapping[str, int]) -> list[dict[str, int]]:
        """Return such parts of several numbers, by name."""
        return self.of_each({name: self.split(total) for name, total in totals.items()})

    def of_each(self, by_name: Mapping[str, Sequence[T]]) -> list[dict[str, T]]:
        """Return for each of the ranks that go on what it has by each name."""
        return [
            {name: values[rank] for name, values in by_name.items()} for rank in range(self.after)
        ]

    def redistribute(self, states: Sequence[T]) -> list[Sequence[T]]:
        """Return whose counts each of the ranks that go on takes over."""
        return [states[rank :: self.after] for rank in range(self.after)]


# --- the states of a node on all ranks ------------------------------------------------------------


def node_of(state: object) -> str:
    """Return the name of the node that has saved a state; "" where it is not sealed."""
    name = state.get("node") if isinstance(state, Mapping) else None
    return name if isinstance(name, str) else ""


def config_of(state: object) -> Mapping[str, Any]:
    """Return the configuration of the node that has saved a state; none where it is damaged."""
    config = state.get("config") if isinstance(state, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def check_same(node: str, values: Sequence[NodeState], *fields: str) -> None:
    """Raise a `StateError` where a field is another one on another rank."""
    for name in fields:
        first = getattr(values[0], name)
        for rank, state in enumerate(values):
            if (value := getattr(state, name)) != first:
                raise StateError(
                    f"the states of {node} are of different places: `{name}` is {first!r:.80} on "
                    f"rank 0, but {value!r:.80} on rank {rank}. Reshard the states of one "
                    "checkpoint."
                )


@dataclass(frozen=True)
class Node(Generic[S]):
    """What a node has saved on all ranks, and the ranks that it goes on with."""

    name: str
    config: Mapping[str, Any]  # of rank 0, with its rank
    sealed: States
    states: Sequence[S]  # what they hold
    ranks: Ranks

    @classmethod
    def opened(cls, sealed: States, declared: type[S], ranks: Ranks) -> Node[S]:
        """Open the states of a node, which must be of the same graph."""
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
        """Return states of the new ranks: of the beginning of an epoch, but for these fields."""
        changes = self.ranks.of_each(by_rank)
        begun = _at_epoch_start(self.sealed, self.ranks)
        return [
            {**state, **(alike or {}), **own} for state, own in zip(begun, changes, strict=True)
        ]

    def counted(self, **zeros: Any) -> dict[str, list[Any]]:
        """Return what each new rank takes over of fields, whose sum of no rank is a zero."""
        old_ranks = self.ranks.redistribute(self.states)
        return {
            field: [sum((getattr(state, field) for state in states), zero) for states in old_ranks]
            for field, zero in zeros.items()
        }

    def check_same(self, *fields: str) -> None:
        """Raise a `StateError` where a field is another one on another rank."""
        check_same(self.name, self.states, *fields)


def _common(state: object) -> dict[str, Any]:
    own = ("rank", "world_size")
    return {name: value for name, value in config_of(state).items() if name not in own}


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
"""Node -> fields of its state where nothing of the epoch is read."""


def _at_epoch_start(sealed: States, ranks: Ranks) -> list[SourceState]:
    """Return states of the new ranks with all known nodes at the beginning of an epoch.

    They may share parts with what they are made of.
    """
    return [_begun(sealed[rank % ranks.before], rank, ranks) for rank in range(ranks.after)]


def _begun(state: Any, rank: int, ranks: Ranks) -> Any:
    if not isinstance(state, Mapping):
        return state
    new = {key: _begun(value, rank, ranks) for key, value in state.items()}
    if not (name := node_of(state)):
        return new
    new.pop(DIGEST, None)  # of a node below one of torchdata: the loader's will cover it
    new |= _EPOCH_START.get(name, {})
    if name == "WindowBucketer":
        is_replay = new["mode"] == "replay"
        new["held"] = (0, None, None, *((NO_RECORDS, None) if is_replay else (None, [])))
    if name == "SourceMixer":
        new |= {field: dict.fromkeys(new["sources"], 0) for field in ("samples", "tokens")}
    if new["config"].get("world_size") == ranks.before:  # else its data are the rank's own
        new["config"] |= {"rank": rank, "world_size": ranks.after}
    return new


def _started(state: Any) -> Any:
    """Have all nodes begin the next epoch after this one.

    A state of a source may be from before its first item, and say that its epoch is yet to begin.
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
    """Let the round end."""
    states, ranks = node.states, node.ranks
    node.check_same("epoch", "cycle")
    is_over = is_over or all(state.is_at_end for state in states)
    asked = [state.requested_max_tokens for state in states if state.requested_max_tokens]
    alike: dict[str, Any] = {
        "started": any(state.started for state in states),
        "requested_max_tokens": min(asked, default=0),
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
"""What may be right below a `RankAligner` whose states are resharded within an epoch."""


def _left_out(pools: Node[Any]) -> dict[str, list[Any]]:
    """Return what each of the new ranks counts as left out, by field."""
    old_pools = pools.ranks.redistribute(pools.states)
    skipped = [[Counter(pool.skipped_samples) for pool in old] for old in old_pools]
    keys = reduce(or_, (ExcludedKeys.from_state(pool.excluded) for pool in pools.states))
    return {
        "excluded": [keys.to_state()] * pools.ranks.after,
        "skipped_samples": [dict(sum(reasons, Counter())) for reasons in skipped],
        **pools.counted(excluded_samples=0, dropped_samples=0, oversize_samples=0, left_out=[]),
    }


def _reshard_pool(aligner: Node[AlignerState]) -> list[SourceState]:
    """Deal all samples that are read, and are in no step, to the pools of the new ranks."""
    ranks = aligner.ranks
    aligner.check_same("step", "emitted", "round", "settings")
    if aligner.config["uneven"] == "stop" and any(state.last for state in aligner.states):
        raise StateError(
            'the last round of an epoch with `uneven="stop"` has begun, which leaves samples out '
            "that some ranks still have: go on with as many ranks as before up to its end."
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
    taken = [Taken(pool.pulled_since_source) for pool in pools.states]
    sources = _reshard_source(pools.sources, ranks, Reading(taken, done))
    aligner.check_same("totals_digest")  # last: other errors say what differs
    limits = reduce(Limits.tightened, (Limits(*pool.limits) for pool in pools.states))
    if agreed := RoundSettings(*aligner.states[0].settings).max_tokens:
        limits = limits._replace(tokens=min(agreed, limits.tokens))
    held = []
    for samples, stop in zip(records, done, strict=True):
        ordinals = np.arange(stop - len(samples), stop)
        held.append((*to_bits(ordinals, ordinals), to_records(samples), None))
    alike = {
        "limits": (*limits,),
        "has_own_limits": agreed > 0 or any(pool.has_own_limits for pool in pools.states),
        "largest_groups": max(pool.largest_groups for pool in pools.states),
        "window": pools.states[0].window,
    }
    by_rank: dict[str, list[Any]] = {
        "source": sources,
        "pulled": done,
        "held": held,
        **_left_out(pools),
    }
    return pools.on_new_ranks(by_rank, alike)


def _reshard_planned(aligner: Node[AlignerState]) -> list[SourceState]:
    """Have the new ranks plan together what the old ones have left, and what waits above.

    Samples that come later are dealt out.
    """
    planned = Node.opened(aligner.sources, PlannedState, aligner.ranks)
    planned.check_same("epoch", "cycle", "limits", "excluded", "earlier")
    waiting = [np.empty((2, 0), np.int64)]
    for state in aligner.states:
        if state.given is not None:
            *_, records, _ = state.given
            held, _ = from_bits(state.given)
            waits = np.isin(held, np.concatenate([*ordinals_of(state.groups), held[:0]]))
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
    """Return the records of all samples that were read, and are in no step: the oldest first."""
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
        held, pooled = from_bits(pool.held)
        waits = np.isin(held, np.concatenate([pooled, *ordinals_of(aligner.groups)]))  # no filler
        parts.append(records.take(np.flatnonzero(waits)))
        ages.append(pool.pulled - held[waits])
    return SampleBlock.joined(parts).take(np.argsort(-np.concatenate(ages), kind="stable"))


def dealt_by_tokens(tokens: IntArray, world_size: int) -> IntArray:
    """Return to which rank each sample goes, (n,): as many to each, and about as many tokens.

    From the longest on, they are dealt to and fro: to ranks 0, 1, 2, 2, 1, 0, 0, ...
    """
    turn, place = np.divmod(np.arange(len(tokens)), world_size)
    to_and_fro = np.where(turn % 2, world_size - 1 - place, place)
    owners = np.empty(len(tokens), np.int64)
    owners[np.argsort(-tokens, kind="stable")] = to_and_fro
    return owners


# --- what is left of the data, source by source ---------------------------------------------------


class Taken(NamedTuple):
    """What a rank has read of a source after the source's state."""

    items: int
    by_source: Mapping[str, tuple[int, int]] = {}  # in a mixture; see `ProcessorState`


@dataclass(frozen=True)
class Reading:
    """How far a source is read, and how much of that is whose from now on."""

    taken: Sequence[Taken]  # of each rank that has saved
    done: Sequence[int]  # of each new rank, samples of the epoch that it stands for already


def _reshard_source(states: States, ranks: Ranks, reading: Reading) -> list[SourceState]:
    """Return the states of a source on the new ranks, which read what no rank has read."""
    declared, rule = _rule_of(states[0])
    sizes = [config_of(state).get("world_size") for state in states]
    if "world_size" in config_of(states[0]) and {*sizes} != {ranks.before}:
        raise StateError(
            f"`{node_of(states[0])}` cannot be resharded within an epoch: each rank has data of "
            f"its own, which no other can read. {_UP_TO_THE_END}."
        )
    return rule(Node.opened(states, declared, ranks), reading)


def _rule_of(state: object) -> tuple[type[NodeState], Rule]:
    """Return the rule of a node; raise a `StateError` where there is none."""
    if (rule := _OF_SOURCES.get(name := node_of(state))) is not None:
        return rule
    raise StateError(
        f"{f'`{name}`' if name else 'a node without a sealed state'} cannot be resharded within "
        "an epoch: its state does not say which items no rank has read, by numbers that all ranks "
        f"share. What is done in `process_fn` instead moves with its sample. {_AFTER_THE_LAST}"
    )


def _check_has_rules(state: SourceState) -> None:
    """Raise a `StateError` where a node, or one below it, has no rule."""
    _rule_of(state)
    for source in [state["source"]] if "source" in state else state.get("sources", {}).values():
        _check_has_rules(source)


def _reshard_observer(node: Node[ObserverState], reading: Reading) -> list[SourceState]:
    sources = _reshard_source(node.sources, node.ranks, reading)
    return node.on_new_ranks({"source": sources, "position": reading.done})


def _reshard_processor(node: Node[ProcessorState], reading: Reading) -> list[SourceState]:
    started = _has_started(node, "epoch")
    taken = [
        Taken(state.taken + since.items, state.taken_of)
        for state, since in zip(node.states, reading.taken, strict=True)
    ]
    sources = _reshard_source(node.sources, node.ranks, Reading(taken, reading.done))
    return node.on_new_ranks({"source": sources, "position": reading.done}, {"started": started})


def _reshard_sampler(node: Node[SamplerState], reading: Reading) -> list[SourceState]:
    has_items_out = any(taken.items for taken in reading.taken)
    started = _has_started(node, "epoch", "start") or has_items_out
    unread = [
        Share(rank, node.ranks.before, state).after(state.position + taken.items)
        for rank, (state, taken) in enumerate(zip(node.states, reading.taken, strict=True))
    ]
    shares = dealt(unread, node.ranks.after, node.config["size"])
    extra = [share.extra for share in shares]
    return node.on_new_ranks(
        {"position": reading.done, "done": reading.done, "extra": extra},
        {"started": started, "start": shares[0].start},
    )


def _has_started(node: Node[Any], *alike: str) -> bool:
    """Check that all ranks read the data of a source for the same time; tell whether they do."""
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
    taken = [
        _taken_by_source(rank, state, of_rank)
        for rank, (state, of_rank) in enumerate(zip(node.states, reading.taken, strict=True))
    ]
    states = [
        replace(state, samples={name: n + of[name].items for name, n in state.samples.items()})
        for state, of in zip(node.states, taken, strict=True)
    ]
    samples = _totals([state.samples for state in states])
    tokens = _totals([state.tokens for state in states])
    targets = _totals([state.targets for state in states])
    sources = {}
    for name, done in _done_by_source(samples, reading.done).items():
        below = Reading([of[name] for of in taken], done)
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


def _taken_by_source(rank: int, state: MixerState, taken: Taken) -> dict[str, Taken]:
    """Return what a rank has read of each source after the state of a mixture."""
    of_sources = dict.fromkeys(state.sources, Taken(0))
    for key, (items, cycle) in taken.by_source.items():
        name = max((one for one in state.sources if f"{key}/".startswith(f"{one}/")), key=len)
        if state.sources[name].get("cycle", cycle) != cycle:
            raise StateError(
                f"source {name!r} has just begun again on rank {rank}, which the state does not "
                f"say yet. {_LATER}"
            )
        inner = {key[len(name) + 1 :]: (items, cycle)} if key != name else {}
        before = of_sources[name]
        of_sources[name] = Taken(before.items + items, {**before.by_source, **inner})
    known = sum(of_source.items for of_source in of_sources.values())
    if known != taken.items:
        raise StateError(
            f"the state of `SourceMixer` on rank {rank} stands {taken.items} samples before the "
            f"place that it was saved at, and the sources of only {known} are known. {_LATER}"
        )
    return of_sources


def _done_by_source(totals: Mapping[str, int], done: Sequence[int]) -> dict[str, list[int]]:
    """Return what the ranks stand for of each source: together what they stand for of all.

    Sources and ranks are laid along one line: a rank stands for what lies beside it.
    """
    largest = max(totals, key=lambda name: totals[name])
    skipped = sum(done) - sum(totals.values())  # which a mixture does not count
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
"""Source -> its state, and what makes it that of another number of ranks within an epoch."""
