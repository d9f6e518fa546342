"""What a run comes to, and its curves, from its records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odb_nodes.ledger import Audit, audit
from odb_nodes.monitor.loss_book import SampleLoss, read_losses, worst_samples
from odb_nodes.monitor.records import FILE, GROUPS, Record, RunRecords
from odb_nodes.monitor.window import Totals

_WORST = 20  # samples
_LONGEST = 60  # characters of a setting


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run comes to.

    Attributes:
        name: of the run.
        records: its records.
        whole: a record of all of its steps, with the groups of values of any record.
        audit: what `odb_nodes.audit` says of the ledger beside the records; None without one.
        worst: the samples with the highest loss, each with its losses in the order of the epochs.
    """

    name: str
    records: RunRecords = field(repr=False)
    whole: dict[str, dict[str, float | None]]
    audit: Audit | None
    worst: list[list[SampleLoss]] = field(repr=False)

    @classmethod
    def of(cls, name: str, records: RunRecords) -> RunSummary:
        """Return what a run comes to."""
        found = _ledger_beside(records.folder)
        return cls(
            name=name,
            records=records,
            whole=_whole(records.steps),
            audit=None if found is None else audit(found),
            worst=worst_samples(read_losses(records.folder), _WORST),
        )

    def stretches(self) -> list[tuple[int, Record]]:
        """Return (first step, attempt) of each attempt that has steps which count."""
        found: list[tuple[int, Record]] = []
        for attempt in self.records.attempts:
            found = [one for one in found if one[0] <= attempt["step"]]
            found.append((attempt["step"] + 1, attempt))
        return found

    @property
    def resumes(self) -> list[int]:
        """The steps after which the run was resumed, or begun again with other settings."""
        return [first - 1 for first, _ in self.stretches()[1:]]

    def ranks(self) -> list[tuple[int, int]]:
        """Return (first step, number of ranks) of each stretch of the run."""
        if found := [(first, int(one["world_size"])) for first, one in self.stretches()]:
            return found
        sums = self.records.steps[-1]["sum"]
        seconds = sums["seconds"]
        return [(1, max(1, round(sums["rank_seconds"] / seconds)) if seconds else 1)]

    def settings(self) -> dict[str, str]:
        """Return what the run was made with, by name: where that has changed, by stretch."""
        stretches, found = self.stretches(), {}
        for group in ("loader", "config", "versions"):
            for name in dict.fromkeys(name for _, one in stretches for name in one.get(group, {})):
                values = [(first, one.get(group, {}).get(name)) for first, one in stretches]
                label = {"config": f"{name} (config)", "versions": f"version of {name}"}
                found[label.get(group, name)] = _by_stretch(values)
        return found

    def facts(self) -> dict[str, float | str | None]:
        """Return the figures of the run by name, for a table; None where one is not known."""
        whole, steps = self.whole, self.records.steps
        mean, sums, peak = whole["mean"], whole["sum"], whole["peak"]
        memory = peak.get("memory_allocated_bytes")
        lrs = [lr for one in steps if (lr := one["last"].get("lr")) is not None]
        ranks = self.ranks()
        return {
            "optimizer steps": sums["optimizer_steps"],
            "epochs": len(self.records.epochs),
            "times begun or resumed": len(self.records.attempts),
            "resumed after step": ", ".join(map(str, self.resumes)) or None,
            "ranks": ranks[0][1] if len({one for _, one in ranks}) == 1 else _by_stretch(ranks),
            "training time, s": sums["seconds"],
            "samples": sums["samples"],
            "tokens": sums["tokens"],
            "loss, last record": steps[-1]["mean"].get("loss"),
            "highest learning rate": max(lrs, default=None),
            "records with a loss that is not finite": sum(
                "loss" in one["mean"] and one["mean"]["loss"] is None for one in steps
            ),
            "tokens / s": mean["real_tokens_per_s"],
            "padding share": mean["padding_share"],
            "rank balance": mean["rank_balance"],
            "filler share": mean["filler_share"],
            "share of time waiting for data": mean["data_wait_share"],
            "largest batch, padded tokens": peak.get("padded_tokens"),
            "peak memory, GiB": None if memory is None else memory / 2**30,
            "out of memory, times": sums.get("ooms", 0),
            "samples left out": sums.get("left_out", 0),
        }

    def sources(self) -> dict[str, dict[str, float | None]]:
        """Return samples, tokens, their share, and the mean loss of each task, or source."""
        sums, mean = self.whole["sum"], self.whole["mean"]
        names = [name.partition("/")[2] for name in sums if name.startswith("tokens/")]
        total = sums["tokens"] or 1
        return {
            name: {
                "samples": sums[f"samples/{name}"],
                "tokens": sums[f"tokens/{name}"],
                "share of tokens": (sums[f"tokens/{name}"] or 0) / total,
                "loss": mean.get(f"loss/{name}"),
            }
            for name in sorted(names)
        }

    def curve(self, group: str, name: str) -> list[tuple[float, float]]:
        """Return (optimizer step, value) of each record that has a value."""
        values = ((one["step"], one[group].get(name)) for one in self.records.steps)
        return [(step, value) for step, value in values if value is not None]

    def tokens_at(self, step: int) -> float:
        """Return the tokens of all records up to a step."""
        tokens: float = sum(
            one["sum"]["tokens"] for one in self.records.steps if one["step"] <= step
        )
        return tokens

    def loss_over_tokens(self) -> list[tuple[float, float]]:
        """Return (tokens so far, mean loss) of each record that has one."""
        points, tokens = [], 0.0
        for record in self.records.steps:
            tokens += record["sum"]["tokens"]
            if record["mean"].get("loss") is not None:
                points.append((tokens, record["mean"]["loss"]))
        return points

    def shapes(self) -> dict[tuple[int, int], int]:
        """Return (rows, width) -> how many batches of rank 0 had that shape."""
        found: dict[tuple[int, int], int] = {}
        for record in self.records.steps:
            for shape, count in record["shapes"].items():
                rows, _, width = shape.partition("x")
                key = int(rows), int(width)
                found[key] = found.get(key, 0) + count
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each record as a row of a table, the values by `group.name`."""
        for record in [*self.records.steps, *self.records.epochs]:
            row = {
                name: value
                for name, value in record.items()
                if name not in (*GROUPS, "weight", "shapes")
            }
            for group in GROUPS:
                row |= {f"{group}.{name}": value for name, value in record[group].items()}
            yield {"run": self.name, **row}


def thinned(points: Sequence[tuple[float, float]], bins: int) -> list[tuple[float, float]]:
    """Return the lowest and the highest point of each part of a curve, so that no peak is lost."""
    if len(points) <= 2 * bins:
        return [*points]
    kept = []
    for number in range(bins):
        part = points[number * len(points) // bins : (number + 1) * len(points) // bins]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _whole(steps: Sequence[Record]) -> dict[str, dict[str, float | None]]:
    """Return the groups of values of all steps together.

    A mean of a record is weighed by what it is a mean over; what is not known of one record is not
    known of all.
    """
    total = Totals()
    for record in steps:
        known = {name: _known(record[name]) for name in GROUPS}
        means, sums = known["mean"], known["sum"]
        weights = record.get("weight") or {
            name: _weight_of(name, sums) for name in means if _is_weighed(name)
        }
        totals = {name: means[name] * weight for name, weight in weights.items() if weight}
        total.add(
            Totals(
                sums=sums,
                totals=totals,
                weights={name: weights[name] for name in totals},
                peaks=known["peak"],
                last=known["last"],
            )
        )
    return total.groups()


def _by_stretch(values: Sequence[tuple[int, Any]]) -> str:
    """Return (first step, value) of the stretches of a run as text; a value that stays, once."""
    (_, last), *later = values
    text = _as_text(last)
    for first, value in later:
        if value != last:
            text, last = f"{text}, then {_as_text(value)} from step {first}", value
    return text


def _as_text(value: Any) -> str:
    """Return a setting in a few characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}\u2026"


def _known(values: dict[str, float | None]) -> dict[str, float]:
    """Return values by name; NaN for what was not finite."""
    return {name: float("nan") if value is None else value for name, value in values.items()}


def _is_weighed(name: str) -> bool:
    return name == "grad_norm" or name.partition("/")[0] == "loss"


def _weight_of(name: str, sums: dict[str, float]) -> float:
    """Return what a mean of a record is over: supervised tokens, or optimizer steps."""
    if name == "grad_norm":
        return sums["optimizer_steps"]
    source = name.partition("/")[2]
    return sums[f"targets/{source}"] if source else sums["targets"]


def _ledger_beside(folder: Path) -> Path | None:
    """Return the folder of the ledger in the folder of a run; beside it, if of no other run."""
    above = folder.resolve().parent
    is_alone = all(one.parent.samefile(folder) for one in above.glob(f"*/{FILE}"))
    for place in (folder, folder / "ledger", *[above / "ledger"] * is_alone):
        if any(place.glob("rank-*.ledger")):
            return place
    return None
