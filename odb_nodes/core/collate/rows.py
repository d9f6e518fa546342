"""Samples of several rows that share a step: what they cost, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast, get_args

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_bool, check_callable, check_choice
from odb_nodes._support.hashing import stable_name
from odb_nodes.core.collate.packed_collate import KEPT, PackedCollate
from odb_nodes.core.collate.padding_collate import PaddingCollate
from odb_nodes.core.collate.protocol import Collate, copy_for_collate, takes_step
from odb_nodes.core.collate.token_rows import TokenRows, is_number, token_array
from odb_nodes.core.planning.budget import Layout
from odb_nodes.core.processing.observation import observe_sample
from odb_nodes.core.sample import IGNORE_INDEX, Observation, Observe, Sample, Skipped
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
        share_prefix: whether tokens that a row shares with the row before it are counted once, as
            in the batches of `RowsCollate(share_prefix=True)`.
    """

    def __init__(
        self, observe: Observe | None = None, layout: str = "packed", *, share_prefix: bool = False
    ) -> None:
        check_callable("observe", observe)
        check_choice("layout", layout, get_args(Layout))
        self._observe = observe
        self._is_padded = layout != "packed"
        self._shares_prefix = check_bool("share_prefix", share_prefix)
        if self._shares_prefix and self._is_padded:
            raise ValueError(
                f'`layout` must be "packed" with `share_prefix`, but is {layout!r} instead. Use '
                '`TokenBudget(layout="packed")`.'
            )
        self._rows = 0  # of each sample of padded groups

    @property
    def fingerprint_name(self) -> str:
        """Its name in a state, with the options that decide the groups."""
        options = [] if self._observe is None else [stable_name(self._observe)]
        if self._is_padded:
            options.append('layout="padded"')
        if self._shares_prefix:
            options.append("share_prefix=True")
        return f"RowsObserve({', '.join(options)})" if options else "RowsObserve"

    def __call__(self, data: Any) -> Observation:
        """Return the cost of a sample.

        Raises:
            SampleError: there is no row, a row has no valid length, or samples of padded groups
                differ in rows.
        """
        rows = _rows(data)
        if not rows:
            raise SampleError(
                "a sample must have a row or more, but is an empty list. Return "
                "`Skipped(reason, text)` from processing to leave it out."
            )
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
        if self._shares_prefix:
            tokens -= int(_shared_tokens(rows).sum())
        return Observation(
            tokens,
            sum(sample.targets for sample in samples),
            sum(sample.patches for sample in samples),
            task=samples[0].task or None,
        )


class RowsCollate:
    """Makes a batch of the rows of all samples: `collate_fn` gets a list of rows.

    With `share_prefix`, the leading tokens that a row of a sample has in common with the row before
    it are in the batch once, and the mask lets both rows attend to them. Losses and gradients are
    those of whole rows: a row shares only tokens at which it predicts nothing, so the last token of
    a prompt is repeated at the head of each answer. On shared tokens, other `token_keys` have the
    values of the first row that holds them.

    Args:
        collate_fn: list of rows -> batch, such as a `PackedCollate`.
        share_prefix: needs a `PackedCollate` with `mask_dtype`, and `labels` in the rows.
    """

    def __init__(self, collate_fn: Collate, *, share_prefix: bool = False) -> None:
        check_callable("collate_fn", collate_fn)
        self.collate_fn = collate_fn
        self.shares_prefix = check_bool("share_prefix", share_prefix)
        if self.shares_prefix:
            _check_shares(collate_fn)
        if takes_step(collate_fn):
            self.collate_step: Callable[[list[Any], StepInfo], Batch] = self._collate_step

    def __call__(self, samples: list[Any]) -> Batch:
        """Return the batch of all rows of samples."""
        with _naming_samples(samples):
            if self.shares_prefix:
                return self._share(cast("PackedCollate", self.collate_fn), samples)
            return self.collate_fn(_copied_rows(samples))

    def check(self, sample: Any) -> None:
        """Raise an error for a sample that a collate function of this package would refuse."""
        is_ours = type(self.collate_fn) in (PaddingCollate, PackedCollate)
        if is_ours and not isinstance(sample, Skipped):
            collate = cast("TokenRows", self.collate_fn)
            collate.group_of([*map(collate.prepare, _rows(sample))])

    def _collate_step(self, samples: list[Any], info: StepInfo) -> Batch:
        with _naming_samples(samples):
            batch: Batch = self.collate_fn.collate_step(_copied_rows(samples), info)  # type: ignore[attr-defined]
            return batch

    def _share(self, collate: PackedCollate, samples: list[Any]) -> Batch:
        """Return the batch in which each row is without the tokens that it shares."""
        pieces: list[Any] = []
        shared: list[IntArray] = []
        for sample in samples:
            rows = [*map(collate.prepare, _rows(sample))]
            collate.check_mappings(rows)
            shared.append(_shared_tokens(rows))
            for row, count in zip(rows, shared[-1], strict=True):
                pieces.append(_without(count, row, collate.token_keys))
        return collate.batch_of(collate.group_of(pieces), np.concatenate(shared))


@contextmanager
def _naming_samples(samples: list[Any]) -> Iterator[None]:
    """Turn the row that an error is about into its sample."""
    try:
        yield
    except SampleError as error:
        if error.index is None:
            raise
        ends = np.cumsum([len(_rows(sample)) for sample in samples])
        index = int(np.searchsorted(ends, error.index, side="right"))
        raise SampleError(str(error), index) from error


def _check_shares(collate: Collate) -> None:
    # Not a subclass, whose `__call__` would not be called.
    packed = collate if type(collate) is PackedCollate else None
    if packed is None or packed.mask_dtype is None or packed.sample_multiple > 1:
        raise ValueError(
            "`collate_fn` must be a `PackedCollate` with a `mask_dtype` and without a "
            f"`sample_multiple` for `share_prefix`, but is {collate!r:.200} instead. Pass "
            '`PackedCollate.of(budget, mask_dtype=torch.bool)` for "sdpa", or the dtype of the '
            'model for "eager".'
        )


def _rows(sample: Any) -> list[Any]:
    """Return the rows of a sample; a sample that is no list is one row."""
    return sample if isinstance(sample, list) else [sample]


def _copied_rows(samples: list[Any]) -> list[Any]:
    return [copy_for_collate(row) for sample in samples for row in _rows(sample)]


def _shared_tokens(rows: Sequence[Mapping[str, Any]]) -> IntArray:
    """Return how many leading tokens each row shares with the row before it, (n,)."""
    shared = np.zeros(len(rows), np.int64)
    for index, (before, row) in enumerate(pairwise(rows), 1):
        counts = [_equal(key, before, row) for key in _SEEN_KEYS if key in before or key in row]
        shared[index] = min(_silent(row), *counts)
    return shared


_SEEN_KEYS = ("input_ids", "token_type_ids")  # what a model sees of a token


def _equal(key: str, before: Mapping[str, Any], row: Mapping[str, Any]) -> int:
    """Return how many leading values of a key are equal in two rows."""
    if key not in before or key not in row:
        return 0
    pair = [token_array(key, sample[key]) for sample in (before, row)]
    length = min(map(len, pair))
    differs = np.flatnonzero(pair[0][:length] != pair[1][:length])
    return int(differs[0]) if differs.size else length


def _silent(row: Mapping[str, Any]) -> int:
    """Return how many leading tokens predict nothing; of a row without targets, all but one."""
    labels = row.get("labels")
    if labels is None or is_number(labels):
        return 0
    labels = token_array("labels", labels)
    targets = np.flatnonzero(labels[1:] != IGNORE_INDEX)
    return int(targets[0]) if targets.size else max(0, len(labels) - 1)


def _without(count: int, row: Mapping[str, Any], token_keys: Sequence[str]) -> dict[str, Any]:
    """Return a prepared row without its first tokens, and without what `PackedCollate` checks."""
    kept = {key: value for key, value in row.items() if key not in KEPT}
    for key in kept.keys() & token_keys:
        value = kept[key]
        if isinstance(value, np.ndarray) and value.ndim:
            kept[key] = value[count:]
    return kept
