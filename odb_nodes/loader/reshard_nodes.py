"""Rules: how the states of a node on N ranks become those on M ranks.

All nodes are put to the beginning of an epoch. Between two epochs nothing is left to do. Within
one, a round that is planned ends: the samples that wait, in pools and in planned groups, are dealt
to the pools of the new ranks, and each source is told which of its items no rank has read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import Any, NamedTuple, TypeVar

import numpy as np

from odb_nodes.alignment.aligned_round import ordinals_of
from odb_nodes.alignment.rank_aligner import AlignerState
from odb_nodes.contract import EpochState, NodeState
from odb_nodes.contract.state import DIGEST, unseal
from odb_nodes.errors import StateError
from odb_nodes.nodes.exclusions import ExcludedKeys
from odb_nodes.nodes.group_collator import CollatorState
from odb_nodes.nodes.length_observer import ObserverState
from odb_nodes.nodes.sample_records import NO_RECORDS, among, are_numbered, from_records, to_records
from odb_nodes.nodes.sample_store import from_bits, to_bits
from odb_nodes.nodes.window_bucketer import BucketerState
from odb_nodes.planning.budget import Limits
from odb_nodes.planning.group_planner import RoundSettings
from odb_nodes.processing.parallel_processor import ProcessorState
from odb_nodes.sample_block import SampleBlock
from odb_nodes.sources.sharded_sampler import SamplerState, Share, dealt
from odb_nodes.sources.source_mixer import MixerState

S = TypeVar("S", bound=NodeState)
T = TypeVar("T")
States = Sequence[Any]  # the states of one node, by rank
TakenOf = Mapping[str, tuple[int, int]]
Rule = Callable[[States, States, "Reading"], None]

_OF_A_RANK = ("rank", "world_size")  # what a configuration has that differs between ranks
_RESHARD_BETWEEN_STEPS = (
    "and their gradients are those of other ranks. Reshard a checkpoint that was saved where "
    "`StepInfo.ends_optimizer_step` is True."
)
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

    def redistribute(self, states: Sequence[T]) -> list[Sequence[T]]:
        """Return whose counts each of the ranks that go on takes over."""
        return [states[rank :: self.after] for rank in range(self.after)]


# --- the states of a node on all ranks ------------------------------------------------------------


def node_of(state: Any) -> str:
    """Return the name of the node that has saved a state; "" where it is not sealed."""
    name = state.get("node") if isinstance(state, Mapping) else None
    return name if isinstance(name, str) else ""


def config_of(state: Any) -> Mapping[str, Any]:
    """Return the configuration of the node that has saved a state; none where it is damaged."""
    config = state.get("config") if isinstance(state, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def opened(states: States, declared: type[S]) -> list[S]:
    """Return what the states of a node on all ranks hold, which must be of the same graph."""
    node, first = node_of(states[0]), _common(states[0])
    found = []
    for rank, state in enumerate(states):
        if node_of(state) != node or _common(state) != first:
            raise StateError(
                f"the states of rank 0 and rank {rank} are of different graphs: `{node}` with "
                f"{first}, and `{node_of(state)}` with {_common(state)}. Reshard the states of "
                "one checkpoint."
            )
        found.append(unseal(state, node, declared, config_of(state)))
    return found


def _common(state: Any) -> dict[str, Any]:
    return {name: value for name, value in config_of(state).items() if name not in _OF_A_RANK}


def check_same(node: str, values: Sequence[NodeState], *fields: str) -> None:
    """Raise a `StateError` where a field is another one on another rank."""
    for name in fields:
        first = getattr(values[0], name)
        for rank, one in enumerate(values):
            if (found := getattr(one, name)) != first:
                raise StateError(
                    f"the states of {node} are of different places: `{name}` is {first!r:.80} on "
                    f"rank 0, but {found!r:.80} on rank {rank}. Reshard the states of one "
                    "checkpoint."
                )


# --- at the beginning of an epoch -----------------------------------------------------------------

_SHARE = {"position": 0, "done": 0, "start": 0, "extra": None}
_EPOCH_START: Mapping[str, Mapping[str, Any]] = {
    "IterableSource": {"position": 0, "ended": False, "iterable": None, "items_digest": 0},
    "JsonlSource": _SHARE,
    "LengthObserver": {"position": 0},
    "ParallelProcessor": {"taken": 0, "position": 0, "taken_of": {}},
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
        "dearest_groups": 0,
        "caps": None,
    },
}
"""Node -> fields of its state where nothing of the epoch is read."""


def _at_epoch_start(state: Any, rank: int, ranks: Ranks) -> Any:
    """Return a state of one of the new ranks, with all known nodes at the beginning of an epoch.

    It may share parts with `state`.
    """
    if not isinstance(state, Mapping):
        return state
    new = {key: _at_epoch_start(one, rank, ranks) for key, one in state.items()}
    if not (node := node_of(state)):
        return new
    new.pop(DIGEST, None)  # of a node below one of torchdata: the loader's will cover it
    new |= _EPOCH_START.get(node, {})
    if node == "WindowBucketer":
        is_replay = new["mode"] == "replay"
        new["held"] = (0, None, None, *((NO_RECORDS, None) if is_replay else (None, [])))
    if node == "SourceMixer":
        new |= {name: dict.fromkeys(new["sources"], 0) for name in ("samples", "tokens")}
    config = new["config"]
    if config.get("world_size") == ranks.before:  # else its data are the rank's own
        config |= {"rank": rank, "world_size": ranks.after}
    return new


# --- within an epoch: from the last node to the sources -------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How far all ranks have read a source, and how much of that is whose from now on."""

    ranks: Ranks
    taken: Sequence[int]  # of each rank, items that were read after the state of the source
    taken_of: Sequence[TakenOf]  # the same by source, where these have names; see `ProcessorState`
    done: Sequence[int]
    """Of each rank that goes on, samples of the epoch that it stands for already."""


def reshard_graph(states: States, ranks: Ranks, *, left: bool) -> tuple[list[Any], bool]:
    """Return the states of a graph, and whether they stand between two epochs.

    `left`: the epoch was left, so that the next one follows.
    """
    new = [_at_epoch_start(states[rank % ranks.before], rank, ranks) for rank in range(ranks.after)]
    return new, _reshard_batches(states, new, ranks, left)


def _reshard_batches(states: States, new: States, ranks: Ranks, left: bool) -> bool:
    if node_of(states[0]) == "RankAligner":
        return _reshard_aligner(states, new, ranks, left)
    found = opened(states, CollatorState)
    between_epochs = _reshard_batches(*_sources(found, new), ranks, left)
    if not between_epochs:
        check_same("GroupCollator", found, "step")
    for state, samples in zip(new, ranks.split(sum(one.samples for one in found)), strict=True):
        state["samples"] = samples
    return between_epochs


def _sources(found: Sequence[Any], new: States) -> tuple[list[Any], list[Any]]:
    return [one.source for one in found], [one["source"] for one in new]


def _reshard_aligner(states: States, new: States, ranks: Ranks, left: bool) -> bool:
    """Let the round end. Tell whether the states stand between two epochs."""
    found = opened(states, AlignerState)
    at_end = left or all(at.is_at_end for at in found)
    between_epochs = at_end or not any(at.step or at.round or at.groups[0] for at in found)
    asked = [at.requested_max_tokens for at in found if at.requested_max_tokens]
    changes: dict[str, Any] = {
        "started": any(at.started for at in found),
        "requested_max_tokens": min(asked, default=0),
        "last": at_end,
    }
    sources, new_sources = _sources(found, new)
    if between_epochs:
        check_same("RankAligner", found, "epoch", "cycle")
        if node_of(sources[0]) == "WindowBucketer":
            _put_counts(opened(sources, BucketerState), new_sources, ranks)
    else:
        _check_can_be_dealt(found, states[0]["config"])
        _reshard_pool(found, new_sources, ranks)
        check_same("RankAligner", found, "totals_digest")  # last: other errors say what differs
        settings = RoundSettings(*found[0].settings)
        is_last = settings.is_last and ranks.after > 1
        changes["settings"] = settings._replace(caps=(), is_last=is_last).to_state()
    for state, own in zip(new, ranks.redistribute(found), strict=True):
        state |= changes
        state["left_out"] = [one for at in own for one in at.left_out]
        state["unemitted_samples"] = sum(at.unemitted_samples for at in own)
    return between_epochs


def _check_can_be_dealt(found: Sequence[AlignerState], config: Mapping[str, Any]) -> None:
    check_same("RankAligner", found, "epoch", "cycle", "step", "emitted", "round", "settings")
    check_between_optimizer_steps(found[0], config)
    if config["uneven"] == "stop" and any(at.last for at in found):
        raise StateError(
            'the last round of an epoch with `uneven="stop"` has begun, which leaves samples out '
            "that some ranks still have: go on with as many ranks as before up to its end."
        )


def check_between_optimizer_steps(
    at: AlignerState,
    config: Mapping[str, Any],
    advice: str = _RESHARD_BETWEEN_STEPS,
    *,
    out: int = 0,
    hosted: int = 1,
) -> None:
    """Raise a `StateError` within an optimizer step.

    A process that hosts several virtual ranks takes a batch of each, of which `out` are out.
    """
    accumulate = config["accumulate"]
    inside = at.emitted % accumulate
    if (inside or out) and not at.is_at_end:
        done, what = inside * hosted + out, "batches" if hosted > 1 else "steps"
        raise StateError(
            f"the loader stands at step {at.step} of epoch {at.epoch}, within an optimizer step of "
            f"{accumulate * hosted} {what}, of which {done} are done, {advice}"
        )


def _reshard_pool(found: Sequence[AlignerState], new: States, ranks: Ranks) -> None:
    """Put all samples that are read, and are in no step, into the pools of the new ranks."""
    states = [at.source for at in found]
    if (node := node_of(states[0])) != "WindowBucketer":
        raise StateError(
            f"states can be resharded within an epoch where the `WindowBucketer` is right below "
            f"the `RankAligner`, but there is {f'a `{node}`' if node else 'another node'}, which "
            "may hold samples. Reshard a state that was saved after the last step of an epoch."
        )
    pools = opened(states, BucketerState)
    check_same("WindowBucketer", pools, "mode", "excluded")
    waiting = among(_waiting(found, pools), ranks.after)
    owners = dealt_by_tokens(waiting.tokens, ranks.after)
    records = [waiting.take(np.flatnonzero(owners == rank)) for rank in range(ranks.after)]
    left_out = _put_counts(pools, new, ranks)
    emitted = sum(pool.pulled for pool in pools) - len(waiting) - sum(left_out)
    done = [*map(sum, zip(ranks.split(emitted), left_out, map(len, records), strict=True))]
    taken = [pool.pulled_since_source for pool in pools]
    reading = Reading(ranks=ranks, taken=taken, taken_of=[{}] * ranks.before, done=done)
    _reshard_source(*_sources(pools, new), reading)
    limits = reduce(Limits.tightened, (Limits(*pool.limits) for pool in pools))
    if agreed := RoundSettings(*found[0].settings).max_tokens:
        limits = limits._replace(tokens=min(agreed, limits.tokens))
    for state, own, pulled in zip(new, records, done, strict=True):
        ordinals = np.arange(pulled - len(own), pulled)
        state |= {
            "pulled": pulled,
            "held": (*to_bits(ordinals, ordinals), to_records(own), None),
            "limits": (*limits,),
            "has_own_limits": agreed > 0 or any(pool.has_own_limits for pool in pools),
            "dearest_groups": max(pool.dearest_groups for pool in pools),
            "window": pools[0].window,
        }


def _waiting(found: Sequence[AlignerState], pools: Sequence[BucketerState]) -> SampleBlock:
    """Return the records of all samples that were read, and are in no step: the oldest first."""
    parts, ages = [], []
    for at, pool in zip(found, pools, strict=True):
        *_, records_state, payload = pool.held
        records = from_records(records_state)
        if payload is not None or are_numbered(records):
            if pool.mode == "replay":
                _check_known(pool.source)
            raise StateError(
                "the states cannot be resharded within an epoch: the source cannot read samples by "
                'keys that all ranks share, or the pool is saved with `state="payload"`, so no '
                f"other rank can make the samples that wait. {_AFTER_THE_LAST}"
            )
        held, pooled = from_bits(pool.held)
        waits = np.isin(held, np.concatenate([pooled, *ordinals_of(at.groups)]))  # no filler
        parts.append(records.take(np.flatnonzero(waits)))
        ages.append(pool.pulled - held[waits])
    return SampleBlock.joined(parts).take(np.argsort(-np.concatenate(ages), kind="stable"))


def dealt_by_tokens(tokens: np.ndarray[Any, Any], world_size: int) -> np.ndarray[Any, Any]:
    """Return to which rank each sample goes, (n,): as many to each, and about as many tokens.

    From the longest on, they are dealt to and fro: to ranks 0, 1, 2, 2, 1, 0, 0, ...
    """
    turn, place = np.divmod(np.arange(len(tokens)), world_size)
    to_and_fro = np.where(turn % 2, world_size - 1 - place, place)
    owners = np.empty(len(tokens), np.int64)
    owners[np.argsort(-tokens, kind="stable")] = to_and_fro
    return owners


def _put_counts(pools: Sequence[BucketerState], new: States, ranks: Ranks) -> list[int]:
    """Count what was left out on one of the new ranks each; return how many samples each counts."""
    keys = reduce(or_, (ExcludedKeys.from_state(pool.excluded) for pool in pools)).to_state()
    totals = []
    for state, own in zip(new, ranks.redistribute(pools), strict=True):
        skipped = sum((Counter(pool.skipped_samples) for pool in own), Counter[str]())
        for name in ("excluded_samples", "dropped_samples", "oversize_samples"):
            state[name] = sum(getattr(pool, name) for pool in own)
        state["skipped_samples"], state["excluded"] = dict(skipped), keys
        state["left_out"] = [one for pool in own for one in pool.left_out]
        totals.append(state["excluded_samples"] + state["dropped_samples"] + skipped.total())
    return totals


# --- what is left of the data, source by source ---------------------------------------------------


def _reshard_source(states: States, new: States, reading: Reading) -> None:
    """Tell a source on the new ranks which of its items no rank has read."""
    rule = _rule_of(states[0])
    node = node_of(states[0])
    before, configs = reading.ranks.before, [*map(config_of, states)]
    if "world_size" in configs[0] and any(one.get("world_size") != before for one in configs):
        raise StateError(
            f"`{node}` cannot be resharded within an epoch: each rank has data of its own, which "
            f"no other can read. {_UP_TO_THE_END}."
        )
    rule(states, new, reading)


def _rule_of(state: Any) -> Rule:
    """Return the rule of a node; raise a `StateError` where there is none."""
    if (rule := _RULES.get(node := node_of(state))) is not None:
        return rule
    raise StateError(
        f"{f'`{node}`' if node else 'a node without a sealed state'} cannot be resharded within "
        "an epoch: its state does not say which items no rank has read, by numbers that all ranks "
        f"share. What is done in `process_fn` instead moves with its sample. {_AFTER_THE_LAST}"
    )


def _check_known(state: Any) -> None:
    """Raise a `StateError` where a node, or one below it, has no rule."""
    _rule_of(state)
    for source in [state["source"]] if "source" in state else state.get("sources", {}).values():
        _check_known(source)


def _observer(states: States, new: States, reading: Reading) -> None:
    _reshard_source(*_sources(opened(states, ObserverState), new), reading)
    for state, done in zip(new, reading.done, strict=True):
        state["position"] = done


def _processor(states: States, new: States, reading: Reading) -> None:
    found = opened(states, ProcessorState)
    started = _started("ParallelProcessor", found, "epoch")
    taken = [one.taken + more for one, more in zip(found, reading.taken, strict=True)]
    below = replace(reading, taken=taken, taken_of=[one.taken_of for one in found])
    _reshard_source(*_sources(found, new), below)
    for state, done in zip(new, reading.done, strict=True):
        state |= {"started": started, "position": done}


def _sampler(states: States, new: States, reading: Reading) -> None:
    found, ranks = opened(states, SamplerState), reading.ranks
    started = _started(node_of(states[0]), found, "epoch", "start")
    left = [
        Share(rank, ranks.before, one).after(one.position + taken)
        for rank, (one, taken) in enumerate(zip(found, reading.taken, strict=True))
    ]
    shares = dealt(left, ranks.after, states[0]["config"]["size"])
    for state, share, done in zip(new, shares, reading.done, strict=True):
        state |= {"started": started, "position": done, "done": done}
        state |= {"start": share.start, "extra": share.extra}


def _mixer(states: States, new: States, reading: Reading) -> None:
    found, ranks, config = opened(states, MixerState), reading.ranks, states[0]["config"]
    taken_of = [_taken_by_source(rank, at, reading) for rank, at in enumerate(found)]
    for at, of in zip(found, taken_of, strict=True):
        at.samples = {name: count + of[name] for name, count in at.samples.items()}
    done, names = _done_by_source(found, reading), [*found[0].sources]
    for name in names:
        below = replace(
            reading,
            taken=[of[name] for of in taken_of],
            taken_of=[_within(name, of) for of in reading.taken_of],
            done=done[name],
        )
        sources = [at.sources[name] for at in found], [one["sources"][name] for one in new]
        try:
            _reshard_source(*sources, below)
        except StateError as error:
            raise StateError(f"source {name!r}: {error}") from error
    is_over = any if config["stop"] == "first_exhausted" else all
    farthest_back = min(found, key=lambda at: sum(getattr(at, config["by"]).values()))
    for state in new:
        state |= {
            "exhausted": [
                one for one in found[0].exhausted if all(one in at.exhausted for at in found)
            ],
            "ended": is_over(at.ended for at in found),
            "weights": farthest_back.weights,
            "targets": {
                name: sum(at.targets[name] for at in found) / ranks.after
                for name in found[0].targets
            },
            "had": [one for one in names if any(at.samples[one] or one in at.had for at in found)],
        }
    for field in ("samples", "tokens"):
        for name in names:
            parts = ranks.split(sum(getattr(at, field)[name] for at in found))
            for state, part in zip(new, parts, strict=True):
                state[field][name] = part


def _started(node: str, found: Sequence[EpochState], *alike: str) -> bool:
    """Check that all ranks read the data of a source for the same time; tell whether they do."""
    cycles = [at.cycle for at in found]
    if (most := max(cycles)) > min(cycles):
        raise StateError(
            f"`{node}` has begun again on rank {cycles.index(most)}, which is exhausted (`stop` is "
            f'"cycle"), but not yet on rank {cycles.index(min(cycles))}. {_LATER}'
        )
    check_same(node, found, *alike)
    return any(at.started for at in found)


def _taken_by_source(rank: int, at: MixerState, reading: Reading) -> Counter[str]:
    """Return how many items of each source a rank has read after the state of a mixture."""
    taken, of = reading.taken[rank], reading.taken_of[rank]
    found: Counter[str] = Counter()
    for key, (count, cycle) in of.items():
        name = max((one for one in at.sources if f"{key}/".startswith(f"{one}/")), key=len)
        found[name] += count
        if at.sources[name].get("cycle", cycle) != cycle:
            raise StateError(
                f"source {name!r} has just begun again on rank {rank}, which the state does not "
                f"say yet. {_LATER}"
            )
    if sum(found.values()) != taken:
        raise StateError(
            f"the state of `SourceMixer` on rank {rank} stands {taken} samples before the place "
            f"that it was saved at, and the sources of only {sum(found.values())} are known. "
            f"{_LATER}"
        )
    return found


def _within(name: str, taken_of: TakenOf) -> TakenOf:
    """Return the counts of the sources within one that is a mixture itself."""
    inner = f"{name}/"
    return {
        key.removeprefix(inner): count for key, count in taken_of.items() if key.startswith(inner)
    }


def _done_by_source(found: Sequence[MixerState], reading: Reading) -> dict[str, list[int]]:
    """Return what the ranks stand for of each source: together what they stand for of all.

    Sources and ranks are laid along one line: a rank stands for what lies beside it.
    """
    totals = {name: sum(at.samples[name] for at in found) for name in found[0].samples}
    skipped = sum(reading.done) - sum(totals.values())  # which a mixture does not count
    totals[max(totals, key=lambda name: totals[name])] += skipped
    of_sources = [0, *accumulate(totals.values())]
    of_ranks = [0, *accumulate(reading.done)]
    return {
        name: [max(0, min(stop, last) - max(start, first)) for start, stop in pairwise(of_ranks)]
        for name, (first, last) in zip(totals, pairwise(of_sources), strict=True)
    }


_RULES: Mapping[str, Rule] = {
    "LengthObserver": _observer,
    "ParallelProcessor": _processor,
    "ShardedSampler": _sampler,
    "JsonlSource": _sampler,
    "SourceMixer": _mixer,
}
