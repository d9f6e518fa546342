"""Reject values of `dataset` that look like datasets, and excluded keys of unknown sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
import torchdata.nodes
from torch.utils.data import ConcatDataset, Subset

from odb_nodes._support.checks import describe
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.alignment import RankAligner
from odb_nodes.core.collate.token_rows import TOKEN_KEYS
from odb_nodes.core.loader.loader import Loader
from odb_nodes.core.nodes import GroupCollator, ReadAhead, WindowBucketer
from odb_nodes.core.nodes.exclusions import ExcludedKeys
from odb_nodes.core.sample import CLASS_KEYS

_GROUP_NODES = (WindowBucketer, RankAligner, GroupCollator, ReadAhead)


def check_excluded(exclude: ExcludedKeys, names: list[str]) -> None:
    """Raise for keys of a source that does not exist; warn if sources have no names."""
    for source in exclude.sources:
        if source in names or any(source.startswith(f"{name}/") for name in names):
            continue
        if names:
            raise ValueError(
                f"`exclude` has keys of source {source!r}, but the sources are {sorted(names)}. "
                "Pass a dict of source -> keys, with the names that `StepInfo.row_sources` shows."
            )
        if source:
            warn_user(
                f"`exclude` has keys of source {source!r}, but `dataset` is no dict of sources, so "
                "they have no effect unless processing names that source."
            )


def check_no_columns(dataset: Any) -> None:
    """Raise a `TypeError` for a dict of columns of numbers, which is no mixture of datasets."""
    if not isinstance(dataset, Mapping):
        return
    names = sorted({*TOKEN_KEYS, *CLASS_KEYS} & {*dataset})
    if columns := [name for name in names if _is_column(dataset[name])]:
        raise TypeError(
            "`dataset` must be a dataset, or a dict of datasets to mix, but is a "
            f"`{type(dataset).__name__}` with the columns {columns}. Pass "
            "`datasets.Dataset.from_dict(columns)`, or a list with a dict for each sample."
        )


def _is_column(value: Any) -> bool:
    if not isinstance(value, (Sequence, np.ndarray, torch.Tensor)) or isinstance(value, str):
        return False
    return len(value) > 0 and isinstance(value[0], (Number, list, tuple, np.ndarray, torch.Tensor))


_ROWS_OF_TABLES = {
    "pandas": "`datasets.Dataset.from_pandas(frame)`, or `frame.to_dict('records')`; "
    "of a series, `series.tolist()`",
    "polars": "`datasets.Dataset.from_polars(frame)`, or `frame.to_dicts()`",
    "pyarrow.lib": "`datasets.Dataset(table)`, or `table.to_pylist()`",
    "datasets.table": "`datasets.Dataset(table)`",
}
"""Module of a table or column -> how to get the rows."""


def check_is_dataset(dataset: Any) -> None:
    """Raise a `TypeError` for a loader, a table, and a node that yields groups or batches."""
    if isinstance(dataset, (Subset, ConcatDataset)):
        for part in dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset.dataset]:
            check_is_dataset(part)
    remedy = ""
    module = type(dataset).__module__
    if getattr(type(dataset), "yields_batches", False):
        remedy = "yields batches already. Pass the dataset that it reads, or iterate it directly"
    elif isinstance(dataset, (Loader, torchdata.nodes.Loader)):
        remedy = "iterates a graph already. Pass its node, `loader.root`, if that yields samples"
    elif rows := _ROWS_OF_TABLES.get(module) or _ROWS_OF_TABLES.get(module.partition(".")[0]):
        remedy = f"yields columns or scalars, not rows. Pass {rows}"
    elif isinstance(dataset, dict) and dataset and all(isinstance(name, str) for name in dataset):
        remedy = "has no samples at 0, 1, 2 and so on. Mixtures do not nest: name all its datasets"
    elif isinstance(dataset, _GROUP_NODES):
        remedy = "yields groups or batches. Iterate it by `Loader(node)`, or pass a node of samples"
    if remedy:
        raise TypeError(
            f"`dataset` must be a dataset, but is {describe(dataset)} instead, which {remedy}. "
            "How nodes of your own become a graph is in docs/composing.md."
        )
