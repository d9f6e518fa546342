"""The loss of each sample: computed from its batch, and kept over epochs in a file for each rank.

A file has a line for each record that had samples: JSON, deflated by zlib (whose checksum detects
damage), in base64. The JSON has `before`, the last step before the record; `step`, the last step
of the record; and the rows, column by column. A line replaces all earlier lines whose `step` is
above the line's `before`: they were written before a resume from an earlier checkpoint.
"""

from __future__ import annotations

import base64
import json
import math
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from odb_nodes._support.files import LockedFile
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.sample import IGNORE_INDEX
from odb_nodes.training.monitor.records import FILE, parse_run

ALL_RANKS = -1  # in place of a rank: all ranks share the source, so its keys are unique


class RowLosses(NamedTuple):
    """Losses of the samples of a batch, in the order of `StepInfo.keys`.

    Attributes:
        sums: (n,) float, sum of the losses over the supervised tokens of each sample, with
            gradients. Entries beyond the samples of the batch are ignored.
        targets: (n,) int64, number of supervised tokens of each sample.
    """

    sums: torch.Tensor
    targets: torch.Tensor


def row_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    shift: bool = True,
) -> RowLosses:
    """Return the loss of each sample of a batch of a language model; waits for no device.

    `losses.sums.sum() / max(info.local_targets, 1)` is the mean loss of the batch, with its
    gradient, so the loss is computed only once.

    Args:
        logits: (B, T, vocabulary) float.
        labels: (B, T) int64; -100 for tokens without a target.
        position_ids: (1, T) or (4, 1, T) int64: positions of a packed batch, which begin at 0 in
            each sample. `None` for a padded batch.
        shift: whether the logits of a token predict the label of the next token.

    Raises:
        ValueError: the shapes do not fit together.
    """
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            "`logits` must be (B, T, vocabulary) for `labels` of (B, T), but are "
            f"{tuple(logits.shape)} for {tuple(labels.shape)} instead."
        )
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    ).view(labels.shape)
    is_target = labels.ne(IGNORE_INDEX)
    if position_ids is None:
        return RowLosses(losses.sum(1), is_target.sum(1))
    positions = position_ids.reshape(-1, position_ids.shape[-1])[0]  # (4, 1, T): row 0 is the text
    # An entry for each token: the number of samples is known only on the device.
    sample = positions.eq(0).cumsum(0)[-labels.shape[1] :] - 1
    sums = losses.new_zeros(len(positions)).index_add(0, sample, losses[0])
    targets = torch.zeros_like(positions).index_add(0, sample, is_target[0].long())
    return RowLosses(sums, targets)


class SampleLoss(NamedTuple):
    """The loss of a sample when it was trained on.

    Attributes:
        source: name of its source.
        key: its key in the source.
        repeat: number of the repeat, if a sample comes more than once in an epoch.
        epoch: number of the epoch.
        targets: number of its supervised tokens.
        loss: mean loss over the supervised tokens.
        rank: the rank that has the sample, if each rank has separate data; otherwise -1.
    """

    source: str
    key: int
    repeat: int
    epoch: int
    targets: int
    loss: float
    rank: int = ALL_RANKS


class SampleLossWriter:
    """Appends the losses of samples to the file of a rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"losses-{rank:05d}.bin"
        self._file = LockedFile(path, "Give each run its own folder.")
        self._file.open()

    def write(self, samples: Sequence[SampleLoss], before: int, step: int) -> None:
        """Append the losses of the steps after `before` up to `step`, all in one epoch."""
        if not samples:
            return
        rows = [sample._replace(loss=float(f"{sample.loss:.7g}")) for sample in samples]
        columns = [*zip(*rows, strict=True)]
        block = {"before": before, "step": step, "time_s": int(time.time()), "columns": columns}
        line = base64.b64encode(zlib.compress(json.dumps(block).encode(), 1))
        try:
            self._file.open()  # again, if it was deleted
            self._file.write(b"\n" + line)  # the line before may have been cut short by a kill
        except OSError as error:
            self._file.warn(error, "the losses of these samples are missing")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def read_losses(folder: str | os.PathLike[str]) -> list[SampleLoss]:
    """Return the losses of all samples, rank by rank in the order of the steps.

    Lines that a kill has cut short are left out, and steps that a resume has replaced. Other
    damaged lines are left out with a warning.

    Args:
        folder: the folder of a run under `Monitor(losses_by_sample=True)`. Other runs have no
            losses: the result is empty.

    Raises:
        ValueError: a later version wrote the records of the run.
    """
    losses: list[SampleLoss] = []
    folder = Path(folder)
    attempts = parse_run(folder)[0].attempts if (folder / FILE).is_file() else []
    for path in sorted(folder.glob("losses-[0-9][0-9][0-9][0-9][0-9].bin")):
        blocks: list[dict[str, Any]] = []
        damaged: list[int] = []
        cut: list[int] = []  # lines just before this one that a kill may have cut short
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            block = _parsed_line(line)
            if block is None:
                cut.append(number)
                continue
            blocks = [earlier for earlier in blocks if earlier["step"] <= block["before"]]
            if block["before"] > (blocks[-1]["step"] if blocks else 0):
                damaged += cut
            cut = []
            blocks.append(block)
        damaged += [number for number in cut if not _may_be_cut_short(lines[number - 1])]
        if damaged:
            numbers = ", ".join(map(str, damaged))
            warn_user(f"lines of `{path}` are damaged, and their losses missing: {numbers}.")
        rank = int(path.stem.partition("-")[2])
        for attempt in attempts:
            if attempt["world_size"] <= rank:  # This rank took no part, and wrote no line of it.
                step, time_s = attempt["step"], attempt["time_s"]
                blocks = [
                    block for block in blocks if block["step"] <= step or block["time_s"] > time_s
                ]
        for block in blocks:
            losses += map(SampleLoss, *block["columns"])
    return losses


def _parsed_line(line: bytes) -> dict[str, Any] | None:
    """Return the data of a line; `None` if it is damaged."""
    try:
        block: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(line, validate=True)))
    except (ValueError, zlib.error):
        return None
    return block


def _may_be_cut_short(line: bytes) -> bool:
    """Tell whether a damaged line may be the beginning of a whole line."""
    try:
        zlib.decompressobj().decompress(base64.b64decode(line[: len(line) // 4 * 4], validate=True))
    except (ValueError, zlib.error):
        return False
    return True


def worst_samples(losses: Sequence[SampleLoss], count: int) -> list[list[SampleLoss]]:
    """Return the samples with the highest loss, by the last epoch in which each was trained on.

    Args:
        losses: the result of `read_losses`.
        count: number of samples to return.

    Returns:
        For each sample, from the highest loss down, its losses in the order of the epochs. A loss
        that is NaN counts as the highest.
    """
    samples: dict[tuple[str, int, int, int], list[SampleLoss]] = {}
    for loss in sorted(losses, key=lambda loss: loss.epoch):
        if loss.targets:
            key = (loss.source, loss.rank, loss.key, loss.repeat)
            samples.setdefault(key, []).append(loss)

    def last_loss(history: list[SampleLoss]) -> float:
        return math.inf if math.isnan(history[-1].loss) else history[-1].loss

    return sorted(samples.values(), key=last_loss, reverse=True)[:count]
