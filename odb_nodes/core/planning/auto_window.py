"""The window that suits the lengths of the samples: so many samples that they fill 32 groups."""

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
"""Groups that a pool holds, without padding: more of them save little padding."""
SHORT_EPOCH_WINDOWS = 4
"""An epoch of no more windows is short: its first round is too large a part of it for a pool of
`LEAST_WINDOW`."""
WindowStart = Literal["auto", "early", "full"]
"""Whether the first group of an epoch waits for the whole window."""
EARLY_EPOCH_WINDOWS = 32
"""With `"auto"`, only epochs of so many windows or more start early: in shorter ones, padding costs
more than 0.002 of the efficiency."""
_PARTS = 2**20  # of a budget, so that ranks tell each other integers


class PulledLengths(NamedTuple):
    """Number and costs of the samples that were pulled."""

    samples: int = 0
    # tokens without padding, and attention; an oversize sample counts as one budget
    cost: int = 0
    patches: int = 0

    def and_of(
        self, budget: TokenBudget, tokens: npt.ArrayLike, patches: npt.ArrayLike
    ) -> PulledLengths:
        """Return these and further samples; tokens, patches: of each, (n,)."""
        lengths = np.asarray(tokens, dtype=np.int64)
        costs = np.minimum(budget.row_cost(lengths), budget.tokens)
        all_patches = self.patches + int(np.sum(patches, dtype=np.int64))
        return PulledLengths(self.samples + len(lengths), self.cost + int(costs.sum()), all_patches)

    def report(self, budget: TokenBudget) -> tuple[int, int]:
        """Return the number of samples, and the budgets that they fill, in parts of 2**-20.

        A group is full if one of tokens, samples and patches reaches its limit. The limit that
        fills the most groups counts.
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
    """Return how many budgets samples fill without padding; tokens, patches: of each, (n,)."""
    return PulledLengths().and_of(budget, tokens, patches).report(budget)[1] / _PARTS


def chosen_window(reports: Iterable[Sequence[int]]) -> int:
    """Return the window that suits the pulled samples of all ranks; 0 if there are none."""
    samples, parts = (sum(column) for column in zip(*reports, strict=True))
    if not samples:
        return 0
    window: int = (POOLED_BUDGETS * _PARTS * samples + parts // 2) // max(parts, 1)
    return min(max(window, LEAST_WINDOW), MOST_WINDOW)


def window_before_ranks_agree(report: Sequence[int], epoch_samples: int | None) -> int:
    """Return the window that a rank chooses alone in a first round; 0 to keep the present one.

    The groups of that round are formed before ranks tell each other anything.
    """
    window = chosen_window([report])
    is_short = epoch_samples is not None and epoch_samples <= SHORT_EPOCH_WINDOWS * window
    return window if is_short else 0


def window_samples(
    window: WindowSize, budget: TokenBudget, tokens: npt.ArrayLike, patches: npt.ArrayLike = ()
) -> int:
    """Return a window in samples; `"auto"`: the window that suits all samples of a dataset.

    `tokens`, `patches`: of each sample, (n,).
    """
    if window != AUTO:
        return window
    return chosen_window([PulledLengths().and_of(budget, tokens, patches).report(budget)])


def shown(window: WindowSize, samples: int) -> str:
    """Return a window for a table, and for `"auto"` its number of samples, too."""
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


_GROUPS = 16  # that are checked
_LEAST_BUDGETS = 6.0  # of pooled tokens: with fewer, real/padded is under 0.9 to 0.95 (simulated)
_GOOD_BUDGETS = 12.0
_MOST_PADDING = 0.15


class PoolCheck:
    """Warns if the first groups of a pool have much padding, since too few samples wait."""

    def __init__(self, budget: TokenBudget) -> None:
        self._budget = budget
        self._groups = self._samples = self._real_tokens = self._padded_tokens = self._cost = 0

    def note(self, tokens: Sequence[int], window: int) -> None:
        """Take a group of these lengths into account, formed from a full pool of `window`."""
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
            f"than {pooled:.1f} budgets of {self._budget.tokens} tokens, from which no group of "
            f"like lengths can be chosen. Raise it to `window={enough}`, or lower the budget.",
            once=("padding", self._budget, window),
        )
