"""The result of an audit: of all epochs, and of each epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from odb_nodes._support.checks import check_count
from odb_nodes._support.text import counted, named_ranks

DIGEST_BYTES = 32
Digests = npt.NDArray[np.uint8]
"""Digest of each step, (steps, DIGEST_BYTES)."""


def digest_of_steps(step_digests: Digests) -> str:
    """Return the digest of steps, made from the digest of each."""
    return blake2b(step_digests.tobytes(), digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, kw_only=True)
class EpochAudit:
    """The result of an audit for one epoch.

    Attributes:
        epoch: number of the epoch.
        steps: number of recorded steps.
        last_step: the last recorded step.
        world_sizes: numbers of ranks that trained the epoch, in order: several if the number
            changed within the epoch.
        is_complete: whether all steps of the epoch are recorded, on all ranks, to the end.
        fates: fate -> number of samples: `"trained"`, `"dropped"`, `"excluded"`,
            `"unemitted"`, or `"skipped (reason)"`.
        filler: number of filler steps, summed over the ranks.
        digest: 64 hexadecimal digits: equal for two runs in which every rank had the same samples
            with the same fates at every step.
        step_digests: (steps, 32) uint8, digest of each recorded step over all ranks.
    """

    epoch: int
    steps: int
    last_step: int
    world_sizes: tuple[int, ...]
    is_complete: bool
    fates: dict[str, int]
    filler: int
    digest: str
    step_digests: Digests = field(repr=False, compare=False)

    def digest_of_first(self, steps: int) -> str:
        """Return the digest of the first recorded steps.

        Args:
            steps: number of steps; if fewer are recorded, all of them.

        Raises:
            TypeError, ValueError: `steps` is not a number of at least 0.
        """
        return digest_of_steps(self.step_digests[: check_count("steps", steps, 0)])

    def __str__(self) -> str:
        extent = "complete" if self.is_complete else f"partial, to step {self.last_step:,}"
        fates = ", ".join(f"{count:,} {fate}" for fate, count in self.fates.items())
        return (
            f"epoch {self.epoch}: {extent}; {counted(self.steps, 'step')}; "
            f"{fates or 'no samples'}; {counted(self.filler, 'filler step')}\n"
            f"  digest {self.digest}"
        )


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit; `str(audit)` is its report.

    Attributes:
        folder: the folder of the ledger.
        attempts: rank -> the epoch and step at which each attempt begins.
        epochs: the result for each recorded epoch.
        open_ranks: ranks without a recorded end: they still train, were killed, or lost their last
            records.
        problems: what is missing, double, changed or damaged, with rank, step and key.
        notes: further facts, and what could not be checked.
    """

    folder: str
    attempts: dict[int, tuple[tuple[int, int], ...]]
    epochs: tuple[EpochAudit, ...]
    open_ranks: tuple[int, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether each sample has one fate per epoch, and no step is missing.

        An `"open"` run is only `ok` if each of its epochs is complete.
        """
        is_whole = bool(self.epochs) and all(epoch.is_complete for epoch in self.epochs)
        return self.state == "ended" or (self.state == "open" and is_whole)

    @property
    def state(self) -> Literal["ended", "open", "damaged"]:
        """The verdict on the records.

        `"damaged"` if there is a problem; else `"ended"` if all ranks have recorded the end of the
        run; else `"open"`: no problem so far, but records may be missing at the end.
        """
        if self.problems:
            return "damaged"
        return "open" if self.open_ranks else "ended"

    def __str__(self) -> str:
        ranks_of: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank, starts in self.attempts.items():
            ranks_of.setdefault(starts, []).append(rank)
        lines = [f"{self.folder}: {self._verdict()}"]
        for starts, ranks in ranks_of.items():
            line = f"{named_ranks(ranks)}: {counted(len(starts), 'attempt')}"
            if starts:
                line += ", from "
                line += ", ".join(f"epoch {epoch} step {step}" for epoch, step in starts)
            lines.append(line)
        lines += [str(epoch) for epoch in self.epochs]
        lines += [f"note: {text}" for text in self.notes]
        lines += [f"PROBLEM: {text}" for text in self.problems]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.problems:
            return counted(len(self.problems), "problem")
        if self.open_ranks:
            return f"{'OK so far' if self.ok else 'OPEN, no problem so far'}; no end is recorded"
        starts = [starts[0] for starts in self.attempts.values() if starts]
        epoch, step = min(starts, default=(0, 0))
        return f"OK from epoch {epoch} step {step}; no earlier step is recorded" if step else "OK"
