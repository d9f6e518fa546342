"""The loss of each sample in each epoch, in a file of each rank.

A file is a sequence of blocks, one for each record:

    head      magic, CRC-32 of what follows, steps before the block, its last step, epoch, samples,
              bytes of its body
    body      deflated: names of the sources as JSON and a zero byte; then columns: keys, repeats,
              numbers of sources, supervised tokens, mean losses. A name in brackets is that of a
              source whose keys are of this rank alone

All numbers are little-endian. A block ends the validity of those before it that are of later steps
than it begins after: they are of an attempt that was gone back behind.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from odb_nodes._core.files import LockedFile
from odb_nodes.monitor.records import FILE, Record, parse_run

__all__ = ["SampleLoss", "read_losses", "worst_samples"]

ALL_RANKS = -1  # in place of a rank, where a key means the same sample on all of them

_MAGIC = b"ODBLOSS1"
_HEAD = struct.Struct("<8sIIIIII")
_CHECKED = len(_MAGIC) + 4  # bytes before what the CRC is of
_COLUMNS = (
    ("<i8", "key"),
    ("<i8", "repeat"),
    ("<u2", "source"),
    ("<u4", "targets"),
    ("<f4", "loss"),
)


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


class LossBook:
    """Appends the losses of samples to the file of a rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = LockedFile(
            folder / f"losses-{rank:05d}.bin", "Give each run a folder of its own."
        )
        self._file.open()

    def write(self, samples: Sequence[SampleLoss], before: int, step: int) -> None:
        """Append the losses of some steps."""
        if not samples:
            return
        sources = sorted({(one.source, one.rank != ALL_RANKS) for one in samples})
        names = [[name] if is_own else name for name, is_own in sources]
        numbers = {source: number for number, source in enumerate(sources)}
        values = {name: [getattr(one, name) for one in samples] for _, name in _COLUMNS}
        values["source"] = [numbers[one.source, one.rank != ALL_RANKS] for one in samples]
        columns = [np.array(values[name], dtype=kind).tobytes() for kind, name in _COLUMNS]
        body = zlib.compress(b"".join([json.dumps(names).encode(), b"\0", *columns]), 1)
        head = _HEAD.pack(_MAGIC, 0, before, step, samples[0].epoch, len(samples), len(body))
        crc = zlib.crc32(head[_CHECKED:] + body)
        try:
            self._file.open()  # where it was deleted
            self._file.write(_MAGIC + crc.to_bytes(4, "little") + head[_CHECKED:] + body)
        except OSError as error:
            self._file.warn(error, "the losses of these samples are missing")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


@dataclass(frozen=True)
class _Block:
    before: int
    step: int
    epoch: int
    samples: int
    body: bytes

    def losses(self, rank: int) -> Iterator[SampleLoss]:
        """Yield what is in it, of the file of a rank."""
        text, _, data = zlib.decompress(self.body).partition(b"\0")
        at = 0
        sources = [
            (name, ALL_RANKS) if isinstance(name, str) else (*name, rank)
            for name in json.loads(text)
        ]
        columns: dict[str, list[Any]] = {}
        for kind, name in _COLUMNS:
            columns[name] = np.frombuffer(data, kind, self.samples, at).tolist()
            at += np.dtype(kind).itemsize * self.samples
        rows = zip(*(columns[name] for _, name in _COLUMNS), strict=True)
        for key, repeat, source, targets, loss in rows:
            name, whose = sources[source]
            yield SampleLoss(name, key, repeat, self.epoch, targets, loss, whose)


def read_losses(folder: str | os.PathLike[str]) -> list[SampleLoss]:
    """Return the losses of all samples, rank by rank in the order of the steps.

    Blocks that a kill has cut short, or that are damaged, are left out, and those of steps that a
    later attempt does not count any more.

    Args:
        folder: the folder of a run under `Monitor(losses_by_sample=True)`; others have none.

    Raises:
        ValueError: the records of the run were written by a later version.
    """
    found: list[SampleLoss] = []
    folder = Path(folder)
    attempts = parse_run(folder)[0].attempts if (folder / FILE).is_file() else []
    for path in sorted(folder.glob("losses-[0-9][0-9][0-9][0-9][0-9].bin")):
        rank = int(path.stem.partition("-")[2])
        blocks: list[_Block] = []
        for block in _blocks(path.read_bytes()):
            blocks = [one for one in blocks if one.step <= block.before]
            blocks.append(block)
        last = _last_step(attempts, rank)
        found += (one for block in blocks if block.step <= last for one in block.losses(rank))
    return found


def _last_step(attempts: Sequence[Record], rank: int) -> float:
    """Return up to which step the file of a rank counts: the last attempts may be without it."""
    last = math.inf
    for attempt in reversed(attempts):
        if attempt["world_size"] > rank:
            break
        last = min(last, attempt["step"])
    return last


def _blocks(data: bytes) -> Iterator[_Block]:
    at = data.find(_MAGIC)
    while at >= 0:
        head = data[at : at + _HEAD.size]
        after = at + 1
        if len(head) == _HEAD.size:
            _, crc, before, step, epoch, samples, size = _HEAD.unpack(head)
            body = data[at + _HEAD.size : at + _HEAD.size + size]
            if len(body) == size and zlib.crc32(head[_CHECKED:] + body) == crc:
                yield _Block(before, step, epoch, samples, body)
                after = at + _HEAD.size + size
        at = data.find(_MAGIC, after)


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
    for one in losses:
        if one.targets:
            samples.setdefault((one.source, one.rank, one.key, one.repeat), []).append(one)
    for history in samples.values():
        history.sort(key=lambda one: one.epoch)

    def last_loss(history: list[SampleLoss]) -> float:
        return math.inf if math.isnan(history[-1].loss) else history[-1].loss

    return sorted(samples.values(), key=last_loss, reverse=True)[:count]
