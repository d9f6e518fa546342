"""Compare the observed lengths of samples with the lengths that were given before."""

from __future__ import annotations

from dataclasses import dataclass, replace

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.user_warning import warn_user
from odb_nodes.errors import SampleError

_LEAST_SEEN = 1024  # samples that are processed before lengths may be refused
_MOST_MOVED = 0.25  # share of samples that may not fit into the group that was planned for them


@dataclass(frozen=True)
class LengthCheck:
    """Counts of the samples of an epoch so far, for a comparison with the given lengths."""

    seen: int = 0  # processed samples
    moved: int = 0  # processed samples that did not fit into their planned group
    # Since the last reset, of the samples that fitted: their number and their tokens.
    compared: int = 0
    observed_tokens: int = 0
    given_tokens: int = 0

    def with_group(
        self,
        lengths: IntArray,
        seen: int,
        fitting: tuple[IntArray, IntArray],
        moved: tuple[IntArray, IntArray],
    ) -> LengthCheck:
        """Return the counts after a planned group of `seen` samples.

        lengths: the given length of each sample of the dataset, (n,); fitting, moved: numbers and
        observed lengths of the samples that fit into the group, and of its other samples.

        Raises:
            SampleError: too many samples did not fit.
        """
        numbers, tokens = fitting
        after = replace(
            self,
            seen=self.seen + seen,
            moved=self.moved + len(moved[0]),
            compared=self.compared + len(numbers),
            observed_tokens=self.observed_tokens + int(tokens.sum()),
            given_tokens=self.given_tokens + int(lengths[numbers].sum()),
        )
        if len(moved[0]) and after.seen >= _LEAST_SEEN and after.moved > _MOST_MOVED * after.seen:
            number, length = int(moved[0][0]), int(moved[1][0])
            raise SampleError(
                f"`lengths` must be the lengths of processed samples, but of the first "
                f"{after.seen} samples of the epoch, {after.moved} did not fit into their planned "
                f"batch, such as sample {number}, which has {length} tokens in place of "
                f"{lengths[number]}. Save lengths anew with `odb-nodes profile --save-lengths`, or "
                "leave `lengths` out."
            )
        if after.compared >= _LEAST_SEEN and 2 * after.observed_tokens < after.given_tokens:
            warn_user(
                f"`lengths` say that the first {after.compared} samples have {after.given_tokens} "
                f"tokens, but they have {after.observed_tokens}: batches are less than half full. "
                "Pass the lengths of processed samples, or leave `lengths` out.",
                once="lengths",
            )
        return after
