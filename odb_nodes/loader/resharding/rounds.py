"""Rules: a round that is planned ends, and the ranks that go on begin the next one.

The samples that wait, in pools and in groups that are planned, are dealt to the pools of these
ranks. Between two epochs, each node begins the next one, whatever it reads.
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
from odb_nodes.contract import copy_state
from odb_nodes.errors import StateError
from odb_nodes.loader.resharding.sealed import (
    Ranks,
    check_same,
    node_of,
    opened,
    sealed_for_ranks,
)
from odb_nodes.loader.resharding.sources import Reading, reshard_source
from odb_nodes.nodes.exclusions import ExcludedKeys
from odb_nodes.nodes.pooled_table import from_bits, to_bits
from odb_nodes.nodes.sample_records import (
    NO_RECORDS,
    among,
    are_numbered,
    from_records,
    to_records,
)
from odb_nodes.nodes.window_bucketer import BucketerState
from odb_nodes.planning.budget import Limits
from odb_nodes.planning.group_planner import RoundSettings
from odb_nodes.sample_block import SampleBlock


def reshard_aligner(
    states: Sequence[Any], world_size: int, *, left: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Return the states of a `RankAligner`, and whether they stand between two epochs.

    `left`: the epoch was left, so that the next one follows.
    """
    found, ranks = opened(states, AlignerState), Ranks(len(states), world_size)
    at_end = left or all(at.is_at_end(at.steps()) for at in found)
    between_epochs = at_end or not any(at.step or at.round or at.plan for at in found)
    changes: dict[str, Any]
    if between_epochs:
        check_same("RankAligner", found, "epoch", "cycle")
        sources = _pools_anew([at.source for at in found], ranks)
        changes = {"last": at_end, "held": None}
    else:
        _check_can_be_dealt(found, states[0]["config"])
        sources = _reshard_pool(found, ranks)
        check_same("RankAligner", found, "totals_digest")  # last: other errors say what differs
        settings = RoundSettings(*found[0].settings)
        settings = settings._replace(caps=(), is_last=settings.is_last and world_size > 1)
        changes = {
            "last": False,
            "held": ([0, 0], NO_RECORDS, None),
            "round": found[0].round + any(at.plan is not None for at in found),
            "settings": settings.to_state(),
        }
    asked = [at.requested_max_tokens for at in found if at.requested_max_tokens]
    common = replace(
        found[0],
        started=any(at.started for at in found),
        requested_max_tokens=min(asked, default=0),
        plan=None,
        filler=None,
        emitted=0,
        source_exhausted=False,
        left_out_ahead=[],
        **changes,
    )
    values = [
        replace(
            common,
            source=source,
            left_out=[one for at in own for one in (*at.left_out, *at.left_out_ahead)],
            unemitted_samples=sum(at.unemitted_samples for at in own),
        )
        for source, own in zip(sources, ranks.dealt(found), strict=True)
    ]
    return sealed_for_ranks(states[0], values), between_epochs


def _check_can_be_dealt(found: Sequence[AlignerState], config: Mapping[str, Any]) -> None:
    check_same("RankAligner", found, "epoch", "cycle", "step", "emitted", "round", "settings")
    check_between_optimizer_steps(found[0], config)
    if config["uneven"] == "stop" and any(at.last for at in found):
        raise StateError(
            'the last round of an epoch with `uneven="stop"` has begun, which leaves samples out '
            "that some ranks still have: go on with as many ranks as before up to its end."
        )


def check_between_optimizer_steps(
    at: AlignerState, config: Mapping[str, Any], *, out: int = 0, hosted: int = 1
) -> None:
    """Raise a `StateError` within an optimizer step.

    A process that hosts several virtual ranks takes a batch of each, of which `out` are out.
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


# --- within an epoch ------------------------------------------------------------------------------


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
    check_same("WindowBucketer", pools, "mode", "excluded")
    waiting = among(_waiting(found, pools, ranks.before), ranks.after)
    owners = dealt_by_tokens(waiting.tokens, ranks.after)
    records = [waiting.take(np.flatnonzero(owners == rank)) for rank in range(ranks.after)]
    counts = _merged_counts(pools, ranks)
    left_out = [
        one["excluded_samples"] + one["dropped_samples"] + sum(one["skipped_samples"].values())
        for one in counts
    ]
    emitted = sum(pool.pulled for pool in pools) - len(waiting) - sum(left_out)
    done = [*map(sum, zip(ranks.split(emitted), left_out, map(len, records), strict=True))]
    taken = [pool.pulled_since_source for pool in pools]
    reading = Reading(ranks=ranks, taken=taken, taken_of=[{}] * ranks.before, done=done)
    sources = reshard_source([pool.source for pool in pools], reading)
    limits = reduce(Limits.tightened, (Limits(*pool.limits) for pool in pools))
    if agreed := RoundSettings(*found[0].settings).max_tokens:
        limits = limits._replace(tokens=min(agreed, limits.tokens))
    common = replace(
        pools[0],
        pulled_since_source=0,
        ended=False,
        is_cut=False,
        limits=(*limits,),
        has_own_limits=agreed > 0 or any(pool.has_own_limits for pool in pools),
        dearest_groups=max(pool.dearest_groups for pool in pools),
        caps=None,
    )
    values = [
        replace(
            common,
            source=sources[rank],
            pulled=done[rank],
            pool=(to_bits(np.ones(len(own), bool)), to_records(own), None),
            **counts[rank],
        )
        for rank, own in enumerate(records)
    ]
    return sealed_for_ranks(states[0], values)


def _waiting(
    found: Sequence[AlignerState], pools: Sequence[BucketerState], world_size: int
) -> SampleBlock:
    """Return the records of all samples that were read, and are in no step: the oldest first."""
    parts, ages = [], []
    for at, pool in zip(found, pools, strict=True):
        sizes, held_state, _ = at.held or ([0], NO_RECORDS, None)
        bits, pool_state, _ = pool.pool
        held = from_records(held_state)[: sum(sizes[:-1])]  # no filler
        pooled = from_records(pool_state)
        if None in (held_state, pool_state) or are_numbered(held) or are_numbered(pooled):
            raise StateError(
                "the states cannot be resharded within an epoch: the source cannot read samples by "
                'keys that all ranks share, or the pool is saved with `state="payload"`, so no '
                "other rank can make the samples that wait. Go on with as many ranks as before up "
                "to the end of the epoch: a state that is saved after its last step can be "
                "resharded."
            )
        ordinals = from_bits(bits, pool.pulled)
        oldest = pool.pulled - min(ordinals, default=pool.pulled)
        parts += [held, pooled]
        ages += [oldest + np.arange(len(held), 0, -1), pool.pulled - np.array(ordinals)]
    joined = SampleBlock.joined(parts)
    if any(kind.world_size != world_size for kind in joined.kinds):
        raise StateError(
            "the states cannot be resharded within an epoch: each rank has data of its own, which "
            "no other can read. Go on with as many ranks as before up to the end of the epoch."
        )
    return joined.take(np.argsort(-np.concatenate(ages), kind="stable"))


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
    keys = reduce(or_, (ExcludedKeys.from_state(pool.excluded) for pool in pools)).to_state()
    return [
        {
            **{name: sum(getattr(pool, name) for pool in own) for name in names},
            "skipped_samples": dict(sum((Counter(one.skipped_samples) for one in own), Counter())),
            "excluded": keys,
            "left_out": [one for pool in own for one in pool.left_out],
        }
        for own in ranks.dealt(pools)
    ]


# --- between two epochs ---------------------------------------------------------------------------

_SHARE = {"position": 0, "done": 0, "start": 0, "extra": None}
_AT_THE_BEGINNING: Mapping[str, Mapping[str, Any]] = {
    "IterableSource": {"position": 0, "ended": False, "iterable": None, "items_digest": 0},
    "JsonlSource": _SHARE,
    "LengthObserver": {"position": 0},
    "ParallelProcessor": {"taken": 0, "position": 0, "taken_of": {}},
    "ShardedSampler": _SHARE,
    "SourceMixer": {"exhausted": [], "ended": False, "weights": {}, "targets": {}, "had": []},
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


def _pools_anew(states: Sequence[Any], ranks: Ranks) -> list[dict[str, Any]]:
    """Return the states of what is below the aligner where the epoch has ended, or not begun."""
    sources = [_anew(states[rank % ranks.before], rank, ranks) for rank in range(ranks.after)]
    if node_of(states[0]) != "WindowBucketer":
        return sources
    counts = _merged_counts(opened(states, BucketerState), ranks)
    return [source | counts[rank] for rank, source in enumerate(sources)]


def _anew(value: Any, rank: int, ranks: Ranks) -> Any:
    """Return a state with all nodes of this library at the beginning of an epoch."""
    if not isinstance(value, Mapping):
        return copy_state(value)
    state = {key: _anew(one, rank, ranks) for key, one in value.items()}
    node = node_of(value)
    if node:
        state.pop("digest", None)  # of a node below one of torchdata: the loader's will cover it
    state |= copy_state(_AT_THE_BEGINNING.get(node, {}))
    if node == "WindowBucketer":
        is_replay = state["mode"] == "replay"
        state["pool"] = (None, NO_RECORDS, None) if is_replay else (None, None, [])
    if node == "SourceMixer":
        state |= {name: dict.fromkeys(state["sources"], 0) for name in ("samples", "tokens")}
    config: Any = state.get("config")
    if node and config.get("world_size") == ranks.before:  # else its data are the rank's own
        config |= {"rank": rank, "world_size": ranks.after}
    return state
