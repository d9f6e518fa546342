"""Rules: how the samples that wait, in pools and in groups that are planned, are dealt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.errors import StateError
from odb_nodes.loader.resharding.anew import begun_anew
from odb_nodes.loader.resharding.sealed import (
    Ranks,
    check_alike,
    node_of,
    opened,
    sealed_for_ranks,
)
from odb_nodes.loader.resharding.sources import Reading, reshard_source
from odb_nodes.nodes.bucketer_state import BucketerState
from odb_nodes.nodes.excluded_keys import ExcludedKeys, ExcludedState
from odb_nodes.nodes.sample_records import SampleRecords
from odb_nodes.planning.limits import Limits


def reshard_pool(found: Sequence[AlignerState], ranks: Ranks) -> list[dict[str, Any]]:
    """Return the states of the `WindowBucketer`, whose pools have all samples that are read."""
    states = [at.source for at in found]
    if (node := node_of(states[0])) != "WindowBucketer":
        raise StateError(
            f"states can be resharded within an epoch where the `WindowBucketer` is right below "
            f"the `RankAligner`, but there is {f'a `{node}`' if node else 'another node'}, which "
            "may hold samples. Reshard a state that was saved after the last step of an epoch."
        )
    pools = opened(states, BucketerState)
    check_alike("WindowBucketer", pools, ("mode", "excluded"))
    waiting = _waiting(found, pools, ranks.before).among(ranks.after)
    left_out = [
        pool.excluded_samples + pool.dropped_samples + sum(pool.skipped_samples.values())
        for pool in pools
    ]
    owners = dealt_by_tokens(waiting.tokens, ranks.after)
    records = _parts_of(waiting, owners, ranks.after)
    emitted = sum(pool.pulled for pool in pools) - len(waiting) - sum(left_out)
    done = [
        sum(parts)
        for parts in zip(
            ranks.split(emitted), ranks.summed(left_out), map(len, records), strict=True
        )
    ]
    taken = [pool.pulled_since_source for pool in pools]
    reading = Reading(ranks=ranks, taken=taken, done=done)
    sources = reshard_source([pool.source for pool in pools], reading)
    limits = reduce(Limits.tightened, (Limits(*pool.limits) for pool in pools))
    if (agreed := found[0].next_limits) is not None:
        limits = limits.tightened(Limits(*agreed))
    alike: dict[str, Any] = {
        "pulled_since_source": 0,
        "ended": False,
        "limits": (*limits,),
        "has_own_limits": agreed is not None or any(pool.has_own_limits for pool in pools),
        "dearest_groups": max(pool.dearest_groups for pool in pools),
        "caps": None,
    }
    counts = _merged_counts(pools, ranks)
    values = [
        replace(
            pools[0],
            source=sources[rank],
            pulled=done[rank],
            pool=records[rank].to_state(),
            waiting=np.packbits(np.ones(len(records[rank]), np.uint8)).tobytes() or None,
            **alike,
            **counts[rank],
        )
        for rank in range(ranks.after)
    ]
    return sealed_for_ranks(states[0], values)


def anew_pool(states: Sequence[Any], ranks: Ranks) -> list[dict[str, Any]]:
    """Return the states of what is below the aligner where the epoch has ended, or not begun."""
    sources = begun_anew(states, ranks)
    if node_of(states[0]) != "WindowBucketer":
        return sources
    counts = _merged_counts(opened(states, BucketerState), ranks)
    return [source | counts[rank] for rank, source in enumerate(sources)]


def _waiting(
    found: Sequence[AlignerState], pools: Sequence[BucketerState], world_size: int
) -> SampleRecords:
    """Return the records of all samples that were read, and are in no step: the oldest first."""
    parts, ages = [], []
    for at, pool in zip(found, pools, strict=True):
        assert at.held is not None
        held = SampleRecords.from_state(at.held)[: sum(at.sizes[:-1])]  # without the filler
        pooled = SampleRecords.from_state(pool.pool)
        if pool.mode != "replay" or (len(pooled) and not pooled.has_items):
            raise without_keys()
        parts += [held, pooled]
        oldest = pool.pulled - min(pool.ordinals(), default=pool.pulled)
        ages += [oldest + np.arange(len(held), 0, -1), pool.pulled - np.array(pool.ordinals())]
    joined = SampleRecords.joined(parts)
    if any(size != world_size for _, size in joined.origins):
        raise StateError(
            "the states cannot be resharded within an epoch: each rank has data of its own, which "
            "no other can read. Go on with as many ranks as before up to the end of the epoch."
        )
    return joined[np.argsort(-np.concatenate(ages), kind="stable")]


def _parts_of(
    records: SampleRecords, owners: np.ndarray[Any, Any], world_size: int
) -> list[SampleRecords]:
    """Return the records of each rank, in their order."""
    by_owner = np.argsort(owners, kind="stable")
    ends = np.searchsorted(owners[by_owner], range(1, world_size))
    return [records[indices] for indices in np.split(by_owner, ends)]


def dealt_by_tokens(tokens: np.ndarray[Any, Any], world_size: int) -> np.ndarray[Any, Any]:
    """Return to which rank each sample goes, (n,): as many to each, and about as many tokens.

    From the longest on, they are dealt to and fro: to ranks 0, 1, 2, 2, 1, 0, 0, ...
    """
    turn, place = np.divmod(np.arange(len(tokens)), world_size)
    to_and_fro = np.where(turn % 2, world_size - 1 - place, place)
    owners = np.empty(len(tokens), np.int64)
    owners[np.argsort(-tokens, kind="stable")] = to_and_fro
    return owners


def _merged_counts(pools: Sequence[BucketerState], ranks: Ranks) -> list[dict[str, Any]]:
    """Return what pools have counted, each sample on one of the ranks that go on."""
    names = ("excluded_samples", "dropped_samples", "oversize_samples")
    counts = {name: ranks.summed([getattr(pool, name) for pool in pools]) for name in names}
    skipped = [
        sum((Counter(pool.skipped_samples) for pool in pools[rank :: ranks.after]), Counter())
        for rank in range(ranks.after)
    ]
    keys = all_keys([pool.excluded for pool in pools])
    left_out = ranks.joined([pool.left_out for pool in pools])
    return [
        {
            **{name: of_ranks[rank] for name, of_ranks in counts.items()},
            "skipped_samples": dict(skipped[rank]),
            "excluded": keys,
            "left_out": left_out[rank],
        }
        for rank in range(ranks.after)
    ]


def all_keys(excluded: Sequence[ExcludedState]) -> ExcludedState:
    """Return the keys that any of the states excludes."""
    distinct = [one for at, one in enumerate(excluded) if one not in excluded[:1] or not at]
    return reduce(or_, map(ExcludedKeys.from_state, distinct)).to_state()


def without_keys() -> StateError:
    """Return the error where no other rank can make the samples that wait."""
    return StateError(
        "the states cannot be resharded within an epoch: the source cannot read samples by keys "
        'that all ranks share, or the pool is saved with `state="payload"`, so no other rank can '
        "make the samples that wait. Go on with as many ranks as before up to the end of the "
        "epoch: a state that is saved after its last step can be resharded."
    )
