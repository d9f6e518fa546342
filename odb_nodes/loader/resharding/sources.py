"""Rules: how what is left of the data is dealt to another number of ranks, source by source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from odb_nodes.contract import EpochState
from odb_nodes.errors import StateError
from odb_nodes.loader.resharding.sealed import (
    Ranks,
    check_same,
    config_of,
    node_of,
    opened,
    sealed_for_ranks,
)
from odb_nodes.nodes.length_observer import ObserverState
from odb_nodes.processing.parallel_processor import ProcessorState
from odb_nodes.sources.sharded_sampler import SamplerState, Share, dealt
from odb_nodes.sources.source_mixer import MixerState

TakenOf = Mapping[str, tuple[int, int]]

_LATER = "Go on with as many ranks as before, and reshard a later checkpoint."


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How far all ranks have read a source, and how much of that is whose from now on."""

    ranks: Ranks
    taken: Sequence[int]
    """Of each rank, items that were read after the state of the source."""
    taken_of: Sequence[TakenOf]
    """The same by source, where these have names; see `ProcessorState`."""
    done: Sequence[int]
    """Of each rank that goes on, samples of the epoch that it stands for already."""


def reshard_source(states: Sequence[Any], reading: Reading) -> list[dict[str, Any]]:
    """Return the states of a source of the ranks that go on."""
    node = node_of(states[0])
    rule = _RULES.get(node)
    if rule is None:
        raise StateError(
            f"{f'`{node}`' if node else 'a node without a sealed state'} cannot be resharded "
            "within an epoch: its state does not say which items no rank has read, by numbers "
            "that all ranks share. Go on with as many ranks as before up to the end of the epoch: "
            "a state that is saved after its last step can be resharded."
        )
    before, configs = reading.ranks.before, [*map(config_of, states)]
    if "world_size" in configs[0] and any(one.get("world_size") != before for one in configs):
        raise StateError(
            f"`{node}` cannot be resharded within an epoch: each rank has data of its own, which "
            "no other can read. Go on with as many ranks as before up to the end of the epoch."
        )
    return rule(states, reading)


def _observer(states: Sequence[Any], reading: Reading) -> list[Any]:
    found = opened(states, ObserverState)
    sources = reshard_source([one.source for one in found], reading)
    values = [
        ObserverState(source=source, position=done)
        for source, done in zip(sources, reading.done, strict=True)
    ]
    return sealed_for_ranks(states[0], values)


def _processor(states: Sequence[Any], reading: Reading) -> list[Any]:
    found = opened(states, ProcessorState)
    _check_cycles("ParallelProcessor", found)
    check_same("ParallelProcessor", found, "epoch")
    taken = [one.taken + more for one, more in zip(found, reading.taken, strict=True)]
    below = replace(reading, taken=taken, taken_of=[one.taken_of for one in found])
    sources = reshard_source([one.source for one in found], below)
    started = any(one.started for one in found)
    common = replace(found[0], started=started, taken=0, taken_of={})
    values = [
        replace(common, source=source, position=done)
        for source, done in zip(sources, reading.done, strict=True)
    ]
    return sealed_for_ranks(states[0], values)


def _sampler(states: Sequence[Any], reading: Reading) -> list[Any]:
    found, ranks = opened(states, SamplerState), reading.ranks
    node = node_of(states[0])  # which may be one that is derived from it
    _check_cycles(node, found)
    check_same(node, found, "epoch", "start")
    left = [
        Share(rank, ranks.before, one).after(one.position + taken)
        for rank, (one, taken) in enumerate(zip(found, reading.taken, strict=True))
    ]
    common = replace(found[0], started=any(one.started for one in found))
    shares = dealt(left, ranks.after, states[0]["config"]["size"])
    values = [
        replace(common, position=done, done=done, start=share.start, extra=share.extra)
        for share, done in zip(shares, reading.done, strict=True)
    ]
    return sealed_for_ranks(states[0], values)


def _mixer(states: Sequence[Any], reading: Reading) -> list[Any]:
    found, ranks, config = opened(states, MixerState), reading.ranks, states[0]["config"]
    taken_of = [_taken_by_source(rank, at, reading) for rank, at in enumerate(found)]
    for at, of in zip(found, taken_of, strict=True):
        at.samples = {name: count + of[name] for name, count in at.samples.items()}
    done = _done_by_source(found, reading)
    sources: dict[str, list[Any]] = {}
    for name in found[0].sources:
        below = replace(
            reading,
            taken=[of[name] for of in taken_of],
            taken_of=[_within(name, of) for of in reading.taken_of],
            done=done[name],
        )
        try:
            sources[name] = reshard_source([at.sources[name] for at in found], below)
        except StateError as error:
            raise StateError(f"source {name!r}: {error}") from error

    def shares(field: str) -> list[dict[str, int]]:
        parts = {
            name: ranks.split(sum(getattr(at, field)[name] for at in found)) for name in sources
        }
        return [{name: of[rank] for name, of in parts.items()} for rank in range(ranks.after)]

    is_over = any if config["stop"] == "first_exhausted" else all
    farthest_back = min(found, key=lambda at: sum(getattr(at, config["by"]).values()))
    values = [
        MixerState(
            sources={name: of[rank] for name, of in sources.items()},
            samples=samples,
            tokens=tokens,
            exhausted=[
                name for name in found[0].exhausted if all(name in at.exhausted for at in found)
            ],
            ended=is_over(at.ended for at in found),
            weights=farthest_back.weights,
            targets={
                name: sum(at.targets[name] for at in found) / ranks.after
                for name in found[0].targets
            },
            had=[n for n in sources if any(at.samples[n] or n in at.had for at in found)],
        )
        for rank, (samples, tokens) in enumerate(
            zip(shares("samples"), shares("tokens"), strict=True)
        )
    ]
    return sealed_for_ranks(states[0], values)


def _check_cycles(node: str, found: Sequence[EpochState]) -> None:
    """Check that all ranks read the data for the same time in the epoch."""
    cycles = [at.cycle for at in found]
    if (most := max(cycles)) > min(cycles):
        raise StateError(
            f"`{node}` has begun again on rank {cycles.index(most)}, which is exhausted (`stop` is "
            f'"cycle"), but not yet on rank {cycles.index(min(cycles))}. {_LATER}'
        )


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


_Rule = Callable[[Sequence[Any], Reading], list[Any]]
_RULES: Mapping[str, _Rule] = {
    "LengthObserver": _observer,
    "ParallelProcessor": _processor,
    "ShardedSampler": _sampler,
    "JsonlSource": _sampler,
    "SourceMixer": _mixer,
}
