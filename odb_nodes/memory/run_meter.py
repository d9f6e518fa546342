"""What the steps of a run take, and a model that goes on learning from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from odb_nodes._core.checks import check_type
from odb_nodes.memory.meter import MemoryMeter, check_meter, measuring
from odb_nodes.memory.model import MemoryModel
from odb_nodes.memory.parts import Part
from odb_nodes.planning import TokenBudget

_FIT_EVERY = 64  # parts
_FIRST_FIT = 8


class RunMeter:
    """Measures what is computed at once in a run.

    The model does not learn from the first optimizer step, which may be before the optimizer has
    its state. Nor does it from packed rows under a budget with `attention_tokens`: their attention
    grows with the lengths of the samples within, which rows and width do not tell.

    Attributes:
        peak_share: largest peak so far, as a share of the meter's limit.
    """

    def __init__(
        self, meter: MemoryMeter, model: MemoryModel | None, budget: TokenBudget | None
    ) -> None:
        self._meter = check_meter(meter)
        check_type("memory", model, MemoryModel | None)
        self._model, self._budget = model, budget
        self._has_shapes = (
            budget is None or budget.layout == "padded" or budget.attention_tokens is None
        )
        self._steps = self._learned = 0
        self._recent_share = 0.0  # until it is taken
        self.peak_share = 0.0

    @property
    def mean_error(self) -> float | None:
        """Mean relative error of the model's last 1,024 predictions; `None` before the first."""
        if self._model is None or not self._model.is_fitted:
            return None
        errors = self._model.accuracy().steps
        return errors.mean_error if errors.steps else None

    def begin_step(self) -> None:
        """Begin an optimizer step."""
        self._steps += 1

    def take_peak_share(self) -> float:
        """Return the largest peak since the last call, as a share of the meter's limit."""
        share, self._recent_share = self._recent_share, 0.0
        return share

    @contextmanager
    def measuring(self, part: Part) -> Iterator[None]:
        """Measure what is computed within this context, unless it fails."""
        with measuring(self._meter):
            self._meter.reset()
            yield
            peak_bytes = self._meter.peak_bytes()
        share = peak_bytes / self._meter.limit_bytes
        self.peak_share = max(self.peak_share, share)
        self._recent_share = max(self._recent_share, share)
        if self._model is not None and peak_bytes > 0 and self._steps > 1 and self._has_shapes:
            self._learn(self._model, part, peak_bytes)

    def _learn(self, model: MemoryModel, part: Part, peak_bytes: int) -> None:
        tokens = [sample.tokens for sample in part.samples]
        rows, width = (len(tokens), max(tokens))
        if self._budget is not None:
            rows, width = self._budget.shape(tokens)
        patches = sum(sample.patches for sample in part.samples)
        sources = {sample.source for sample in part.samples}
        model.add(rows, width, patches, peak_bytes, sources.pop() if len(sources) == 1 else "")
        self._learned += 1
        if self._learned % _FIT_EVERY == 0 or self._learned == _FIRST_FIT:
            with suppress(ValueError):  # of points that are too few, as where all shapes are one
                model.fit()
