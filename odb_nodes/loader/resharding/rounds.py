"""Rules: a round that is planned ends, and the ranks that go on begin the next one.

The samples that wait, in pools and in groups that are planned, are dealt to the pools of these
ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from odb_nodes.alignment.rank_aligner import AlignerState
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
from odb_nodes.nodes.excluded_keys import ExcludedKeys, ExcludedState
from odb_nodes.nodes.sample_records import NO_RECORDS, SampleRecords, from_bits, to_bits
from odb_nodes.nodes.window_bucketer import BucketerState
from odb_nodes.planning.group_planner import RoundSettings
from odb_nodes.planning.limits import Limits


def reshard_aligner(
    states: Sequence[Any], world_size: int, *, left: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Return the states of a `RankAligner` of other ranks.

    Args:
        states: its state on each rank, in their order.
        world_size: number of ranks from now on.
        left: the epoch was left, so that the next one follows.

    Returns:
        The states, and whether they stand between two epochs.

    Raises:
        StateError: they cannot be resharded where they stand.
    """
    found, ranks = opened(states, AlignerState), Ranks(len(states), world_size)
    at_end = left or all(at.is_at_end(at.steps()) for at in found)
    between: dict[str, Any] = {
        "plan": None,
        "filler": None,
        "emitted": 0,
        "last": False,
        "drained": False,
    }
    if at_end or not any(at.step or at.round or at.plan for at in found):
        check_alike("RankAligner", found, ("epoch", "cycle"))
        sources = _pools_anew([at.source for at in found], ranks)
        changes = between | {"last": True} if at_end else {}
        return _sealed(states, found, ranks, sources, held=None, **changes), True
    _check_can_be_dealt(found, states[0]["config"])
    sources = _reshard_pool(found, ranks)
    check_alike("RankAligner", found, ("totals_digest",))  # last: other errors say what differs
    settings = RoundSettings(*found[0].settings)
    settings = settings._replace(caps=(), is_last=settings.is_last and world_size > 1)
    changes = between | {
        "round": found[0].round + any(at.plan is not None for at in found),
        "held": ([0, 0], NO_RECORDS, None),
        "settings": settings.to_state(),
    }
    return _sealed(states, found, ranks, sources, **changes), False


def _check_can_be_dealt(found: Sequence[AlignerState], config: Mapping[str, Any]) -> None:
    """Check that all ranks stand between the same two optimizer steps, and hold samples by keys.

    Raises:
        StateError: they do not, or a rank has ended where that ends others.
    """
    check_alike("RankAligner", found, ("epoch", "cycle", "step", "emitted", "round", "settings"))
    check_between_optimizer_steps(found[0], config)
    if config["uneven"] == "stop" and any(at.last for at in found):
        raise StateError(
            'the last round of an epoch with `uneven="stop"` has begun, which leaves samples out '
            "that some ranks still have: go on with as many ranks as before up to its end."
        )


def check_between_optimizer_steps(
    at: AlignerState, config: Mapping[str, Any], *, out: int = 0, hosted: int = 1
) -> None:
    """Check that a rank stands between two optimizer steps.

    Args:
        at: where it stands.
        config: the configuration of its `RankAligner`.
        out: batches that are out of the step that is next.
        hosted: virtual ranks of a process, which make as many batches of a step.

    Raises:
        StateError: it does not.
    """
    accumulate = config["accumulate"]
    inside = at.emitted % accumulate
    if at.is_at_end(at.steps()) or not (inside or out):
        return
    done, what = inside * hosted + out, "batches" if hosted > 1 else "steps"
    raise StateError(
        f"the states stand at step {at.step} of epoch {at.epoch}, within an optimizer step of "
        f"{accumulate * hosted} {what}, of which {done} are done: their gradients are those of "
        "other ranks. Reshard a checkpoint that was saved where "
        "`StepInfo.ends_optimizer_step` is True."
    )


def _sealed(
    states: Sequence[Any],
    found: Sequence[AlignerState],
    ranks: Ranks,
    sources: Sequence[Any],
    **changes: Any,
) -> list[dict[str, Any]]:
    """Return states with what counts for all ranks in one place each, and their sources."""
    left_out = ranks.joined([[*at.left_out, *at.left_out_ahead] for at in found])
    unemitted = ranks.summed([at.unemitted_samples for at in found])
    asked = [at.requested_max_tokens for at in found if at.requested_max_tokens]
    alike = {
        "started": any(at.started for at in found),
        "requested_max_tokens": min(asked, default=0),
        "left_out_ahead": [],
        **changes,
    }
    values = [
        replace(
            found[0],
            source=sources[rank],
            left_out=left_out[rank],
            unemitted_samples=unemitted[rank],
            **alike,
        )
        for rank in range(ranks.after)
    ]
    return sealed_for_ranks(states[0], values)


def _reshard_pool(found: Sequence[AlignerState], ranks: Ranks) -> list[dict[str, Any]]:
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
    if agreed := RoundSettings(*found[0].settings).max_tokens:
        limits = limits._replace(tokens=min(agreed, limits.tokens))
    alike: dict[str, Any] = {
        "pulled_since_source": 0,
        "ended": False,
        "is_cut": False,
        "limits": (*limits,),
        "has_own_limits": agreed > 0 or any(pool.has_own_limits for pool in pools),
        "dearest_groups": max(pool.dearest_groups for pool in pools),
        "caps": None,
    }
    counts = _merged_counts(pools, ranks)
    values = [
        replace(
            pools[0],
            source=sources[rank],
            pulled=done[rank],
            pool=(to_bits(np.ones(len(records[rank]), bool)), records[rank].to_state(), None),
            **alike,
            **counts[rank],
        )
        for rank in range(ranks.after)
    ]
    return sealed_for_ranks(states[0], values)


def _pools_anew(states: Sequence[Any], ranks: Ranks) -> list[dict[str, Any]]:
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
        sizes, held_state, _ = at.held or ([0], NO_RECORDS, None)
        bits, pool_state, _ = pool.pool
        if held_state is None or pool_state is None:
            raise _without_keys()
        held = SampleRecords.from_state(held_state)[: sum(sizes[:-1])]  # without the filler
        pooled, ordinals = SampleRecords.from_state(pool_state), from_bits(bits, pool.pulled)
        if held.are_numbered or pooled.are_numbered:
            raise _without_keys()
        parts += [held, pooled]
        oldest = pool.pulled - min(ordinals, default=pool.pulled)
        ages += [oldest + np.arange(len(held), 0, -1), pool.pulled - np.array(ordinals)]
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
    keys = _all_keys([pool.excluded for pool in pools])
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


def _all_keys(excluded: Sequence[ExcludedState]) -> ExcludedState:
    """Return the keys that any of the states excludes."""
    distinct = [one for at, one in enumerate(excluded) if one not in excluded[:1] or not at]
    return reduce(or_, map(ExcludedKeys.from_state, distinct)).to_state()


def _without_keys() -> StateError:
    """Return the error where no other rank can make the samples that wait."""
    return StateError(
        "the states cannot be resharded within an epoch: the source cannot read samples by keys "
        'that all ranks share, or the pool is saved with `state="payload"`, so no other rank can '
        "make the samples that wait. Go on with as many ranks as before up to the end of the "
        "epoch: a state that is saved after its last step can be resharded."
    )
