"""How far off the predictions of a memory model were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Accuracy", "StepErrors"]


@dataclass(frozen=True, kw_only=True)
class StepErrors:
    """Errors of predictions that were made before their step was learned from.

    Attributes:
        steps: steps that are counted: the last ones.
        mean_error: mean of the errors' sizes, relative to the prediction.
        largest_under: most that a step took beyond its prediction, relative to it; 0 if none did.
        beyond_margin: share of the steps that took more than the prediction and its margin.
    """

    steps: int
    mean_error: float
    largest_under: float
    beyond_margin: float

    @classmethod
    def of(cls, errors: Sequence[float], margin: float) -> StepErrors:
        """Return the summary of relative errors, measured / predicted - 1."""
        if not errors:
            return cls(steps=0, mean_error=0.0, largest_under=0.0, beyond_margin=0.0)
        values = np.array(errors)
        return cls(
            steps=len(values),
            mean_error=float(np.abs(values).mean()),
            largest_under=max(float(values.max()), 0.0),
            beyond_margin=float((values > margin).mean()),
        )


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What a `MemoryModel` knows about its own errors. All are relative to the prediction.

    Attributes:
        points: points that the fit was made from.
        fit_error: largest error of these points.
        margin: what the budget allows for beyond the prediction.
        steps: errors of predictions for points that came after a fit.
        by_source: the same for the points of each source that was told.
    """

    points: int
    fit_error: float
    margin: float
    steps: StepErrors
    by_source: dict[str, StepErrors]
