"""What dynamic batches come to: counted per micro-step on each rank, summed up over all ranks."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from typing import Any

import torch

from odb_nodes.step_info import StepInfo

__all__ = ["StepMeter", "summarize"]

_MICROSECONDS = 1e6
_COLUMNS = 5


class StepMeter:
    """Counts the micro-steps of this rank until they are taken.

    All ranks count the same number of micro-steps, so what `take` returns has one shape on all.
    """

    def __init__(self) -> None:
        self._rows = array("q")  # 40 bytes a row: nobody may ever take them
        self._start_s = time.perf_counter()
        self._optimizer_steps = 0

    def __len__(self) -> int:
        return len(self._rows) // _COLUMNS

    def add(self, batch: Mapping[str, Any], info: StepInfo, wait_s: float = 0.0) -> None:
        """Count a micro-step.

        Args:
            batch: with `input_ids`, (B, T), and `attention_mask` where there is padding. Without
                them its tokens count as none.
            info: of the step.
            wait_s: seconds that the trainer waited for the batch.
        """
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        padded = ids.numel() if isinstance(ids, torch.Tensor) else 0
        real = int(mask.sum()) if isinstance(mask, torch.Tensor) and mask.ndim == 2 else padded
        if info.is_filler:
            real = 0
        row = [info.local_samples, real, padded, info.is_filler, round(wait_s * _MICROSECONDS)]
        self._rows.extend(row)
        self._optimizer_steps += info.ends_optimizer_step

    def take(self) -> tuple[torch.Tensor, int, float]:
        """Return what was counted, and begin anew.

        Returns:
            (S, 5) int64 for S micro-steps: samples, real tokens, padded tokens, whether it is
            filler, microseconds of waiting; the number of optimizer steps; the seconds it took.
        """
        now_s = time.perf_counter()
        taken = torch.tensor(self._rows, dtype=torch.int64).reshape(-1, _COLUMNS)
        steps, seconds = self._optimizer_steps, now_s - self._start_s
        self._rows, self._optimizer_steps, self._start_s = array("q"), 0, now_s
        return taken, steps, seconds


def summarize(rows: torch.Tensor, optimizer_steps: int, seconds: float) -> dict[str, float]:
    """Return the metrics of some steps of all ranks.

    - `odb/padding_share`: of all tokens that were computed, filler steps included.
    - `odb/rank_balance`: what the ranks computed, over what they would have computed had each been
      as busy as the busiest in every step.
    - `odb/filler_share`: of the micro-steps.
    - `odb/data_wait_share`: of the time, mean over ranks.
    - `odb/real_tokens_per_step`, `odb/samples_per_step`: of an optimizer step of all ranks.
    - `odb/real_tokens_per_s`, `odb/samples_per_s`: of all ranks.

    Args:
        rows: (R, S, 5), what `StepMeter.take` returned on each of R ranks.
        optimizer_steps: in these S micro-steps.
        seconds: that they took.
    """
    ranks, micro_steps, _ = rows.shape
    samples, real, padded, filler, wait = rows.sum(dim=(0, 1)).tolist()
    busiest = int(rows[:, :, 2].amax(dim=0).sum()) * ranks if micro_steps else 0
    steps, seconds = max(optimizer_steps, 1), max(seconds, 1 / _MICROSECONDS)
    return {
        "odb/padding_share": 1 - real / padded if padded else 0.0,
        "odb/rank_balance": padded / busiest if busiest else 1.0,
        "odb/filler_share": filler / max(ranks * micro_steps, 1),
        "odb/data_wait_share": wait / _MICROSECONDS / (ranks * seconds),
        "odb/real_tokens_per_step": real / steps,
        "odb/samples_per_step": samples / steps,
        "odb/real_tokens_per_s": real / seconds,
        "odb/samples_per_s": samples / seconds,
    }
