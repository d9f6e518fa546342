"""How many samples have which length."""

from __future__ import annotations

import numpy as np

from odb_nodes.planning.table import IntArray

__all__ = ["histogram"]


def histogram(lengths: IntArray, bins: int) -> tuple[list[int], list[int]]:
    """Return edges that are evenly spaced by ratio, and how many lengths are between them."""
    edges = np.geomspace(lengths.min(), lengths.max() + 1, bins + 1).round().astype(np.int64)
    edges = np.unique(edges)
    counts, _ = np.histogram(lengths, edges)
    return edges.tolist(), counts.tolist()
