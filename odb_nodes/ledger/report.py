"""What an audit has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from odb_nodes._core.checks import check_count
from odb_nodes._core.text import counted, html_table, html_text

DIGEST_BYTES = 32


def digest_of(step_digests: npt.NDArray[np.uint8]) -> str:
    """Return the digest of some steps by those of each."""
    return blake2b(step_digests.tobytes(), digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, kw_only=True)
class EpochAudit:
    """What the ledger says of one epoch.

    Attributes:
        epoch: number of the epoch.
        steps: number of steps that are recorded.
        last_step: the last of them.
        world_sizes: numbers of ranks that it was trained with; more than one where that changed.
        is_complete: whether all of its steps are recorded, on all ranks, from the first to the one
            that ends it.
        fates: fate -> number of samples: `"trained"`, `"dropped"`, `"excluded"`,
            `"unemitted"`, or `"skipped (reason)"`.
        filler: number of steps of a rank that had no sample of its own.
        digest: of all steps, 64 hexadecimal digits: equal where two runs had the same samples with
            the same fates at every step of every rank.
        step_digests: digest of each recorded step, of what all ranks had, (steps, 32) uint8.
    """

    epoch: int
    steps: int
    last_step: int
    world_sizes: tuple[int, ...]
    is_complete: bool
    fates: dict[str, int]
    filler: int
    digest: str
    step_digests: npt.NDArray[np.uint8] = field(repr=False, compare=False)

    def digest_of_first(self, steps: int) -> str:
        """Return the digest of the first so many recorded steps.

        Args:
            steps: number of steps; all where fewer are recorded.

        Raises:
            TypeError, ValueError: `steps` is not a number of at least 0.
        """
        return digest_of(self.step_digests[: check_count("steps", steps, 0)])

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
    """What an audit of a ledger has found; as a string, a report to read.

    Attributes:
        folder: the folder of the ledger.
        attempts: rank -> the epoch and step at which each of its attempts begins.
        epochs: what is recorded of each epoch.
        open_ranks: ranks whose last attempt has no end: they go on, were killed, or their last
            records are missing.
        problems: what is missing, double, changed or damaged, by rank, step and key.
        notes: what else is to be known, and what could not be checked.
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

        Of a run that is `"open"`, this can be said only where each of its epochs is complete.
        """
        is_whole = bool(self.epochs) and all(epoch.is_complete for epoch in self.epochs)
        return self.state == "ended" or (self.state == "open" and is_whole)

    @property
    def state(self) -> Literal["ended", "open", "damaged"]:
        """What the records are.

        `"damaged"` where there is any problem; else `"ended"` where all ranks have recorded the end
        of the run; else `"open"`: nothing is wrong in what is recorded, but more may be missing.
        """
        if self.problems:
            return "damaged"
        return "open" if self.open_ranks else "ended"

    def _repr_html_(self) -> str:
        rows = [
            {
                "epoch": str(one.epoch),
                "steps": f"{one.steps:,}",
                "": "complete" if one.is_complete else f"partial, to step {one.last_step:,}",
                "samples": ", ".join(f"{count:,} {fate}" for fate, count in one.fates.items()),
                "filler steps": f"{one.filler:,}",
                "digest": one.digest[:12],
            }
            for one in self.epochs
        ]
        return html_table(rows) + html_text(str(self), "pre")

    def __str__(self) -> str:
        begun: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank, starts in self.attempts.items():
            begun.setdefault(starts, []).append(rank)
        lines = [f"{self.folder}: {self._verdict()}"]
        for starts, ranks in begun.items():
            places = ", ".join(f"epoch {epoch} step {step}" for epoch, step in starts)
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            lines.append(f"{who}: {counted(len(starts), 'attempt')}{places and ', from '}{places}")
        lines += [str(epoch) for epoch in self.epochs]
        lines += [f"note: {text}" for text in self.notes]
        lines += [f"PROBLEM: {text}" for text in self.problems]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.problems:
            return counted(len(self.problems), "problem")
        if not self.open_ranks:
            return "OK"
        return f"{'OK so far' if self.ok else 'OPEN, no problem so far'}; no end is recorded"
