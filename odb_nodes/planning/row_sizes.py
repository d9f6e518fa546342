"""The numbers of rows that groups may have."""

from __future__ import annotations

from typing import Literal

import numpy as np

from odb_nodes.planning.table import IntArray

RowSizes = Literal["any", "even", "friendly"]

_FRIENDLY: IntArray = np.array(
    sorted({1 << n for n in range(32)} | {3 << n for n in range(31)}), dtype=np.int64
)


def allowed_rows(rows: IntArray, sizes: RowSizes) -> IntArray:
    """Return, for each number of rows, the largest that is allowed and no larger.

    Args:
        rows: numbers of at least 1, (n,) int64.
        sizes: `"even"` allows 1 and all even numbers; `"friendly"` 2**n and 3 * 2**n.
    """
    allowed: IntArray = rows
    if sizes == "even":
        allowed = np.maximum(rows - rows % 2, 1)
    elif sizes == "friendly":
        allowed = _FRIENDLY[np.searchsorted(_FRIENDLY, rows, side="right") - 1]
    return allowed
