"""The loss of each sample: computed with its batch, and kept over epochs in a file of each rank.

A file has a line for each record that had samples: JSON, deflated by zlib, whose checksum finds
damage, in base64. It has the steps before the record, its last step, epoch and rows, column by
column. A line ends the validity of those before it that are of later steps than it begins after:
they are of an attempt that was gone back behind.
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

from odb_nodes._core.files import LockedFile
from odb_nodes._core.user_warning import warn_user
from odb_nodes.monitor.records import FILE, parse_run
from odb_nodes.sample import IGNORE_INDEX

ALL_RANKS = -1  # in place of a rank, where a key means the same sample on all of them


class RowLosses(NamedTuple):
    """Losses of the samples of a batch, in the order of `StepInfo.keys`.

    Attributes:
        sums: (n,) float, the sum of the losses over the supervised tokens of each sample, with
            gradients. What is beyond the samples of the batch does not count.
        targets: (n,) int64, the number of these tokens.
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
    gradient: nothing needs to be computed twice.

    Args:
        logits: (B, T, vocabulary) float.
        labels: (B, T) int64; -100 where there is no target.
        position_ids: (1, T) or (4, 1, T) int64, those of a packed batch, which begin at 0 in each
            sample.
        shift: whether the logits of a token predict the label of the next one.

    Raises:
        ValueError: the shapes do not go together.
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
    positions = position_ids.reshape(-1, position_ids.shape[-1])[0]  # of (4, 1, T), the text's
    # As many as there are tokens, since how many there are is known on the device alone.
    sample = positions.eq(0).cumsum(0)[-labels.shape[1] :] - 1
    sums = losses.new_zeros(len(positions)).index_add(0, sample, losses[0])
    targets = torch.zeros_like(positions).index_add(0, sample, is_target[0].long())
    return RowLosses(sums, targets)


class SampleLoss(NamedTuple):
    """The loss of a sample when it was trained on.

    Attributes:
        source: name of its source.
        key: its key in the source.
        repeat: what tells it from itself, where it comes more than once in an epoch.
        epoch: number of the epoch.
        targets: its supervised tokens.
        loss: mean over them.
        rank: the rank whose key it is, where each has data of its own; -1 for a key of all ranks.
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
        self._file = LockedFile(path, "Give each run a folder of its own.")
        self._file.open()

    def write(self, samples: Sequence[SampleLoss], before: int, step: int) -> None:
        """Append the losses of the steps after `before` up to `step`, of one epoch."""
        if not samples:
            return
        rows = [one._replace(loss=float(f"{one.loss:.7g}")) for one in samples]
        columns = [*zip(*rows, strict=True)]
        block = {"before": before, "step": step, "time_s": int(time.time()), "columns": columns}
        line = base64.b64encode(zlib.compress(json.dumps(block).encode(), 1))
        try:
            self._file.open()  # where it was deleted
            self._file.write(b"\n" + line)  # after a line that a kill cut short, too
        except OSError as error:
            self._file.warn(error, "the losses of these samples are missing")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def read_losses(folder: str | os.PathLike[str]) -> list[SampleLoss]:
    """Return the losses of all samples, rank by rank in the order of the steps.

    Blocks that a kill has cut short are left out, and those of steps that a later attempt does not
    count any more; of others that are damaged it warns.

    Args:
        folder: the folder of a run under `Monitor(losses_by_sample=True)`; others have none.

    Raises:
        ValueError: the records of the run were written by a later version.
    """
    found: list[SampleLoss] = []
    folder = Path(folder)
    attempts = parse_run(folder)[0].attempts if (folder / FILE).is_file() else []
    for path in sorted(folder.glob("losses-[0-9][0-9][0-9][0-9][0-9].bin")):
        blocks: list[dict[str, Any]] = []
        damaged: list[int] = []
        cut: list[int] = []  # lines before this one, which a kill may have cut short
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            block = _block_of(line)
            if block is None:
                cut.append(number)
                continue
            blocks = [one for one in blocks if one["step"] <= block["before"]]
            if block["before"] > (blocks[-1]["step"] if blocks else 0):
                damaged += cut
            cut = []
            blocks.append(block)
        damaged += [number for number in cut if not _may_be_cut_short(lines[number - 1])]
        if damaged:
            numbers = ", ".join(map(str, damaged))
            warn_user(f"lines of `{path}` are damaged, and their losses missing: {numbers}.")
        rank = int(path.stem.partition("-")[2])
        for attempt in (one for one in attempts if one["world_size"] <= rank):  # not in this file
            step, time_s = attempt["step"], attempt["time_s"]
            blocks = [one for one in blocks if one["step"] <= step or one["time_s"] > time_s]
        for block in blocks:
            found += map(SampleLoss, *block["columns"])
    return found


def _block_of(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds; `None` for one that is damaged."""
    try:
        block: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(line, validate=True)))
    except (ValueError, zlib.error):
        return None
    return block


def _may_be_cut_short(line: bytes) -> bool:
    """Tell whether a line that is damaged may be the beginning of a whole one."""
    try:
        zlib.decompressobj().decompress(base64.b64decode(line[: len(line) // 4 * 4], validate=True))
    except (ValueError, zlib.error):
        return False
    return True


def worst_samples(losses: Sequence[SampleLoss], count: int) -> list[list[SampleLoss]]:
    """Return the samples with the highest loss in the last epoch that they were trained on in.

    Args:
        losses: what `read_losses` returned.
        count: how many samples.

    Returns:
        For each sample, from the highest loss down, its losses in the order of the epochs. What is
        not a number counts as the highest.
    """
    samples: dict[tuple[str, int, int, int], list[SampleLoss]] = {}
    for one in sorted(losses, key=lambda one: one.epoch):
        if one.targets:
            samples.setdefault((one.source, one.rank, one.key, one.repeat), []).append(one)

    def last_loss(history: list[SampleLoss]) -> float:
        return math.inf if math.isnan(history[-1].loss) else history[-1].loss

    return sorted(samples.values(), key=last_loss, reverse=True)[:count]
