"""Rules: how groups that are planned, and the samples that wait, are dealt to other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.errors import StateError
from odb_nodes.loader.resharding.anew import begun_anew
from odb_nodes.loader.resharding.sealed import LATER, Ranks, check_alike, node_of, opened, sealed_as
from odb_nodes.loader.resharding.sources import Reading, reshard_source
from odb_nodes.nodes.bucketer_state import BucketerState
from odb_nodes.nodes.excluded_keys import ExcludedKeys, ExcludedState
from odb_nodes.nodes.sample_records import NO_RECORDS, SampleRecords
from odb_nodes.planning.limits import Limits

_SAME_PLACE = (
    "epoch",
    "cycle",
    "step",
    "emitted",
    "round",
    "next_limits",
    "next_window",
    "weights",
)


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
    config = states[0]["config"]
    alone = config["uneven"] == "join"
    at_end = left or all(at.is_at_end(at.steps(ends_alone=alone)) for at in found)
    if at_end or not any(at.step or at.round or at.plan for at in found):
        check_alike("RankAligner", found, ("epoch", "cycle"))
        sources = _anew_pool([at.source for at in found], ranks)
        over = _between_rounds() | {"last": True} if at_end else {}
        return _sealed(states, found, ranks, sources, **over), True
    _check_can_be_dealt(found, config)
    sources = _reshard_pool(found, ranks)
    rest = _between_rounds() | {
        "round": found[0].round + any(at.plan is not None for at in found),
        "held": NO_RECORDS,
        "sizes": [0, 0],
        "weight_changes": _in_force(found),
        "shares_rest": all(at.shares_rest for at in found) and world_size > 1,
    }
    return _sealed(states, found, ranks, sources, **rest), False


def _between_rounds() -> dict[str, Any]:
    """Return what a state has where no round has begun, and none is agreed on."""
    return {
        **dict.fromkeys(("plan", "filler", "caps", "next_caps", "limits")),
        **dict.fromkeys(("emitted", "splits"), 0),
        **dict.fromkeys(("last", "drained", "peers_go_on", "unsettled"), False),
    }


def _check_can_be_dealt(found: Sequence[AlignerState], config: Mapping[str, Any]) -> None:
    """Check that all ranks stand between the same two optimizer steps, and hold samples by keys.

    Raises:
        StateError: they do not, or a rank has ended where that ends others.
    """
    uneven = config["uneven"]
    over = [rank for rank, at in enumerate(found) if at.last]
    if over and uneven == "join":
        raise StateError(
            'with `uneven="join"`, states cannot be resharded once a rank has ended: ranks '
            f"{over} have. Reshard a checkpoint before that, or one after the epoch."
        )
    check_alike("RankAligner", found, _SAME_PLACE)
    check_between_optimizer_steps(found[0], config)
    if over and uneven == "stop":
        raise StateError(
            'the last round of an epoch with `uneven="stop"` has begun, which leaves samples out '
            "that some ranks still have: go on with as many ranks as before up to its end."
        )
    if any(at.held is None for at in found):
        raise _without_keys()


def check_between_optimizer_steps(
    at: AlignerState, config: Mapping[str, Any], batches: int = 0
) -> None:
    """Check that a rank stands between two optimizer steps.

    Args:
        at: where it stands.
        config: the configuration of its `RankAligner`.
        batches: batches that are out of the step that is next.

    Raises:
        StateError: it does not.
    """
    accumulate = config["accumulate"]
    inside = at.emitted % accumulate
    if at.is_at_end(at.steps(ends_alone=False)) or not (inside or batches):
        return
    raise StateError(
        f"the states stand at step {at.step} of epoch {at.epoch}, within an optimizer step of "
        f"{accumulate} steps, of which {inside} are done{', and a part of one' * bool(batches)}: "
        "their gradients are those of other ranks. Reshard a checkpoint that was saved where "
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
    excluded = ranks.summed([at.excluded_samples for at in found])
    wishes = [at.wish for at in found if at.wish]
    alike = {
        "started": any(at.started for at in found),
        "wish": min(wishes, default=0),
        "excluded": _all_keys([at.excluded for at in found]),
        "left_out_ahead": [],
        "held": None,
        "sizes": [],
        **changes,
    }
    return [
        sealed_as(
            states[0],
            replace(
                found[0],
                source=sources[rank],
                left_out=left_out[rank],
                unemitted_samples=unemitted[rank],
                excluded_samples=excluded[rank],
                **alike,
            ),
            rank,
            ranks.after,
        )
        for rank in range(ranks.after)
    ]


def _in_force(found: Sequence[AlignerState]) -> list[Any]:
    """Return the weights that were set, once all that is read from now on is drawn by them."""
    if (weights := found[0].weights) is None:
        return []
    if any(at.weight_changes[-1][0] > at.source["pulled"] for at in found):
        raise StateError(
            "the weights of the mixture were set a few steps ago, and are not yet in force on all "
            f"ranks. {LATER}"
        )
    return [(0, weights)]


def _without_keys() -> StateError:
    return StateError(
        "the states cannot be resharded within an epoch: the source cannot read samples by keys "
        'that all ranks share, or the pool is saved with `state="payload"`, so no other rank can '
        "make the samples that wait. Go on with as many ranks as before up to the end of the "
        "epoch: a state that is saved after its last step can be resharded."
    )


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
    check_alike("WindowBucketer", pools, ("mode",))
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
    return [
        sealed_as(
            states[0],
            replace(
                pools[0],
                source=sources[rank],
                pulled=done[rank],
                pool=records[rank].to_state(),
                waiting=np.packbits(np.ones(len(records[rank]), np.uint8)).tobytes() or None,
                **alike,
                **counts[rank],
            ),
            rank,
            ranks.after,
        )
        for rank in range(ranks.after)
    ]


def _anew_pool(states: Sequence[Any], ranks: Ranks) -> list[dict[str, Any]]:
    """Return the states of what is below the aligner where the epoch has ended, or not begun."""
    sources = begun_anew(states, ranks)
    if node_of(states[0]) != "WindowBucketer":
        return sources
    counts = _merged_counts(opened(states, BucketerState), ranks)
    return [source | counts[rank] for rank, source in enumerate(sources)]


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
    distinct = [one for at, one in enumerate(excluded) if one not in excluded[:1] or not at]
    return reduce(or_, map(ExcludedKeys.from_state, distinct)).to_state()


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
            raise _without_keys()
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
