"""How the lengths of an epoch's samples compare with those that were told before they were read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from odb_nodes._core.user_warning import warn_user
from odb_nodes.errors import SampleError
from odb_nodes.planning.table import IntArray

_LEAST_SEEN = 1024  # samples, before lengths are refused
_MOST_MOVED = 0.25  # share of samples that may not fit into the group that was planned for them


@dataclass(frozen=True)
class ToldLengths:
    """How the samples of an epoch so far compare with the lengths that were told."""

    seen: int = 0  # samples that were processed
    moved: int = 0  # how many of them did not fit into the group that was planned for them
    # of those that did since the last reset
    compared: int = 0
    observed_tokens: int = 0
    told_tokens: int = 0

    def with_group(
        self,
        told: IntArray,
        seen: int,
        fitting: tuple[IntArray, IntArray],
        moved: tuple[IntArray, IntArray],
    ) -> ToldLengths:
        """Return this with a group that was processed.

        Args:
            told: the length that was told of each sample of the dataset, (n,).
            seen: how many samples the group was planned with.
            fitting: numbers and observed lengths of those that it holds.
            moved: the same of those that it does not hold.

        Raises:
            SampleError: many samples did not fit: the lengths are of no use.
        """
        rows, tokens = fitting
        after = replace(
            self,
            seen=self.seen + seen,
            moved=self.moved + len(moved[0]),
            compared=self.compared + len(rows),
            observed_tokens=self.observed_tokens + int(tokens.sum()),
            told_tokens=self.told_tokens + int(told[rows].sum()),
        )
        if len(moved[0]) and after.seen >= _LEAST_SEEN and after.moved > _MOST_MOVED * after.seen:
            row, length = int(moved[0][0]), int(moved[1][0])
            raise SampleError(
                f"`lengths` must be those of processed samples, but of the first {after.seen} "
                f"samples of the epoch, {after.moved} did not fit into the batch that was planned "
                f"for them, such as sample {row}, which has {length} tokens in place of "
                f"{told[row]}. Save them anew with `odb-nodes profile --save-lengths`, or leave "
                "`lengths` out."
            )
        if after.compared >= _LEAST_SEEN and 2 * after.observed_tokens < after.told_tokens:
            warn_user(
                f"`lengths` say that the first {after.compared} samples have {after.told_tokens} "
                f"tokens, but they have {after.observed_tokens}: batches are less than half full. "
                "Pass the lengths of processed samples, or leave `lengths` out.",
                once="lengths",
            )
        return after
