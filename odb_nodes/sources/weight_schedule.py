"""Weights of a mixture that change at places of an epoch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

from odb_nodes._core.checks import MAX_KEY, check_bool, check_count, check_type

Shares = Mapping[str, float]
"""Name of a source -> its share; the shares add up to 1."""


@dataclass(frozen=True)
class WeightSchedule:
    """Weights of the sources of a mixture that change within an epoch.

    Args:
        places: (place, weights) pairs, the first at 0. A place is what all ranks have drawn in the
            epoch when its weights begin: a number of samples, or of tokens where `by="tokens"`.
            Weights are a dict by name of the source; 0 turns a source off.
        ramp: whether shares change in a straight line from one place to the next, not at once.

    Raises:
        TypeError, ValueError: a place or a weight is not valid, places do not grow, or they have
            weights of different names.
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
                    f"{place} has those of {sorted(weights)}. Give a source that is off 0."
                )
        for name in names:
            if not any(weights[name] for _, weights in places):
                raise ValueError(
                    f"`places` must turn each source on somewhere, but {name!r} is always 0. Leave "
                    "it out of the mixture."
                )
        kept = tuple((place, _shares(weights)) for place, weights in places)
        object.__setattr__(self, "places", kept)

    @property
    def names(self) -> list[str]:
        """The names of the sources."""
        return [*self.places[0][1]]

    @property
    def off_at_the_end(self) -> list[str]:
        """The sources whose last weight is 0."""
        return [name for name, share in self.places[-1][1].items() if not share]

    def at(self, drawn: int, left: Collection[str]) -> Shares:
        """Return the shares of the sources at a place, one of which has a share above 0.

        Where no source that is left is on, these are the shares of the next place where one is.

        Args:
            drawn: the samples or tokens that all ranks have drawn.
            left: the sources that have items left.

        Raises:
            ValueError: none of them is on any more.
        """
        begun = bisect_right(self.places, drawn, key=lambda one: one[0]) - 1
        shares = self._between(begun, drawn)
        for _, later in self.places[begun + 1 :]:
            if any(shares[name] for name in left):
                return shares
            shares = later
        if not any(shares[name] for name in left):
            raise ValueError(f"none of {sorted(left)} is on from place {drawn} to the end.")
        return shares

    def scaled(self, factor: float) -> WeightSchedule:
        """Return the schedule for data of which there is `factor` times as much."""
        places: list[tuple[int, Shares]] = []
        for place, shares in self.places:
            after = places[-1][0] + 1 if places else 0  # Places that would meet stay apart.
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


def check_weight(option: str, weight: Any, *, may_be_off: bool = False) -> None:
    """Raise a `ValueError` unless a weight is a positive number, or 0 where that is allowed."""
    is_number = isinstance(weight, Real) and not isinstance(weight, bool)
    if is_number and math.isfinite(weight) and (weight > 0 or (may_be_off and weight == 0)):
        return
    rule = "0 or a positive number" if may_be_off else "a positive number"
    raise ValueError(f"`{option}` must be {rule}, but is {weight!r} instead.")


def _pairs(places: Any) -> list[tuple[int, Mapping[str, float]]]:
    """Return the pairs of a schedule, each of which is valid alone."""
    check_type("places", places, list | tuple, "Pass a list of (place, weights).")
    for pair in places:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise TypeError(f"`places` must hold pairs (place, weights), but holds {pair!r:.80}.")
        place, weights = pair
        check_count("place", place, 0, MAX_KEY)
        check_type(f"weights at place {place}", weights, Mapping)
        for name, weight in weights.items():
            check_weight(f"weights[{name!r}]` at place `{place}", weight, may_be_off=True)
        if not any(weights.values()):
            raise ValueError(
                f"`places` must have a weight above 0 at each place, but place {place} has "
                f"{dict(weights)!r:.80}."
            )
    return [(check_count("place", place, 0, MAX_KEY), weights) for place, weights in places]


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {name: float(weight / total) for name, weight in weights.items()}
