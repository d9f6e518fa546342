"""Turns the states of a graph on N ranks into states on M ranks.

All nodes are set to the beginning of an epoch. Between two epochs nothing else changes. Within an
epoch, the planned round is dissolved: the waiting samples, in pools and in planned groups, are
dealt to the pools of the new ranks, and each source gets the items that no rank has read. If the
epoch is planned from known lengths, the new ranks get the progress of each old rank, and plan the
remaining samples of all old ranks together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from odb_nodes._support.arrays import IntArray, int64_state
from odb_nodes.core.alignment.aligned_round import AlignerState, ordinals_of
from odb_nodes.core.contract.state import SourceState
from odb_nodes.core.loader.reshard_sources import (
    AFTER_THE_LAST,
    ItemsRead,
    Reading,
    check_has_rules,
    reshard_source,
)
from odb_nodes.core.loader.reshard_states import (
    NodeStates,
    Ranks,
    States,
    at_epoch_start,
    node_of,
    started,
)
from odb_nodes.core.nodes.exclusions import ExcludedKeys
from odb_nodes.core.nodes.group_collator import CollatorState
from odb_nodes.core.nodes.planned_groups import PlannedState
from odb_nodes.core.nodes.sample_records import among, from_records, to_records
from odb_nodes.core.nodes.sample_store import from_bits, to_bits
from odb_nodes.core.nodes.window_bucketer import BucketerState
from odb_nodes.core.planning.budget import Limits
from odb_nodes.core.planning.group_planner import RoundSettings
from odb_nodes.core.planning.later_samples import LaterSamples
from odb_nodes.core.planning.resumed_plan import EarlierRanks, RankProgress
from odb_nodes.core.sample_block import ITEM, TOKENS, SampleBlock
from odb_nodes.errors import StateError


def reshard_graph(graphs: States, ranks: Ranks, *, is_over: bool) -> list[SourceState]:
    """Return the states of a graph on the new ranks.

    is_over: whether the epoch has ended or was left, so that the next epoch follows.
    """
    if node_of(graphs[0]) == "RankAligner":
        return _reshard_aligner(NodeStates.opened(graphs, AlignerState, ranks), is_over)
    node = NodeStates.opened(graphs, CollatorState, ranks)
    sources = reshard_graph(node.sources, ranks, is_over=is_over)
    if not is_over:
        node.check_same("step")
    samples = ranks.split(sum(state.samples for state in node.states))
    return node.on_new_ranks({"source": sources, "samples": samples})


def _reshard_aligner(node: NodeStates[AlignerState], is_over: bool) -> list[SourceState]:
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
    elif (declared := _POOL_STATES.get(node_of(node.sources[0]))) is not None:
        pools = NodeStates.opened(node.sources, declared, ranks)
        sources = pools.on_new_ranks(_left_out(pools))
    else:
        sources = at_epoch_start(node.sources, ranks)
    if is_over and alike["started"]:
        sources = [*map(started, sources)]
    by_rank = {"source": sources, **node.counted(left_out=[], unemitted_samples=0)}
    return node.on_new_ranks(by_rank, alike)


_POOL_STATES: Mapping[str, type[Any]] = {
    "PlannedGroups": PlannedState,
    "WindowBucketer": BucketerState,
}
"""Nodes directly below a `RankAligner` that can be resharded within an epoch -> their states."""


def _left_out(pools: NodeStates[Any]) -> dict[str, list[Any]]:
    """Return the left-out samples that each new rank counts, by field."""
    old_pools = pools.ranks.redistribute(pools.states)
    skipped = [[Counter(pool.skipped_samples) for pool in old] for old in old_pools]
    keys = reduce(or_, (ExcludedKeys.from_state(pool.excluded) for pool in pools.states))
    return {
        "excluded": [keys.to_state()] * pools.ranks.after,
        "skipped_samples": [dict(sum(reasons, Counter())) for reasons in skipped],
        **pools.counted(excluded_samples=0, dropped_samples=0, oversize_samples=0, left_out=[]),
    }


def _reshard_pool(aligner: NodeStates[AlignerState]) -> list[SourceState]:
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
    pools = NodeStates.opened(aligner.sources, BucketerState, ranks)
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
    sources = reshard_source(pools.sources, ranks, Reading(since_states, done))
    aligner.check_same("totals_digest")  # Last, because other errors say what differs.
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


def _reshard_planned(aligner: NodeStates[AlignerState]) -> list[SourceState]:
    """Make the new ranks plan the remaining samples of all old ranks together.

    The remaining samples include the groups that wait in the aligner. Samples put off to the end of
    the epoch are dealt to the new ranks.
    """
    planned = NodeStates.opened(aligner.sources, PlannedState, aligner.ranks)
    planned.check_same("epoch", "cycle", "limits", "excluded", "earlier")
    waiting = [np.empty((2, 0), np.int64)]
    for state in aligner.states:
        if state.given is not None:
            *_, records, _ = state.given
            stored, _ = from_bits(state.given)
            waits = np.isin(stored, np.concatenate([*ordinals_of(state.groups), stored[:0]]))
            waiting.append(from_records(records).facts[[ITEM, TOKENS]][:, waits])
    above = int64_state(np.concatenate(waiting, axis=1))
    ranks = [RankProgress(state.is_alone, state.rows, state.taken) for state in planned.states]
    first = planned.states[0]
    earlier = EarlierRanks(ranks, Limits(*first.limits), above)
    alike = {
        "started": any(state.started for state in planned.states),
        "earlier": [*first.earlier, earlier.to_state()],
    }
    try:
        later = LaterSamples.from_states(*(state.later for state in planned.states))
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
    aligner.check_same("totals_digest")  # Last, because other errors say what differs.
    return planned.on_new_ranks(by_rank, alike)


def _waiting(aligners: Sequence[AlignerState], pools: Sequence[BucketerState]) -> SampleBlock:
    """Return the records of all samples that were read, but are in no step, by age."""
    parts, ages = [], []
    for aligner, pool in zip(aligners, pools, strict=True):
        *_, records_state, payload = pool.held
        records = from_records(records_state, is_numbered=pool.numbered)
        if payload is not None or (pool.numbered and len(records)):
            if pool.mode == "replay":
                check_has_rules(pool.source)
            raise StateError(
                "the states cannot be resharded within an epoch: the source cannot read samples by "
                'keys that all ranks share, or the pool is saved with `state="payload"`, so no '
                f"other rank can make the samples that wait. {AFTER_THE_LAST}"
            )
        stored, pooled = from_bits(pool.held)
        waits = np.isin(stored, np.concatenate([pooled, *ordinals_of(aligner.groups)]))  # no filler
        parts.append(records.take(np.flatnonzero(waits)))
        ages.append(pool.pulled - stored[waits])
    return SampleBlock.joined(parts).take(np.argsort(-np.concatenate(ages), kind="stable"))


def dealt_by_tokens(tokens: IntArray, world_size: int) -> IntArray:
    """Return the rank of each sample, (n,): equal numbers of samples, and about equal tokens.

    The samples, from the longest down, go to ranks 0, 1, 2, 2, 1, 0, 0, ...
    """
    turn, place = np.divmod(np.arange(len(tokens)), world_size)
    to_and_fro = np.where(turn % 2, world_size - 1 - place, place)
    owners = np.empty(len(tokens), np.int64)
    owners[np.argsort(-tokens, kind="stable")] = to_and_fro
    return owners
