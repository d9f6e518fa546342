"""The table of a pool: one column per pooled sample, in order of (tokens, ordinal)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

TOKENS, ORDINALS, PATCHES = range(3)
"""Its rows."""
