"""How evenly runs of samples mix their tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from odb_nodes._core.checks import check_fraction
from odb_nodes.errors import SampleError
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.table import IntArray
from odb_nodes.sample import Sample, Skipped, name_of

_UNIT = 2.0**24
"""What count x log(count) is multiplied by to be an integer: exact enough, and below 2**63."""


def check_diversity(diversity: Any, budget: TokenBudget) -> float:
    """Return `diversity` as a float."""
    weight = check_fraction("diversity", diversity)
    if weight and budget.layout == "packed":
        raise ValueError(
            f"`diversity` must be 0 where groups are packed, but is {diversity} instead. A packed "
            "row is filled with the oldest samples, so it is mixed as the data is."
        )
    return weight


def check_has_task(sample: Sample | Skipped) -> None:
    """Raise a `SampleError` where a sample has no task, and so no part in a mix."""
    if isinstance(sample, Sample) and not sample.task_name:
        raise SampleError(
            f"`diversity` must be 0 where samples have no task, but a sample{name_of(sample)} has "
            "none. Mix a dict of datasets, whose names are the tasks, or return "
            "`Observation(tokens, task=...)` from `observe`."
        )


def diversities(tasks: IntArray, first: IntArray, stop: IntArray) -> NDArray[np.float64]:
    """Return how evenly each run mixes the tasks of a pool: from 0, one task, to 1, all alike.

    It is the entropy of the run's counts of tasks, divided by the logarithm of the number of tasks
    in the pool. Which task has which number makes no difference, not even in the last bit.

    Args:
        tasks: number of the task of each pooled sample, (n,) int64.
        first: index of the first sample of each run, (m,) int64.
        stop: index after the last one, (m,) int64, above `first`.
    """
    rows = stop - first
    kinds = np.flatnonzero(np.bincount(tasks))
    if len(kinds) < 2:
        return np.zeros(len(rows))
    # With counts c of n rows, the entropy is log n - (sum of c log c) / n. The terms are integers,
    # whose sum has no order.
    counts = np.arange(int(rows.max()) + 1)
    terms = np.rint(counts * np.log(np.maximum(counts, 1)) * _UNIT).astype(np.int64)
    entropies = terms[rows]
    seen = np.zeros(len(tasks) + 1, dtype=np.int64)
    for kind in kinds:
        np.cumsum(tasks == kind, out=seen[1:])
        entropies -= terms[seen[stop] - seen[first]]
    diversity: NDArray[np.float64] = entropies / (rows * (np.log(len(kinds)) * _UNIT))
    return diversity
