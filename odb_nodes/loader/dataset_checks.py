"""What is given as a dataset by mistake, and mixtures that few people mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
import torchdata.nodes

from odb_nodes._core.checks import describe
from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment import RankAligner
from odb_nodes.collate.token_rows import TOKEN_KEYS
from odb_nodes.loader.loader import Loader
from odb_nodes.nodes import GroupCollator, ReadAhead, WindowBucketer
from odb_nodes.sample import CLASS_KEYS
from odb_nodes.sources.mixing import Stop

_COLUMNS = sorted({*TOKEN_KEYS, *CLASS_KEYS})
_OF_GROUPS = (WindowBucketer, RankAligner, GroupCollator, ReadAhead)
_FAR_APART = 10
"""Sizes of datasets that differ by this factor are warned of where nobody has given weights."""

_FATE = {
    "all_exhausted": "is read up after {share:.1%} of the epoch, and is missing from the rest",
    "first_exhausted": "ends the epoch when it is read up, after {share:.1%} of all samples",
    "cycle": "is read {passes:.0f} times for each time that {largest!r} is",
}


def check_no_columns(dataset: Any) -> None:
    """Raise a `TypeError` for a dict of columns, which is no mixture of datasets.

    It has `input_ids`, labels or the like that are numbers, or rows of them.
    """
    if not isinstance(dataset, Mapping):
        return
    columns = [name for name in _COLUMNS if name in dataset and _is_column(dataset[name])]
    if columns:
        raise TypeError(
            "`dataset` must be a dataset, or a dict of datasets to mix, but is a "
            f"`{type(dataset).__name__}` with the columns {columns}. Pass "
            "`datasets.Dataset.from_dict(columns)`, or a list with a dict for each sample."
        )


def check_is_dataset(dataset: Any) -> None:
    """Raise a `TypeError` for a loader, and for a node that yields groups or batches."""
    remedy = ""
    if isinstance(dataset, (Loader, torchdata.nodes.Loader)):
        remedy = "iterates a graph already. Pass its node, `loader.root`, if that yields samples"
    elif getattr(type(dataset), "yields_batches", False):
        remedy = "yields batches already. Pass the dataset that it reads, or iterate it as it is"
    elif type(dataset).__module__.partition(".")[0] == "pandas":
        remedy = "yields its columns. Pass `datasets.Dataset.from_pandas(frame)`"
    elif isinstance(dataset, dict) and dataset and all(isinstance(name, str) for name in dataset):
        remedy = "has no samples at 0, 1, 2 and so on. Mixtures do not nest: name all its datasets"
    elif isinstance(dataset, _OF_GROUPS):
        remedy = "yields groups or batches. Iterate it by `Loader(node)`, or pass one of samples"
    if remedy:
        raise TypeError(
            f"`dataset` must be a dataset, but is {describe(dataset)} instead, which {remedy}. "
            "How nodes of your own become a graph is in docs/composing.md."
        )


def warn_of_sizes(sizes: Mapping[str, int], stop: Stop) -> None:
    """Warn of equal shares by default where the sizes of datasets are far apart.

    Args:
        sizes: name -> number of samples, at least 1.
        stop: when an epoch ends.
    """
    smallest, largest = (pick(sizes, key=sizes.__getitem__) for pick in (min, max))
    if sizes[largest] < _FAR_APART * sizes[smallest]:
        return
    share = sizes[smallest] * len(sizes) / sum(sizes.values())
    passes = sizes[largest] / sizes[smallest]
    fate = _FATE[stop].format(share=share, passes=passes, largest=largest)
    warn_user(
        f"`weights` are not given, so all datasets have equal shares, whatever their sizes {sizes}"
        f': {smallest!r} {fate}. Pass `weights="proportional"` for shares by size, or weights, '
        f"such as {dict.fromkeys(sizes, 1)} if equal shares are meant."
    )


def _is_column(value: Any) -> bool:
    if not isinstance(value, (Sequence, np.ndarray, torch.Tensor)) or isinstance(value, str):
        return False
    items = (Number, list, tuple, np.ndarray, torch.Tensor)
    return len(value) > 0 and isinstance(value[0], items)
