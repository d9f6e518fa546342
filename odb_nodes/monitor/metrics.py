"""Metrics of dynamic batches: counted per micro-step on each rank, summarized over all ranks."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from odb_nodes.step_info import StepInfo

__all__ = ["StepMeter", "summarize", "timed"]

_MICROSECONDS = 1e6
COLUMNS = 5  # integers of a micro-step; see `StepMeter.take`


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
    - `filler_share`: share of filler steps among the micro-steps.
    - `data_wait_share`: share of the time spent waiting for batches, mean over ranks.
    - `real_tokens_per_step`, `samples_per_step`: per optimizer step, all ranks together.
    - `real_tokens_per_s`, `samples_per_s`: per second, all ranks together.
    """
    samples, real, padded = sums["samples"], sums["tokens"], sums["padded_tokens"]
    steps, seconds = max(sums["optimizer_steps"], 1), max(sums["seconds"], 1 / _MICROSECONDS)
    return {
        "padding_share": 1 - real / padded if padded else 0.0,
        "rank_balance": padded / sums["busiest_tokens"] if padded else 1.0,
        "filler_share": sums["filler_steps"] / max(sums["micro_steps"], 1),
        "data_wait_share": sums["data_wait_s"] / max(sums["rank_seconds"], 1 / _MICROSECONDS),
        "real_tokens_per_step": real / steps,
        "samples_per_step": samples / steps,
        "real_tokens_per_s": real / seconds,
        "samples_per_s": samples / seconds,
    }
