"""What the steps of a run come to: counted on each rank, and over all ranks together."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from odb_nodes._core.checks import check_named, check_number, check_type, describe
from odb_nodes.monitor.losses import ALL_RANKS, RowLosses, SampleLoss
from odb_nodes.planning import StepTime
from odb_nodes.planning.step_time import TYPICAL
from odb_nodes.step_info import StepInfo

_MICROSECONDS = 1e6
COLUMNS = 5  # integers of a micro-step; see `StepMeter.take`

Number = float | int | torch.Tensor
Value = tuple[str, Number, float]
"""Name, value and weight of what goes into a mean."""

LOSS_OF = "loss/"  # before the name of a task
_OWN_NAMES = {"grad_norm", "lr", "memory_allocated_bytes", "memory_reserved_bytes"}
"""Names in `last` that are not free."""


def timed(batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each batch with the seconds that were spent waiting for it."""
    while True:
        start_s = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - start_s


class StepMeter:
    """Counts the micro-steps of this rank until they are taken.

    All ranks count the same number of micro-steps, so `take` returns the same shape on all.
    """

    def __init__(self) -> None:
        self._rows = array("q")  # 40 bytes per micro-step, since they may never be taken.
        self._start_s = time.perf_counter()
        self._optimizer_steps = 0

    def __len__(self) -> int:
        return len(self._rows) // COLUMNS

    def add(self, batch: Mapping[str, Any], info: StepInfo, wait_s: float = 0.0) -> None:
        """Count a micro-step.

        Args:
            batch: a batch with `input_ids`, (B, T), and `attention_mask` where there is padding.
                Without `input_ids` it counts 0 tokens.
            info: the `StepInfo` of the batch.
            wait_s: seconds that the trainer waited for the batch.
        """
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        padded = ids.numel() if isinstance(ids, torch.Tensor) else 0
        real = int(mask.sum()) if isinstance(mask, torch.Tensor) and mask.ndim == 2 else padded
        self._rows.extend(row_of(info, real, padded, wait_s))
        self._optimizer_steps += info.ends_optimizer_step

    def take(self) -> tuple[torch.Tensor, int, float]:
        """Return the counts since the last call, and start again from zero.

        Returns:
            (S, 5) int64 for S micro-steps: samples, real tokens, padded tokens, 1 for a filler
            step, microseconds of waiting; then the number of optimizer steps, and the seconds
            since the last call.
        """
        now_s = time.perf_counter()
        taken = torch.tensor(self._rows, dtype=torch.int64).reshape(-1, COLUMNS)
        steps, seconds = self._optimizer_steps, now_s - self._start_s
        self._rows, self._optimizer_steps, self._start_s = array("q"), 0, now_s
        return taken, steps, seconds

    def take_metrics(
        self, gather: Callable[[torch.Tensor], torch.Tensor], device: Any
    ) -> dict[str, float]:
        """Return the metrics since the last call, over all ranks. All ranks call it together.

        Args:
            gather: the trainer's function that returns the tensors of all ranks, stacked or
                concatenated along the first dimension.
            device: the device that `gather` needs.
        """
        rows, steps, seconds = self.take()
        of_ranks = gather(rows.to(device)[None])
        return summarize(of_ranks.flatten(0, -3).cpu(), steps, seconds)


def row_of(info: StepInfo, real_tokens: int, padded_tokens: int, wait_s: float) -> list[int]:
    """Return the counts of a micro-step, as `StepMeter.take` returns them."""
    real_tokens = 0 if info.is_filler else real_tokens
    wait_us = round(wait_s * _MICROSECONDS)
    return [info.local_samples, real_tokens, padded_tokens, info.is_filler, wait_us]


def summarize(rows: torch.Tensor, optimizer_steps: int, seconds: float) -> dict[str, float]:
    """Return the metrics of some micro-steps, over all ranks: those of `rates`, as `odb/*`.

    Args:
        rows: (R, S, 5) int64, what `StepMeter.take` returned on each of R ranks.
        optimizer_steps: number of optimizer steps in these S micro-steps.
        seconds: duration of these S micro-steps.
    """
    clock = {"optimizer_steps": optimizer_steps, "seconds": seconds}
    sums = sum_rows(rows) | clock | {"rank_seconds": len(rows) * seconds}
    return {f"odb/{name}": value for name, value in rates(sums).items()}


def sum_rows(rows: torch.Tensor) -> dict[str, float]:
    """Return the counts of micro-steps, (R, S, 5) int64, by name, summed over all ranks.

    `tokens` are real ones. `busiest_tokens` are the padded tokens that the ranks would have
    computed had each been as busy in every step as the busiest.
    """
    ranks, micro_steps, _ = rows.shape
    samples, real, padded, filler, wait = rows.sum(dim=(0, 1)).tolist()
    return {
        "samples": samples,
        "tokens": real,
        "padded_tokens": padded,
        "busiest_tokens": int(rows[:, :, 2].amax(dim=0).sum()) * ranks if micro_steps else 0,
        "micro_steps": ranks * micro_steps,
        "filler_steps": filler,
        "data_wait_s": wait / _MICROSECONDS,
    }


def rates(sums: Mapping[str, float]) -> dict[str, float]:
    """Return shares and rates by name, over all ranks.

    - `padding_share`: share of padding among the tokens computed, filler steps included.
    - `rank_balance`: tokens that the ranks computed, divided by what they would have computed
      had each been as busy in every step as the busiest.
    - `time_balance`: likewise in time, as `step_time` of the `RankAligner` has it, or a typical
      model where that is no `StepTime`; image patches are not counted.
    - `filler_share`: share of filler steps among the micro-steps.
    - `data_wait_share`: share of the time spent waiting for batches, mean over ranks.
    - `real_tokens_per_step`, `samples_per_step`: per optimizer step, all ranks together.
    - `real_tokens_per_s`, `samples_per_s`: per second, all ranks together.
    """
    samples, real, padded = sums["samples"], sums["tokens"], sums["padded_tokens"]
    steps, seconds = max(sums["optimizer_steps"], 1), max(sums["seconds"], 1 / _MICROSECONDS)
    times = sums.get("longest_times")  # known where all ranks tell each other their batches
    in_time = {"time_balance": sums["times"] / times} if times else {}
    return in_time | {
        "padding_share": 1 - real / padded if padded else 0.0,
        "rank_balance": padded / sums["busiest_tokens"] if padded else 1.0,
        "filler_share": sums["filler_steps"] / max(sums["micro_steps"], 1),
        "data_wait_share": sums["data_wait_s"] / max(sums["rank_seconds"], 1 / _MICROSECONDS),
        "real_tokens_per_step": real / steps,
        "samples_per_step": samples / steps,
        "real_tokens_per_s": real / seconds,
        "samples_per_s": samples / seconds,
    }


# --- between two records of a monitor -------------------------------------------------------------


@dataclass(kw_only=True)
class Counts:
    """What some steps come to, of one rank or of all, as plain numbers, by name."""

    # Of one rank: integers of each micro-step (`StepMeter.take`), and pairs of tokens that attend
    # to each other; samples by source, which need not be that of their task; "rows x width".
    rows: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)  # sums of values times their weights
    weights: dict[str, float] = field(default_factory=dict)  # sums of these weights
    peaks: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # of all ranks, those of rank 0

    @classmethod
    def over_ranks(cls, ranks: Sequence[Counts], step_time: StepTime = TYPICAL) -> Counts:
        """Return the counts of all ranks, in their order, together.

        step_time: what a step is taken to last, to tell which rank is slowest.
        """
        first = ranks[0]
        rows = torch.tensor([one.rows for one in ranks], dtype=torch.int64)
        rows = rows.reshape(len(ranks), -1, COLUMNS)
        found, padded = cls(sums=sum_rows(rows)), rows[:, :, 2]
        if rows.numel():
            squares = torch.tensor([one.squares for one in ranks], dtype=torch.int64)
            # Of each micro-step, those of the rank that is likely slowest.
            times = step_time.seconds_of(padded.double(), squares.double())
            longest, slowest = times.max(dim=0, keepdim=True)
            for name, values in (("tokens", padded), ("squares", squares)):
                found.sums[f"slowest_{name}"] = int(values.gather(0, slowest).sum())
            found.sums["times"] = float(times.sum())
            found.sums["longest_times"] = float(longest.sum()) * len(ranks)
            found.peaks = {"padded_tokens": int(padded.max())}
        for one in ranks:
            found.add(one)
        steps, seconds = first.sums.get("optimizer_steps", 0), first.sums.get("rank_seconds", 0.0)
        found.sums |= {"optimizer_steps": steps, "seconds": seconds}
        found.last = first.last
        return found

    def add(self, other: Counts) -> None:
        """Add what was counted later, or on another rank."""
        for name, number in other.sums.items():
            self.count(name, number)
        for name, total in other.totals.items():
            self.add_to_mean(name, total, other.weights[name])
        for name, number in other.peaks.items():
            self.raise_peak(name, number)
        self.last |= other.last

    def count(self, name: str, number: float) -> None:
        """Add to a sum."""
        self.sums[name] = self.sums.get(name, 0) + number

    def add_to_mean(self, name: str, total: float, weight: float) -> None:
        """Add to a mean values whose sum, each times its weight, is `total`."""
        self.totals[name] = self.totals.get(name, 0.0) + total
        self.weights[name] = self.weights.get(name, 0) + weight

    def raise_peak(self, name: str, value: float) -> None:
        """Note a value that may be the largest so far; NaN is larger than all others."""
        old = self.peaks.get(name, value)
        self.peaks[name] = old if math.isnan(old) or old > value else value

    def groups(self) -> dict[str, dict[str, float | None]]:
        """Return the groups of a record, and the `weight` of its means; not finite is None."""
        means = {name: total / self.weights[name] for name, total in self.totals.items()}
        means |= rates(self.sums)
        if "rank_wait_s" in self.sums:
            means["rank_wait_share"] = self.sums["rank_wait_s"] / self.sums["rank_seconds"]
        losses = [name for name in self.weights if name.startswith(LOSS_OF)]
        targets = {f"targets/{one.removeprefix(LOSS_OF)}": self.weights[one] for one in losses}
        groups = {"mean": means, "sum": self.sums | targets, "peak": self.peaks, "last": self.last}
        return {
            group: {name: one if math.isfinite(one) else None for name, one in values.items()}
            for group, values in (groups | {"weight": self.weights}).items()
        }


class Window:
    """Counts the micro-steps of this rank since the last record; `read` reads the tensors."""

    def __init__(self, counts: Counts, samples: list[SampleLoss] | None) -> None:
        self.counts = counts
        self.samples = samples
        """The losses of samples, once `read` has read them; `None` if nobody wants them."""
        self._squares: list[Number] = []
        self._values: list[Value] = []
        self._last: dict[str, Number] = {}
        self._rows: list[tuple[RowLosses, StepInfo, int]] = []

    def __len__(self) -> int:
        return len(self.counts.rows) // COLUMNS

    def add_batch(self, batch: Mapping[str, Any], info: StepInfo, wait_s: float, ooms: int) -> None:
        """Count a micro-step."""
        counts, ids = self.counts, batch.get("input_ids")
        padded = info.local_padded_tokens
        if isinstance(ids, torch.Tensor) and ids.ndim > 1:
            padded = padded or ids.numel()
            shape = f"{ids.shape[0]}x{ids.shape[1]}"
            counts.shapes[shape] = counts.shapes.get(shape, 0) + 1
        counts.rows += row_of(info, info.local_tokens, padded, wait_s)
        self._squares.append(_squares_of(batch))
        counts.count("optimizer_steps", info.ends_optimizer_step)
        counts.count("targets", 0 if info.is_filler else info.local_targets)
        for name, number in (("left_out", len(info.left_out)), ("ooms", ooms)):
            if number:
                counts.count(name, number)
        for name in info.task_targets:
            counts.count(f"samples/{name}", 0)  # a task without a sample is told, too
        for name, (samples, tokens) in info.local_tasks.items():
            counts.count(f"samples/{name}", samples)
            counts.count(f"tokens/{name}", tokens)
        for name, (samples, _) in info.local_sources.items():
            counts.sources[name] = counts.sources.get(name, 0) + samples

    def add_values(self, values: Iterable[Value], last: Mapping[str, Number]) -> None:
        """Add values to means, but for those without weight, which may be NaN; note the latest."""
        self._values += [one for one in values if one[2]]
        self._last |= last

    def add_rows(self, losses: RowLosses, info: StepInfo, rank: int) -> None:
        """Add the losses of the samples of a batch, also by their tasks."""
        if count := len(info.keys):
            sums, targets = losses.sums.detach()[:count], losses.targets[:count]
            self._rows.append((RowLosses(sums, targets), info, rank))

    def read(self, seconds: float) -> Counts:
        """Return what was counted in so many seconds; waits for devices that values are on."""
        counts, values = self.counts, self._values
        numbers = _to_floats([value for _, value, _ in values])
        for (name, _, weight), number in zip(values, numbers, strict=True):
            counts.add_to_mean(name, number * weight, weight)
            if name == "grad_norm":
                counts.last[name] = number
                counts.raise_peak(name, number)
        counts.last |= zip(self._last, _to_floats([*self._last.values()]), strict=True)
        counts.squares += map(int, _to_floats(self._squares))
        self._read_rows()
        self._values, self._squares, self._last, self._rows = [], [], {}, []
        counts.sums["rank_seconds"] = seconds
        return counts

    def _read_rows(self) -> None:
        if not self._rows:
            return
        parts = zip(*(losses for losses, *_ in self._rows), strict=True)
        rows = zip(*(torch.cat(part).tolist() for part in parts), strict=True)
        for _, info, rank in self._rows:
            for key, source, task, repeat in zip(
                info.keys, info.row_sources, info.row_tasks, info.row_repeats, strict=True
            ):
                total, targets = next(rows)
                if not targets:
                    continue
                if task:
                    self.counts.add_to_mean(f"{LOSS_OF}{task}", total, targets)
                if self.samples is not None and key is not None:
                    is_own = info.world_size > 1 and source in info.own_sources
                    place = source, key, repeat, info.epoch, targets
                    whose = rank if is_own else ALL_RANKS
                    self.samples.append(SampleLoss(*place, total / targets, whose))

    def note_memory(self) -> None:
        """Note the bytes of the current GPU as torch's allocator has them; resets no peak."""
        if not torch.cuda.is_initialized():
            return
        now = torch.cuda.memory_stats()
        for part in ("allocated_bytes", "reserved_bytes"):
            self._last[f"memory_{part}"] = now.get(f"{part}.all.current", 0)
            self.counts.raise_peak(f"memory_{part}", now.get(f"{part}.all.peak", 0))


def _squares_of(batch: Mapping[str, Any]) -> Number:
    """Return the sum of the squared widths of rows, or lengths of packed samples; 0 if unknown."""
    ids, places = batch.get("input_ids"), batch.get("position_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return 0
    rows, width = ids.shape
    if rows == 1 and isinstance(places, torch.Tensor) and places.shape == ids.shape:
        return places.sum() * 2 + width  # l**2 is the sum of the first l odd numbers
    return rows * width * width


# --- what a monitor is told -----------------------------------------------------------------------


def told_values(
    loss: Any, weight: Any, loss_by_source: Any, grad_norm: Any
) -> list[tuple[str, Number, float]]:
    """Return what `Monitor.step` is told of a batch, for means; tensors are not read."""
    remedy = 'Pass names with (sum of losses, targets), such as {"chat": (12.5, 40)}.'
    check_type("loss_by_source", loss_by_source, Mapping | None, remedy)
    check_named("loss_by_source", loss_by_source or {})
    weight = not_negative("loss_weight", weight)
    found = [] if loss is None else [("loss", _number("loss", loss), weight)]
    for name, pair in (loss_by_source or {}).items():
        entry = f"loss_by_source[{name!r}]"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"`{entry}` must be a pair, but is {describe(pair)} instead. {remedy}")
        total, targets = _number(f"{entry}[0]", pair[0]), not_negative(f"{entry}[1]", pair[1])
        found.append((f"{LOSS_OF}{name}", total / max(targets, 1), targets))
    if grad_norm is not None:
        found.append(("grad_norm", _number("grad_norm", grad_norm), 1))
    return found


def told_last(lr: Any, values: Any) -> dict[str, Number]:
    """Return the further numbers that `Monitor.step` is told of an optimizer step."""
    check_type("values", values, Mapping | None, 'Pass numbers by name, such as {"weight": 0.5}.')
    check_named("values", values or {})
    if own := _OWN_NAMES & {*(values or {})}:
        raise ValueError(
            f"`values` must not have names that records use themselves, but has {sorted(own)}. "
            "Pass `lr` and `grad_norm` as arguments, or choose another name."
        )
    found = {name: _number(f"values[{name!r}]", one) for name, one in (values or {}).items()}
    return found if lr is None else {"lr": _number("lr", lr)} | found


def check_row_losses(losses: RowLosses, info: StepInfo) -> None:
    """Raise a `ValueError` unless there is a loss for each sample of a batch."""
    if len(losses.sums) < len(info.keys):
        raise ValueError(
            f"`row_losses` must have a sum for each of the {len(info.keys)} samples of the batch, "
            f"but has {len(losses.sums)} instead. Pass "
            '`position_ids=batch["position_ids"]` to `row_losses` for a packed batch.'
        )


def not_negative(name: str, value: Any) -> float:
    """Return a number, as an integer where it is whole; raise unless it is 0 or more."""
    number = check_number(name, value, "[0, inf)")
    return int(number) if number.is_integer() else number


def _number(name: str, value: Any) -> Number:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"`{name}` must be one number, but has the shape {shape}.")
        return value.detach()
    if not isinstance(value, Real):
        rule = "must be a number or a tensor of one element"
        raise TypeError(f"`{name}` {rule}, but is {describe(value)} instead.")
    return float(value)


def _to_floats(values: Sequence[Number]) -> list[float]:
    """Return numbers and tensors of one element as floats; waits once for each device."""
    devices: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            devices.setdefault(value.device, []).append(index)
    found: list[Any] = list(values)
    for places in devices.values():
        read = torch.cat([found[index].reshape(1).double() for index in places]).tolist()
        for index, number in zip(places, read, strict=True):
            found[index] = number
    return list(map(float, found))
