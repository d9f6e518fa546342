"""How sources are mixed: their weights, and what these are shares of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_choice
from odb_nodes.sources.weight_schedule import WeightSchedule, check_weight

Stop = Literal["first_exhausted", "all_exhausted", "cycle"]
Unit = Literal["samples", "tokens"]
Weights = Mapping[str, float] | WeightSchedule | Literal["proportional"] | None


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How an `ODBDataLoader` mixes its datasets; see `SourceMixer`.

    Args:
        weights: name -> weight, any positive numbers; or `"proportional"` to the number of samples
            of each dataset; or a `WeightSchedule`. Default: equal.
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
        """Return how datasets are mixed of which there is `factor` times as much."""
        if isinstance(self.weights, WeightSchedule) and factor != 1:
            return replace(self, weights=self.weights.scaled(factor))
        return self

    @classmethod
    def of(cls, weights: Weights | Mixing) -> Mixing:
        """Return `weights` itself, or what says no more than them."""
        return weights if isinstance(weights, cls) else cls(weights=weights)  # type: ignore[arg-type]


def check_rules(by: Unit, stop: Stop) -> None:
    """Raise a `ValueError` for what is no rule of a `SourceMixer`."""
    check_choice("by", by, get_args(Unit))
    check_choice("stop", stop, get_args(Stop))


def checked_weights(
    weights: Mapping[str, float], sources: Mapping[str, BaseNode[Any]]
) -> dict[str, float]:
    """Return the weights of sources in their order, once they are known to be valid."""
    check_names("weights", weights, "sources", sources)
    for name, weight in weights.items():
        check_weight(f"weights[{name!r}]", weight)
    return {name: float(weights[name]) for name in sources}


def check_schedule(schedule: WeightSchedule, sources: Mapping[str, Any], stop: Stop) -> None:
    """Raise a `ValueError` unless a schedule is of these sources, and lets an epoch end."""
    check_names("weights", dict.fromkeys(schedule.names), "sources", sources)
    if stop != "first_exhausted" and (off := schedule.off_at_the_end):
        raise ValueError(
            f'`weights` must turn all sources on at the last place where `stop` is "{stop}", but '
            f"{off} are off there, and would never be exhausted. Give them a small weight, or let "
            '`stop` be "first_exhausted".'
        )


def check_names(option: str, given: Mapping[str, Any], of: str, sources: Mapping[str, Any]) -> None:
    """Raise unless `given` has something for every source, and for no other."""
    if not isinstance(given, Mapping):
        raise TypeError(f"`{option}` must be a dict by name of the source, but is {given!r}.")
    if given.keys() != sources.keys():
        raise ValueError(
            f"`{option}` must have the names of `{of}`, {sorted(sources)}, but has "
            f"{sorted(given)} instead."
        )
