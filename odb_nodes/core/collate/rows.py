"""Samples of several rows that share a step: what they cost, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from odb_nodes._support.checks import check_callable
from odb_nodes.core.collate.protocol import Collate, copy_for_collate, takes_step
from odb_nodes.core.processing.observation import observe_sample
from odb_nodes.core.sample import Observation, Observe, Sample, Skipped
from odb_nodes.core.step_info import Batch, StepInfo
from odb_nodes.errors import SampleError


class RowsObserve:
    """An `observe` for samples that are lists of rows: the cost of all rows together.

    In packed groups, the tokens of a sample are the tokens of all its rows. In padded groups, a row
    of a batch has the length of the longest, so the tokens are rows times longest row, and all
    samples must have the same number of rows. A sample that is no list is one row.

    Args:
        observe: row -> tokens or `Observation`, as for a loader.
        layout: `TokenBudget.layout` of the groups.
    """

    def __init__(self, observe: Observe | None = None, layout: str = "packed") -> None:
        check_callable("observe", observe)
        self._observe = observe
        self._is_padded = layout != "packed"
        self._rows = 0  # of each sample of padded groups

    def __call__(self, data: Any) -> Observation:
        """Return the cost of a sample.

        Raises:
            SampleError: a row has no valid length; or samples of padded groups differ in rows.
        """
        rows = data if isinstance(data, list) else [data]
        samples: list[Sample] = []
        for row in rows:
            sample = observe_sample(row, self._observe)
            if isinstance(sample, Skipped):
                raise SampleError(
                    f"a row of a sample is skipped {sample.why} Put a sample without it."
                )
            samples.append(sample)
        lengths = [sample.tokens for sample in samples]
        tokens = sum(lengths)
        if self._is_padded:
            self._rows = self._rows or len(rows)
            if len(rows) != self._rows:
                raise SampleError(
                    f"samples of padded groups must have the same number of rows, but one has "
                    f'{len(rows)} and the first had {self._rows}. Use `layout="packed"`.'
                )
            tokens = len(rows) * max(lengths)
        return Observation(
            tokens,
            sum(sample.targets for sample in samples),
            sum(sample.patches for sample in samples),
            task=samples[0].task or None,
        )


class RowsCollate:
    """Makes a batch of the rows of all samples: `collate_fn` gets a list of rows.

    Args:
        collate_fn: list of rows -> batch, such as a `PackedCollate`.
    """

    def __init__(self, collate_fn: Collate) -> None:
        check_callable("collate_fn", collate_fn)
        self._collate = collate_fn
        if takes_step(collate_fn):
            self.collate_step: Callable[[list[Any], StepInfo], Batch] = self._collate_step

    def __call__(self, samples: list[Any]) -> Batch:
        """Return the batch of all rows of samples."""
        return self._collate(_rows_of(samples))

    def _collate_step(self, samples: list[Any], info: StepInfo) -> Batch:
        batch: Batch = self._collate.collate_step(_rows_of(samples), info)  # type: ignore[attr-defined]
        return batch


def _rows_of(samples: list[Any]) -> list[Any]:
    rows: list[Any] = []
    for sample in samples:
        rows += map(copy_for_collate, sample) if isinstance(sample, list) else [sample]
    return rows
