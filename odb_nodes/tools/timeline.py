"""What each rank's batch costs, step by step, as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odb_nodes._core.text import counted
from odb_nodes.monitor.figures import Figure, heat_map, page
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.simulation import Step

__all__ = ["Timeline"]

_SHADES = " ▁▂▃▄▅▆▇█"
_TEXT_COLUMNS = 80
_MOST_COLUMNS = 240


@dataclass(frozen=True, eq=False)
class Timeline:
    """The costs of a job's batches.

    Attributes:
        costs: tokens of each rank's batch at each step, padding and what attention adds included,
            (ranks, steps) float64; 0 where it fills.
        window: samples that wait on each rank.
    """

    costs: NDArray[np.float64]
    window: int

    @classmethod
    def of(cls, steps: Iterable[Step], budget: TokenBudget, window: int) -> Timeline:
        """Return the costs of steps."""
        costs = [
            [budget.cost([sample.tokens for sample in group]) if group else 0 for group in step]
            for step in steps
        ]
        if not costs:
            raise ValueError("there is no step to draw.")
        return cls(np.array(costs, dtype=np.float64).T, window)

    @property
    def balance(self) -> float:
        """Sum over the steps of the ranks' mean cost / sum of the dearest rank's."""
        return float(self.costs.mean(axis=0).sum() / self.costs.max(axis=0).sum())

    def __str__(self) -> str:
        shares = self._shares(_TEXT_COLUMNS)
        shades = np.rint(shares * (len(_SHADES) - 1)).astype(int).tolist()
        ranks = [
            f"{rank:>5} {''.join(_SHADES[one] for one in row)}" for rank, row in enumerate(shades)
        ]
        return "\n".join([f"{self._job}, {self._words(shares.shape[1])}", *ranks])

    def figure(self) -> Figure:
        """Return a figure of plotly with a row for each rank; costs as shares of the dearest."""
        shares = self._shares(_MOST_COLUMNS)
        title = f"Cost of each rank's batch, step by step: {self._job}"
        return heat_map(title, (self._words(shares.shape[1]), "rank"), shares)

    def to_html(self) -> str:
        """Return a page with the figure, which needs no network to be looked at."""
        return page("Timeline", [("", [self.figure()])])

    @property
    def _job(self) -> str:
        return f"{counted(len(self.costs), 'rank')}, window {self.window:,}"

    def _shares(self, most: int) -> NDArray[np.float64]:
        """Return mean costs of successive steps, relative to the highest: (ranks, columns)."""
        parts = np.array_split(self.costs, min(most, self.costs.shape[1]), axis=1)
        means = np.stack([part.mean(axis=1) for part in parts], axis=1)
        return np.asarray(means / (means.max() or 1.0))

    def _words(self, columns: int) -> str:
        steps = self.costs.shape[1]
        per_column = steps / columns
        return (
            f"{counted(steps, 'step')}"
            f"{f', {per_column:.1f} steps a column' if per_column > 1 else ''}; "
            f"dearest batch {self.costs.max():,.0f} tokens, balance {self.balance:.3f}, "
            f"{counted(int((self.costs == 0).sum()), 'filler slot')}"
        )
