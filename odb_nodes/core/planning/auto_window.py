"""The `"auto"` window: as many samples as fill 32 groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from odb_nodes._support.checks import check_count
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.planning.budget import TokenBudget

AUTO: Literal["auto"] = "auto"
WindowSize = int | Literal["auto"]
"""Samples that wait in a pool; `"auto"`: a number that suits their lengths."""

LEAST_WINDOW, MOST_WINDOW = 128, 4096
"""Samples: the limits of `"auto"`. A first epoch begins with the least, for an early batch."""
POOLED_BUDGETS = 32
"""Groups that a pool holds, without padding. More groups would save little padding."""
SHORT_EPOCH_WINDOWS = 4
"""An epoch of at most so many windows is short: a first round from a pool of `LEAST_WINDOW` would
be a large part of the epoch."""
WindowStart = Literal["auto", "early", "full"]
"""Whether the first group of an epoch waits for the whole window."""
EARLY_EPOCH_WINDOWS = 32
"""With `"auto"`, epochs of fewer windows do not start early: padding would cost more than 0.002 of
the efficiency."""
_PARTS = 2**20  # parts of a budget: ranks report budgets as integers


class PulledLengths(NamedTuple):
    """Number and costs of the samples that were pulled."""

    samples: int = 0
    # tokens without padding, and attention; an oversize sample counts as one budget
    cost: int = 0
    patches: int = 0

    def plus(
        self, budget: TokenBudget, tokens: npt.ArrayLike, patches: npt.ArrayLike
    ) -> PulledLengths:
        """Return the sums with further samples of these tokens and patches, (n,)."""
        lengths = np.asarray(tokens, dtype=np.int64)
        costs = np.minimum(budget.row_cost(lengths), budget.tokens)
        all_patches = self.patches + int(np.sum(patches, dtype=np.int64))
        return PulledLengths(self.samples + len(lengths), self.cost + int(costs.sum()), all_patches)

    def report(self, budget: TokenBudget) -> tuple[int, int]:
        """Return the number of samples, and how many budgets they fill, in parts of 2**-20.

        A group is full if its tokens, samples or patches reach their limit. The limit that fills
        the most groups counts.
        """
        limits = (budget.tokens, budget.max_samples, budget.max_patches)
        counts = (self.cost, self.samples, self.patches)
        filled = (
            _PARTS * count // most
            for count, most in zip(counts, limits, strict=True)
            if most is not None
        )
        return self.samples, max(filled)


def budgets_filled(budget: TokenBudget, tokens: npt.ArrayLike, patches: npt.ArrayLike) -> float:
    """Return how many budgets samples of these tokens and patches, (n,), fill without padding."""
    return PulledLengths().plus(budget, tokens, patches).report(budget)[1] / _PARTS


def chosen_window(reports: Iterable[Sequence[int]]) -> int:
    """Return the window that suits the pulled samples of all ranks; 0 if there are none."""
    samples, parts = (sum(column) for column in zip(*reports, strict=True))
    if not samples:
        return 0
    window: int = (POOLED_BUDGETS * _PARTS * samples + parts // 2) // max(parts, 1)
    return min(max(window, LEAST_WINDOW), MOST_WINDOW)


def window_before_ranks_agree(report: Sequence[int], epoch_samples: int | None) -> int:
    """Return the window that a rank chooses alone in a first round; 0 to keep the present window.

    The groups of a first round are formed before the first messages between ranks.
    """
    window = chosen_window([report])
    is_short = epoch_samples is not None and epoch_samples <= SHORT_EPOCH_WINDOWS * window
    return window if is_short else 0


def window_samples(
    window: WindowSize, budget: TokenBudget, tokens: npt.ArrayLike, patches: npt.ArrayLike = ()
) -> int:
    """Return a window in samples; `"auto"`: for all samples, of these tokens and patches, (n,)."""
    if window != AUTO:
        return window
    return chosen_window([PulledLengths().plus(budget, tokens, patches).report(budget)])


def shown(window: WindowSize, samples: int) -> str:
    """Return a window as text for a table, with the number of samples for `"auto"`."""
    return f"auto ({samples:,})" if window == AUTO else f"{samples:,}"


def parse_window(text: str) -> WindowSize:
    """Return the window that a command line names."""
    return check_window("window", int(text) if text.lstrip("+-").isdecimal() else text)


def check_window(name: str, window: object) -> WindowSize:
    """Return a window."""
    if isinstance(window, str):
        if window != AUTO:
            raise ValueError(
                f'`{name}` must be "auto" or a number of samples, but is {window!r:.80} instead.'
            )
        return AUTO
    return check_count(name, window)


_GROUPS = 16  # groups that are checked
_LEAST_BUDGETS = 6.0  # with fewer in a pool, real / padded tokens is below 0.9 to 0.95 (simulated)
_GOOD_BUDGETS = 12.0
_MOST_PADDING = 0.15


class PoolCheck:
    """Warns if the first groups have much padding because the pool has too few samples."""

    def __init__(self, budget: TokenBudget) -> None:
        self._budget = budget
        self._groups = self._samples = self._real_tokens = self._padded_tokens = self._cost = 0

    def note(self, tokens: Sequence[int], window: int) -> None:
        """Count a group of these lengths, formed from a full pool of `window` samples."""
        if self._groups == _GROUPS:
            return
        self._groups += 1
        self._samples += len(tokens)
        self._real_tokens += sum(tokens)
        self._padded_tokens += self._budget.padded_tokens(tokens)
        self._cost += int(self._budget.row_cost(np.array(tokens, np.int64)).sum())
        if self._groups == _GROUPS and self._budget.layout == "padded":
            self._judge(window)

    def _judge(self, window: int) -> None:
        mean, mean_cost = self._real_tokens / self._samples, self._cost / self._samples
        most = self._budget.max_samples
        limit = min(self._budget.tokens, math.inf if most is None else most * mean_cost)
        pooled = window * mean_cost / limit
        padding = 1 - self._real_tokens / self._padded_tokens
        if pooled >= _LEAST_BUDGETS or padding <= _MOST_PADDING:
            return
        enough = math.ceil(_GOOD_BUDGETS * limit / mean_cost)
        warn_user(
            f"{padding:.0%} of the tokens of the first {_GROUPS} batches are padding: the pool of "
            f"{window} samples, {mean:.0f} tokens long on average, holds no more "
            f"than {pooled:.1f} budgets of {self._budget.tokens} tokens, too few to choose groups "
            f"of similar lengths. Raise the window to `window={enough}`, or lower the budget.",
            once=("padding", self._budget, window),
        )
