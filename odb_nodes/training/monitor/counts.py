"""Counts of the steps of a run: on each rank, and summed over all ranks."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from odb_nodes._support.checks import check_named, check_number, check_type, describe
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.step_time import TYPICAL
from odb_nodes.core.step_info import StepInfo
from odb_nodes.training.monitor.losses import ALL_RANKS, RowLosses, SampleLoss

_MICROSECONDS = 1e6

# The integers of a micro-step; see `StepMeter.take`.
SAMPLES, TOKENS, PADDED_TOKENS, IS_FILLER, WAIT_US = range(5)
COLUMNS = 5

Number = float | int | torch.Tensor
Value = tuple[str, Number, float]
"""Name, value and weight of one term of a mean."""

LOSS_OF = "loss/"  # prefix of the loss of a task
_RESERVED = {"grad_norm", "lr", "memory_allocated_bytes", "memory_reserved_bytes"}
"""Names in `last` that the monitor itself writes."""


def timed(batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each batch with the seconds of waiting for it."""
    while True:
        start_s = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - start_s


class StepMeter:
    """Counts the micro-steps of this rank between two calls of `take`.

    All ranks have the same number of micro-steps, so `take` returns the same shape on all of them.
    """

    def __init__(self) -> None:
        self._rows = array("q")  # 40 bytes per micro-step: `take` may never be called
        self._start_s = time.perf_counter()
        self._optimizer_steps = 0

    def __len__(self) -> int:
        return len(self._rows) // COLUMNS

    def add(self, batch: Mapping[str, Any], info: StepInfo, wait_s: float = 0.0) -> None:
        """Count a micro-step.

        Args:
            batch: the batch; the size of its `input_ids` counts if `info` has no padded tokens.
            info: the `StepInfo` of the batch.
            wait_s: seconds that the trainer waited for the batch.
        """
        self._rows.extend(micro_step_row(batch, info, wait_s))
        self._optimizer_steps += info.ends_optimizer_step

    def take(self) -> tuple[torch.Tensor, int, float]:
        """Return the counts since the last call, and start again from zero.

        Returns:
            (S, 5) int64 for S micro-steps: samples, real tokens, padded tokens, 1 for a filler
            step, microseconds of waiting; then the number of optimizer steps, and the seconds
            since the last call.
        """
        now_s = time.perf_counter()
        rows = torch.tensor(self._rows, dtype=torch.int64).reshape(-1, COLUMNS)
        steps = self._optimizer_steps
        seconds = now_s - self._start_s
        self._rows = array("q")
        self._optimizer_steps = 0
        self._start_s = now_s
        return rows, steps, seconds

    def take_metrics(
        self, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device | str
    ) -> dict[str, float]:
        """Return the metrics since the last call, over all ranks. All ranks call it together.

        Args:
            gather: the trainer's function that returns the tensors of all ranks, stacked or
                concatenated along the first dimension.
            device: the device that `gather` needs.
        """
        rows, steps, seconds = self.take()
        gathered = gather(rows.to(device)[None])
        return summarize(gathered.flatten(0, -3).cpu(), steps, seconds)


def micro_step_row(batch: Mapping[str, Any], info: StepInfo, wait_s: float) -> list[int]:
    """Return the counts of a micro-step, as `StepMeter.take` returns them."""
    ids = batch.get("input_ids")
    padded_tokens = info.local_padded_tokens
    if not padded_tokens and isinstance(ids, torch.Tensor):
        padded_tokens = ids.numel()
    wait_us = round(wait_s * _MICROSECONDS)
    return [info.local_samples, info.local_tokens, padded_tokens, info.is_filler, wait_us]


def summarize(rows: torch.Tensor, optimizer_steps: int, seconds: float) -> dict[str, float]:
    """Return the metrics `odb/*` of S micro-steps over all R ranks.

    Args:
        rows: (R, S, 5) int64, the rows of `StepMeter.take` on each rank.
        optimizer_steps: number of optimizer steps in the micro-steps.
        seconds: duration of the micro-steps.
    """
    clock = {"optimizer_steps": optimizer_steps, "seconds": seconds}
    sums = sum_rows(rows) | clock | {"rank_seconds": len(rows) * seconds}
    return {f"odb/{name}": value for name, value in rates(sums).items()}


def sum_rows(rows: torch.Tensor) -> dict[str, float]:
    """Return the counts of micro-steps, (R, S, 5) int64, by name, summed over all ranks.

    `tokens` are without padding. `busiest_tokens` are the padded tokens if every rank had as many
    in each step as the busiest rank.
    """
    ranks, micro_steps, _ = rows.shape
    padded = rows[:, :, PADDED_TOKENS]
    sums = rows.sum(dim=(0, 1)).tolist()
    return {
        "samples": sums[SAMPLES],
        "tokens": sums[TOKENS],
        "padded_tokens": sums[PADDED_TOKENS],
        "busiest_tokens": int(padded.amax(dim=0).sum()) * ranks if micro_steps else 0,
        "micro_steps": ranks * micro_steps,
        "filler_steps": sums[IS_FILLER],
        "data_wait_s": sums[WAIT_US] / _MICROSECONDS,
    }


def rates(sums: Mapping[str, float]) -> dict[str, float]:
    """Return shares and rates by name, over all ranks.

    - `padding_share`: share of padding among the computed tokens, filler steps included.
    - `rank_balance`: computed tokens of all ranks, as a share of what they would compute if every
      rank had as many tokens in each step as the busiest rank.
    - `time_balance`: the same for times, by the `StepTime` of the `RankAligner`, or else of a
      typical model; image patches are not counted. Left out if `step_time` is a function.
    - `filler_share`: share of filler steps among the micro-steps.
    - `data_wait_share`: share of the time spent waiting for batches, as a mean over ranks.
    - `real_tokens_per_step`, `samples_per_step`: per optimizer step, all ranks together.
    - `real_tokens_per_s`, `samples_per_s`: per second, all ranks together.
    """
    samples, real, padded = sums["samples"], sums["tokens"], sums["padded_tokens"]
    steps, seconds = max(sums["optimizer_steps"], 1), max(sums["seconds"], 1 / _MICROSECONDS)
    longest = sums.get("longest_times")  # only a `Monitor` has it
    time_balance = {"time_balance": sums["times"] / longest} if longest else {}
    return time_balance | {
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
    """Counts of steps by name, as plain numbers: of one rank, or of all ranks."""

    # In the counts of one rank only: the integers of each micro-step (see `StepMeter.take`); pairs
    # of tokens that attend to each other, by micro-step; source -> samples; "rows x width" ->
    # batches.
    rows: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)  # sums of value x weight
    weights: dict[str, float] = field(default_factory=dict)  # sums of the weights
    peaks: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # rank 0's, in counts of all ranks

    @classmethod
    def over_ranks(cls, ranks: Sequence[Counts], step_time: StepTime | None = TYPICAL) -> Counts:
        """Return the sum of the counts of all ranks; without a `step_time`, times are left out."""
        rows = torch.tensor([counts.rows for counts in ranks], dtype=torch.int64)
        rows = rows.reshape(len(ranks), -1, COLUMNS)
        whole = cls(sums=sum_rows(rows))
        padded = rows[:, :, PADDED_TOKENS]
        if rows.numel():
            squares = torch.tensor([counts.squares for counts in ranks], dtype=torch.int64)
            # Without a `step_time`, a typical model tells which rank is the slowest.
            times = (step_time or TYPICAL).seconds_of(padded.double(), squares.double())
            longest, slowest = times.max(dim=0, keepdim=True)
            for name, values in (("tokens", padded), ("squares", squares)):
                whole.sums[f"slowest_{name}"] = int(values.gather(0, slowest).sum())
            if step_time is not None:
                whole.sums["times"] = float(times.sum())
                whole.sums["longest_times"] = float(longest.sum()) * len(ranks)
            whole.peaks = {"padded_tokens": int(padded.max())}
        for counts in ranks:
            whole.add(counts)
        first = ranks[0]
        whole.sums["optimizer_steps"] = first.sums.get("optimizer_steps", 0)
        whole.sums["seconds"] = first.sums.get("rank_seconds", 0.0)
        whole.last = first.last
        return whole

    def add(self, other: Counts) -> None:
        """Add counts of later steps, or of another rank."""
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
        """Add to a mean: `total` is a sum of value x weight, `weight` the sum of the weights."""
        self.totals[name] = self.totals.get(name, 0.0) + total
        self.weights[name] = self.weights.get(name, 0) + weight

    def raise_peak(self, name: str, value: float) -> None:
        """Raise a peak to a value, if it is larger; NaN is larger than all numbers."""
        old = self.peaks.get(name, value)
        self.peaks[name] = old if math.isnan(old) or old > value else value

    def groups(self) -> dict[str, dict[str, float | None]]:
        """Return the groups of a record, and the `weight` of its means; `None` if not finite."""
        means = {name: total / self.weights[name] for name, total in self.totals.items()}
        means |= rates(self.sums)
        if "rank_wait_s" in self.sums:
            means["rank_wait_share"] = self.sums["rank_wait_s"] / self.sums["rank_seconds"]
        targets = {
            f"targets/{name.removeprefix(LOSS_OF)}": weight
            for name, weight in self.weights.items()
            if name.startswith(LOSS_OF)
        }
        groups = {
            "mean": means,
            "sum": self.sums | targets,
            "peak": self.peaks,
            "last": self.last,
            "weight": self.weights,
        }
        return {
            group: {name: value if math.isfinite(value) else None for name, value in values.items()}
            for group, values in groups.items()
        }


class PendingCounts:
    """Counts the micro-steps of this rank since the last record; `read` reads the tensors."""

    def __init__(self, counts: Counts, samples: list[SampleLoss] | None) -> None:
        self.counts = counts
        self.samples = samples
        """The losses of samples, after `read`; `None` if they are not kept."""
        self._squares: list[Number] = []
        self._values: list[Value] = []
        self._last: dict[str, Number] = {}
        self._row_losses: list[tuple[RowLosses, StepInfo, int]] = []

    def __len__(self) -> int:
        return len(self.counts.rows) // COLUMNS

    def add_batch(self, batch: Mapping[str, Any], info: StepInfo, wait_s: float, ooms: int) -> None:
        """Count a micro-step."""
        counts = self.counts
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.ndim > 1:
            shape = f"{ids.shape[0]}x{ids.shape[1]}"
            counts.shapes[shape] = counts.shapes.get(shape, 0) + 1
        counts.rows += micro_step_row(batch, info, wait_s)
        self._squares.append(_squares_of(batch))
        counts.count("optimizer_steps", info.ends_optimizer_step)
        counts.count("targets", 0 if info.is_filler else info.local_targets)
        for name, number in (("left_out", len(info.left_out)), ("ooms", ooms)):
            if number:
                counts.count(name, number)
        for name in info.task_targets:
            counts.count(f"samples/{name}", 0)  # a task without samples counts 0
        for name, (samples, tokens) in info.local_tasks.items():
            counts.count(f"samples/{name}", samples)
            counts.count(f"tokens/{name}", tokens)
        for name, (samples, _) in info.local_sources.items():
            counts.sources[name] = counts.sources.get(name, 0) + samples

    def add_values(self, values: Iterable[Value], last: Mapping[str, Number]) -> None:
        """Add `values` to means, except values without weight, which may be NaN; keep `last`."""
        self._values += [term for term in values if term[2]]
        self._last |= last

    def add_rows(self, losses: RowLosses, info: StepInfo, rank: int) -> None:
        """Add the losses of the samples of a batch, for their tasks and for `samples`."""
        if count := len(info.keys):
            sums, targets = losses.sums.detach()[:count], losses.targets[:count]
            self._row_losses.append((RowLosses(sums, targets), info, rank))

    def read(self, seconds: float) -> Counts:
        """Return the counts of the last `seconds`; waits for the devices of the values."""
        counts, values = self.counts, self._values
        numbers = _to_floats([value for _, value, _ in values])
        for (name, _, weight), number in zip(values, numbers, strict=True):
            counts.add_to_mean(name, number * weight, weight)
            if name == "grad_norm":
                counts.last[name] = number
                counts.raise_peak(name, number)
        counts.last |= zip(self._last, _to_floats([*self._last.values()]), strict=True)
        counts.squares += map(int, _to_floats(self._squares))
        self._read_row_losses()
        for unread in (self._values, self._squares, self._last, self._row_losses):
            unread.clear()
        counts.sums["rank_seconds"] = seconds
        return counts

    def _read_row_losses(self) -> None:
        if not self._row_losses:
            return
        parts = zip(*(losses for losses, *_ in self._row_losses), strict=True)
        rows = zip(*(torch.cat(part).tolist() for part in parts), strict=True)
        for _, info, rank in self._row_losses:
            for key, source, task, repeat in zip(
                info.keys, info.row_sources, info.row_tasks, info.row_repeats, strict=True
            ):
                total, targets = next(rows)
                if not targets:
                    continue
                if task:
                    self.counts.add_to_mean(f"{LOSS_OF}{task}", total, targets)
                if self.samples is not None and key is not None:
                    is_per_rank = info.world_size > 1 and source in info.per_rank_sources
                    loss = SampleLoss(
                        source=source,
                        key=key,
                        repeat=repeat,
                        epoch=info.epoch,
                        targets=targets,
                        loss=total / targets,
                        rank=rank if is_per_rank else ALL_RANKS,
                    )
                    self.samples.append(loss)

    def note_memory(self) -> None:
        """Note current and peak bytes of torch's allocator on the GPU, without a reset."""
        if not torch.cuda.is_initialized():
            return
        stats = torch.cuda.memory_stats()
        for part in ("allocated_bytes", "reserved_bytes"):
            self._last[f"memory_{part}"] = stats.get(f"{part}.all.current", 0)
            self.counts.raise_peak(f"memory_{part}", stats.get(f"{part}.all.peak", 0))


def _squares_of(batch: Mapping[str, Any]) -> Number:
    """Return the sum of the squared widths of rows, or lengths of packed samples; 0 if unknown."""
    ids, positions = batch.get("input_ids"), batch.get("position_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return 0
    rows, width = ids.shape
    if rows == 1 and isinstance(positions, torch.Tensor) and positions.shape[-2:] == ids.shape:
        text = positions.reshape(-1, width)[0]  # row 0 of (4, 1, T) has the positions of the text
        return text.sum() * 2 + width  # l**2 is the sum of the first l odd numbers
    return rows * width * width


# --- arguments of `Monitor.step` ------------------------------------------------------------------


def checked_means(
    loss: Any, weight: Any, loss_by_source: Any, grad_norm: Any
) -> list[tuple[str, Number, float]]:
    """Return the values of a batch that go into means; tensors are not read."""
    remedy = 'Pass names with (sum of losses, targets), such as {"chat": (12.5, 40)}.'
    check_type("loss_by_source", loss_by_source, Mapping | None, remedy)
    check_named("loss_by_source", loss_by_source or {})
    weight = not_negative("loss_weight", weight)
    terms = [] if loss is None else [("loss", _number("loss", loss), weight)]
    for name, pair in (loss_by_source or {}).items():
        entry = f"loss_by_source[{name!r}]"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"`{entry}` must be a pair, but is {describe(pair)} instead. {remedy}")
        total = _number(f"{entry}[0]", pair[0])
        targets = not_negative(f"{entry}[1]", pair[1])
        terms.append((f"{LOSS_OF}{name}", total / max(targets, 1), targets))
    if grad_norm is not None:
        terms.append(("grad_norm", _number("grad_norm", grad_norm), 1))
    return terms


def checked_last(lr: Any, values: Any) -> dict[str, Number]:
    """Return the values of an optimizer step of which a record has the last."""
    check_type("values", values, Mapping | None, 'Pass numbers by name, such as {"weight": 0.5}.')
    check_named("values", values or {})
    if reserved := _RESERVED & {*(values or {})}:
        raise ValueError(
            f"`values` must not have names that records use themselves, but has "
            f"{sorted(reserved)}. Pass `lr` and `grad_norm` as arguments, or choose another name."
        )
    last = {} if lr is None else {"lr": _number("lr", lr)}
    for name, value in (values or {}).items():
        last[name] = _number(f"values[{name!r}]", value)
    return last


def check_row_losses(losses: RowLosses, info: StepInfo) -> None:
    """Check that there is a loss for each sample of a batch."""
    if len(losses.sums) < len(info.keys):
        raise ValueError(
            f"`row_losses` must have a sum for each of the {len(info.keys)} samples of the batch, "
            f"but has {len(losses.sums)} instead. Pass "
            '`position_ids=batch["position_ids"]` to `row_losses` for a packed batch.'
        )


def not_negative(name: str, value: Any) -> float:
    """Check that a number is at least 0; return a whole number as an integer."""
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
    numbers: list[Any] = list(values)
    for indices in devices.values():
        read = torch.cat([numbers[index].reshape(1).double() for index in indices]).tolist()
        for index, number in zip(indices, read, strict=True):
            numbers[index] = number
    return list(map(float, numbers))
