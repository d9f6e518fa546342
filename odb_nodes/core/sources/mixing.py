"""How sources are mixed: weights of samples or tokens, and schedules of weights."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, get_args

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import MAX_KEY, check_bool, check_choice, check_count, check_type

Stop = Literal["first_exhausted", "all_exhausted", "cycle"]
Unit = Literal["samples", "tokens"]
Shares = Mapping[str, float]  # name of a source -> its share; the shares add up to 1


@dataclass(frozen=True)
class WeightSchedule:
    """Weights of the sources of a mixture that change within an epoch.

    Args:
        places: (place, weights) pairs, the first at place 0. The weights apply from when all ranks
            together have drawn so many samples of the epoch (tokens, if `by="tokens"`). Weights
            are a dict by name of the source; 0 turns a source off.
        ramp: whether shares change linearly from one place to the next instead of at once.

    Raises:
        TypeError, ValueError: a place or a weight is not valid, places do not increase, or names
            differ between places.
    """

    places: Sequence[tuple[int, Mapping[str, float]]]
    ramp: bool = False

    def __post_init__(self) -> None:
        check_bool("ramp", self.ramp)
        places = [*_pairs(self.places)]
        if not places or places[0][0] != 0:
            raise ValueError(
                f"`places` must begin at 0, but begin at {places[0][0] if places else 'none'} "
                "instead. Add the weights that an epoch begins with."
            )
        names = places[0][1].keys()
        for (before, _), (place, weights) in pairwise(places):
            if place <= before:
                raise ValueError(
                    f"`places` must grow, but {place} comes after {before}. Sort them, and give "
                    "each place once."
                )
            if weights.keys() != names:
                raise ValueError(
                    f"`places` must have weights of the same sources, {sorted(names)}, but place "
                    f"{place} has weights of {sorted(weights)}. Give a source that is off 0."
                )
        for name in names:
            if not any(weights[name] for _, weights in places):
                raise ValueError(
                    f"`places` must turn each source on somewhere, but {name!r} is always 0. Leave "
                    "it out of the mixture."
                )
        kept = tuple((place, _shares(weights)) for place, weights in places)
        object.__setattr__(self, "places", kept)

    def at(self, drawn: int, remaining: Collection[str]) -> Shares:
        """Return the shares at a place, or at the next place where a remaining source is on."""
        begun = bisect_right(self.places, drawn, key=lambda entry: entry[0]) - 1
        later = (shares for _, shares in self.places[begun + 1 :])
        for shares in (self._between(begun, drawn), *later):
            if any(shares[name] for name in remaining):
                return shares
        raise ValueError(f"none of {sorted(remaining)} is on from place {drawn} to the end.")

    def scaled(self, factor: float) -> WeightSchedule:
        """Return the schedule for `factor` times as much data."""
        places: list[tuple[int, Shares]] = []
        for place, shares in self.places:
            after = places[-1][0] + 1 if places else 0  # keeps the places different
            places.append((max(round(place * factor), after), shares))
        return WeightSchedule(tuple(places), self.ramp)

    def fingerprint(self) -> list[Any]:
        """Return what decides the draws, as plain data."""
        return [
            [place, {name: round(share, 9) for name, share in shares.items()}]
            for place, shares in self.places
        ]

    def _between(self, begun: int, drawn: int) -> Shares:
        place, shares = self.places[begun]
        if not self.ramp or begun + 1 == len(self.places):
            return shares
        stop, later = self.places[begun + 1]
        done = (drawn - place) / (stop - place)
        return {name: share + (later[name] - share) * done for name, share in shares.items()}


_MAX_WEIGHT = 1e100  # so that no sum of weights, nor a product with tokens, is infinite

Weights = Mapping[str, float] | WeightSchedule | Literal["proportional"] | None


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How an `ODBDataLoader` mixes its datasets; see `SourceMixer`.

    Args:
        weights: name -> weight, any positive numbers; `"proportional"` to the number of samples of
            each dataset; or a `WeightSchedule`. Default: equal.
        by: what the weights are shares of, `"samples"` or `"tokens"`.
        stop: when the epoch ends: `"first_exhausted"`, `"all_exhausted"` or `"cycle"`.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    weights: Weights = None
    by: Unit = "samples"
    stop: Stop = "all_exhausted"

    def __post_init__(self) -> None:
        check_rules(self.by, self.stop)

    def scaled(self, factor: float) -> Mixing:
        """Return the mixing of `factor` times as much data."""
        if isinstance(self.weights, WeightSchedule) and factor != 1:
            return replace(self, weights=self.weights.scaled(factor))
        return self

    @classmethod
    def of(cls, weights: Weights | Mixing) -> Mixing:
        """Return `weights` as a `Mixing`."""
        return weights if isinstance(weights, cls) else cls(weights=weights)  # type: ignore[arg-type]


class WeightedRoundRobin:
    """Chooses among sources by weights, which may change.

    Each source has a target: the count that it should have had when the weights last changed. The
    count since then is compared with the weight. So a source that was an item behind or ahead at
    the change catches up, and shares do not drift however often the weights change.
    """

    def __init__(
        self, weights: Mapping[str, float], targets: Mapping[str, float] | None = None
    ) -> None:
        self.weights = weights
        """The present weights. Shared: do not change them."""
        self.targets = dict(targets or dict.fromkeys(weights, 0.0))
        """The count that each source should have had at the last change."""

    def first(self, names: Sequence[str], had: Mapping[str, int]) -> str:
        """Return the next source; of equals, the first."""
        weights, targets = self.weights, self.targets
        on = [name for name in names if weights[name]]
        return min(on, key=lambda name: (had[name] - targets[name]) / weights[name])

    def turn_to(
        self, weights: Mapping[str, float], names: Sequence[str], had: Mapping[str, int]
    ) -> None:
        """Choose by these weights from now on."""
        if weights is self.weights or weights == self.weights:
            return
        targets = self.targets
        on = [name for name in names if self.weights[name]]
        if on:
            since = sum(had[name] - targets[name] for name in on)
            rounds = since / sum(self.weights[name] for name in on)
            targets = targets | {name: targets[name] + self.weights[name] * rounds for name in on}
        self.weights, self.targets = weights, targets


def check_rules(by: Unit, stop: Stop) -> None:
    """Raise a `ValueError` for an invalid `by` or `stop`."""
    check_choice("by", by, get_args(Unit))
    check_choice("stop", stop, get_args(Stop))


def checked_weights(
    weights: Mapping[str, float], sources: Mapping[str, BaseNode[Any]]
) -> dict[str, float]:
    """Return the weights in the order of the sources; raise an error if one is invalid."""
    check_same_names("weights", weights, "sources", sources)
    for name, weight in weights.items():
        _check_weight(f"weights[{name!r}]", weight)
    return {name: float(weights[name]) for name in sources}


def check_schedule(schedule: WeightSchedule, sources: Mapping[str, Any], stop: Stop) -> None:
    """Raise a `ValueError` unless a schedule has these sources, and lets an epoch end."""
    last = schedule.places[-1][1]
    check_same_names("weights", last, "sources", sources)
    off = [name for name, share in last.items() if not share]
    if stop != "first_exhausted" and off:
        raise ValueError(
            f'`weights` must turn all sources on at the last place where `stop` is "{stop}", but '
            f"{off} are off there, and would never be exhausted. Give them a small weight, or let "
            '`stop` be "first_exhausted".'
        )


def check_same_names(
    option: str, values: Mapping[str, Any], option_of_sources: str, sources: Mapping[str, Any]
) -> None:
    """Raise unless `values` has an entry for every source, and no other."""
    if not isinstance(values, Mapping):
        raise TypeError(f"`{option}` must be a dict by name of the source, but is {values!r}.")
    if values.keys() != sources.keys():
        raise ValueError(
            f"`{option}` must have the names of `{option_of_sources}`, {sorted(sources)}, but has "
            f"{sorted(values)} instead."
        )


def _check_weight(option: str, weight: Any, *, may_be_off: bool = False) -> None:
    """Raise a `ValueError` unless a weight is a positive number, or 0 where that is allowed."""
    is_number = isinstance(weight, Real) and not isinstance(weight, bool)
    try:
        value = float(weight) if is_number else math.nan
    except OverflowError:
        value = math.inf
    if 0 < value <= _MAX_WEIGHT or (may_be_off and value == 0):
        return
    rule = "0 or a positive number" if may_be_off else "a positive number"
    raise ValueError(
        f"`{option}` must be {rule} up to {_MAX_WEIGHT:g}, but is {weight!r:.80} instead."
    )


def _pairs(places: Any) -> list[tuple[int, Mapping[str, float]]]:
    """Return the (place, weights) pairs of a schedule, each checked alone."""
    check_type("places", places, list | tuple, "Pass a list of (place, weights).")
    pairs = []
    for pair in places:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise TypeError(f"`places` must hold pairs (place, weights), but holds {pair!r:.80}.")
        place, weights = pair
        pairs.append((check_count("place", place, 0, MAX_KEY), weights))
        check_type(f"weights at place {place}", weights, Mapping)
        for name, weight in weights.items():
            _check_weight(f"weights[{name!r}]` at place `{place}", weight, may_be_off=True)
        if not any(weights.values()):
            raise ValueError(
                f"`places` must have a weight above 0 at each place, but place {place} has "
                f"{dict(weights)!r:.80}."
            )
    return pairs


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {name: float(weight / total) for name, weight in weights.items()}
