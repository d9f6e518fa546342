"""What each rank's batch costs, step by step, as a picture."""

from __future__ import annotations

import numpy as np

from odb_nodes._core.text import counted
from odb_nodes.monitor.figures import heat_map, page
from odb_nodes.tools.simulate import Floats

_SHADES = " ▁▂▃▄▅▆▇█"
_TEXT_COLUMNS, _PAGE_COLUMNS = 80, 240


def timeline_text(costs: Floats, title: str) -> str:
    """Return a line of shades for each rank; the costs are (steps, ranks), 0 where it fills."""
    shares, words = _shares(costs, _TEXT_COLUMNS)
    shades = np.rint(shares * (len(_SHADES) - 1)).astype(int).tolist()
    ranks = [f"{rank:>5} {''.join(_SHADES[one] for one in row)}" for rank, row in enumerate(shades)]
    return "\n".join([f"{title}, {words}", *ranks])


def timeline_page(costs: Floats, title: str) -> str:
    """Return a page with a row of cells for each rank, which needs no network."""
    shares, words = _shares(costs, _PAGE_COLUMNS)
    title = f"Cost of each rank's batch, step by step: {title}"
    return page("Timeline", [("", [heat_map(title, (words, "rank"), shares)])])


def _shares(costs: Floats, most: int) -> tuple[Floats, str]:
    """Return mean costs of successive steps as shares of the highest, and what is said of all."""
    steps, columns = len(costs), min(most, len(costs))
    means = np.stack([one.mean(axis=0) for one in np.array_split(costs, columns)], axis=1)
    balance = costs.mean(axis=1).sum() / costs.max(axis=1).sum()
    together = f", {steps / columns:.1f} steps a column" if steps > columns else ""
    words = (
        f"{counted(steps, 'step')}{together}; highest cost {costs.max():,.0f}, "
        f"balance {balance:.3f}, {counted(int((costs == 0).sum()), 'filler slot')}"
    )
    return np.asarray(means / means.max()), words
