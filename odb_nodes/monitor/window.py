"""What a rank counts between two records, and what all of them have counted together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from odb_nodes.monitor.loss_book import ALL_RANKS, SampleLoss
from odb_nodes.monitor.metrics import COLUMNS, rates, row_of, sum_rows
from odb_nodes.monitor.numbers import Number, Told, to_floats
from odb_nodes.monitor.row_losses import RowLosses
from odb_nodes.planning.budget import ATTENTION_TOKENS
from odb_nodes.step_info import StepInfo


@dataclass(kw_only=True)
class Share:
    """What one rank has counted, as plain numbers.

    Attributes:
        rows: 5 integers for each micro-step; see `StepMeter.take`.
        squares: pairs of tokens that attend to each other, for each micro-step; see `_squares_of`.
        sums: counts by name, besides those of `rows`.
        totals: name -> sum of values times their weights.
        weights: name -> sum of these weights.
        peaks: largest values by name.
        last: latest values by name.
        sources: samples by name of the source, which need not be that of their task.
        shapes: rows and width of a batch, as in "4x128" -> number of such batches.
        optimizer_steps: optimizer steps that have ended.
        seconds: duration.
    """

    rows: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, int] = field(default_factory=dict)
    optimizer_steps: int = 0
    seconds: float = 0.0

    def to_bytes(self) -> bytes:
        """Return a message for another rank."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Share:
        """Return what `to_bytes` made a message of."""
        return cls(**json.loads(data))


class Window:
    """Counts the micro-steps of this rank. Values on a device stay there until `share`."""

    def __init__(self, share: Share, samples: list[SampleLoss] | None = None) -> None:
        self._share = share
        self.samples = samples
        """The losses of samples, once `share` has read them."""
        self.rank = 0
        """This rank, which the keys of its own sources are of."""
        self._squares: list[Number] = []
        self._values: list[tuple[str, Number, float]] = []  # name, value, weight
        self._last: dict[str, Number] = {}
        self._rows: list[tuple[RowLosses, StepInfo]] = []

    def __len__(self) -> int:
        return len(self._share.rows) // COLUMNS

    def add_batch(self, batch: Mapping[str, Any], info: StepInfo, wait_s: float) -> None:
        """Count a micro-step."""
        share, ids = self._share, batch.get("input_ids")
        padded = info.local_padded_tokens
        if isinstance(ids, torch.Tensor) and ids.ndim > 1:
            padded = padded or ids.numel()
            shape = f"{ids.shape[0]}x{ids.shape[1]}"
            share.shapes[shape] = share.shapes.get(shape, 0) + 1
        share.rows += row_of(info, info.local_tokens, padded, wait_s)
        self._squares.append(_squares_of(batch))
        share.optimizer_steps += info.ends_optimizer_step
        self.count("targets", 0 if info.is_filler else info.local_targets)
        if info.left_out:
            self.count("left_out", len(info.left_out))
        for name in info.task_targets:
            self.count(f"samples/{name}", 0)  # a task without a sample is told, too
        for name, (samples, tokens) in info.local_tasks.items():
            self.count(f"samples/{name}", samples)
            self.count(f"tokens/{name}", tokens)
        for name, (samples, _) in info.local_sources.items():
            share.sources[name] = share.sources.get(name, 0) + samples

    def count(self, name: str, number: float) -> None:
        """Add to a sum."""
        self._share.sums[name] = self._share.sums.get(name, 0) + number

    def add_told(self, told: Told) -> None:
        """Add what the monitor was told of a batch."""
        if told.loss is not None:
            self.add_value("loss", told.loss, told.weight)
        for name, (total, targets) in told.losses.items():
            if targets:
                self.add_value(f"loss/{name}", total / targets, targets)
                self.count(f"targets/{name}", targets)
        if told.grad_norm is not None:
            self.add_value("grad_norm", told.grad_norm)
        self._last |= told.last

    def add_value(self, name: str, value: Number, weight: float = 1.0) -> None:
        """Add a value to a mean; one without weight, which may be NaN, is left out."""
        if weight:
            self._values.append((name, value, weight))

    def add_rows(self, losses: RowLosses, info: StepInfo) -> None:
        """Add the losses of the samples of a batch, also by their tasks."""
        count = len(info.keys)
        if len(losses.sums) < count:
            raise ValueError(
                f"`row_losses` must have a sum for each of the {count} samples of the batch, but "
                f'has {len(losses.sums)} instead. Pass `position_ids=batch["position_ids"]` to '
                "`row_losses` for a packed batch."
            )
        if count:
            sums, targets = losses.sums.detach()[:count], losses.targets[:count]
            self._rows.append((RowLosses(sums, targets), info))

    def _read_rows(self) -> None:
        """Read the losses of samples from their device, in one piece."""
        if not self._rows:
            return
        columns = [
            torch.cat(part).tolist() for part in zip(*(one for one, _ in self._rows), strict=True)
        ]
        rows = zip(*columns, strict=True)
        for _, info in self._rows:
            for key, source, task, repeat in zip(
                info.keys, info.row_sources, info.row_tasks, info.row_repeats, strict=True
            ):
                total, targets = next(rows)
                if task and targets:
                    self.count(f"targets/{task}", targets)
                    self._add_to_mean(f"loss/{task}", total, targets)
                if self.samples is not None and key is not None and targets:
                    loss = total / targets
                    is_own = info.world_size > 1 and source in info.own_sources
                    rank = self.rank if is_own else ALL_RANKS
                    self.samples.append(
                        SampleLoss(source, key, repeat, info.epoch, targets, loss, rank)
                    )
        self._rows = []

    def _add_to_mean(self, name: str, total: float, weight: float) -> None:
        share = self._share
        share.totals[name] = share.totals.get(name, 0.0) + total
        share.weights[name] = share.weights.get(name, 0.0) + weight

    def set_last(self, name: str, value: Number) -> None:
        """Note the latest of some values."""
        self._last[name] = value

    def set_peak(self, name: str, value: float) -> None:
        """Note a value that may be the largest so far."""
        self._share.peaks[name] = _larger(self._share.peaks.get(name, value), value)

    def share(self, seconds: float) -> Share:
        """Return all that was counted; waits for devices that values are on."""
        share, values = self._share, self._values
        numbers = to_floats([value for _, value, _ in values])
        for (name, _, weight), number in zip(values, numbers, strict=True):
            self._add_to_mean(name, number * weight, weight)
            if name == "grad_norm":
                share.last[name] = number
                self.set_peak(name, number)
        share.last |= zip(self._last, to_floats([*self._last.values()]), strict=True)
        share.squares += map(int, to_floats(self._squares))
        self._values, self._squares, self._last = [], [], {}
        self._read_rows()
        share.seconds = seconds
        return share


def _squares_of(batch: Mapping[str, Any]) -> Number:
    """Return the sum over the rows of a batch of their squared widths; of a packed row, over its
    samples of their squared lengths. 0 without `input_ids` of two dimensions.
    """
    ids, places = batch.get("input_ids"), batch.get("position_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return 0
    rows, width = ids.shape
    if rows == 1 and isinstance(places, torch.Tensor) and places.shape == ids.shape:
        return places.sum() * 2 + width  # l**2 is the sum of the first l odd numbers
    return rows * width * width


@dataclass(kw_only=True)
class Totals:
    """What all ranks have counted together.

    Attributes:
        sums: counts by name, over ranks and micro-steps.
        totals: name -> sum of values times their weights.
        weights: name -> sum of these weights.
        peaks: largest values by name.
        last: latest values by name, those of rank 0.
    """

    sums: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, shares: Sequence[Share]) -> Totals:
        """Return the totals of the shares of all ranks, in the order of the ranks."""
        first = shares[0]
        rows = torch.tensor([share.rows for share in shares], dtype=torch.int64)
        rows = rows.reshape(len(shares), -1, COLUMNS)
        sums = sum_rows(rows) | {
            "optimizer_steps": first.optimizer_steps,
            "seconds": first.seconds,
            "rank_seconds": sum(share.seconds for share in shares),
        }
        found = cls(sums=sums, last=first.last)
        found.peaks = {"padded_tokens": int(rows[:, :, 2].max())} if rows.numel() else {}
        if all(len(share.squares) == rows.shape[1] for share in shares):  # not so in old states
            squares = torch.tensor([share.squares for share in shares], dtype=torch.int64)
            found.sums |= sum_dearest(rows[:, :, 2], squares)
        for share in shares:
            _add(found.sums, share.sums)
            _add(found.totals, share.totals)
            _add(found.weights, share.weights)
            _raise(found.peaks, share.peaks)
        return found

    def add(self, later: Totals) -> None:
        """Add what was counted afterwards."""
        _add(self.sums, later.sums)
        _add(self.totals, later.totals)
        _add(self.weights, later.weights)
        _raise(self.peaks, later.peaks)
        self.last |= later.last

    def groups(self) -> dict[str, dict[str, float | None]]:
        """Return the groups of a record, and the `weight` of its means, each by name."""
        means = {name: total / self.weights[name] for name, total in self.totals.items()}
        means |= rates(self.sums)
        if "rank_wait_s" in self.sums:
            means["rank_wait_share"] = self.sums["rank_wait_s"] / self.sums["rank_seconds"]
        groups = {"mean": means, "sum": self.sums, "peak": self.peaks, "last": self.last}
        groups["weight"] = self.weights
        return {name: _finite(values.items()) for name, values in groups.items()}


def sum_dearest(padded: torch.Tensor, squares: torch.Tensor) -> dict[str, float]:
    """Return the tokens and the squares of the rank of each micro-step that is likely the slowest.

    Args:
        padded: (R, S) int64, tokens of R ranks in S micro-steps, padding included.
        squares: (R, S) int64, those of `Share.squares`.
    """
    if not padded.numel():
        return {}
    dearest = (padded + squares // ATTENTION_TOKENS).argmax(dim=0, keepdim=True)
    return {
        "dearest_tokens": int(padded.gather(0, dearest).sum()),
        "dearest_squares": int(squares.gather(0, dearest).sum()),
    }


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, number in more.items():
        sums[name] = sums.get(name, 0) + number


def _raise(peaks: dict[str, float], more: Mapping[str, float]) -> None:
    for name, number in more.items():
        peaks[name] = _larger(peaks.get(name, number), number)


def _larger(one: float, other: float) -> float:
    """Return the larger of two numbers; NaN where one of them is."""
    return one if math.isnan(one) or one > other else other


def _finite(values: Iterable[tuple[str, float]]) -> dict[str, float | None]:
    """Return values by name; None for what JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in values}
