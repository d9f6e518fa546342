"""Internals of Hugging Face `datasets` that we rely on: storage of tables, stages of streams.

`datasets` is imported only for an object of it, so the user has imported it already.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

SPLIT_BY_SHARDS = {
    "ArrowExamplesIterable",
    "BufferShuffledExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "InterleavedShardsExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "ShuffledDataSourcesArrowExamplesIterable",
    "ShuffledDataSourcesExamplesIterable",
}
"""Stages whose items are the same on one rank and over ranks that each read some shards. Not
`take`, which would take its number of items on each rank."""

RESTORABLE = SPLIT_BY_SHARDS - {"BufferShuffledExamplesIterable"} | {
    "CyclingMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "RepeatExamplesIterable",
    "SkipExamplesIterable",
    "TakeExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}
"""Stages whose own state restores all later items. Not a shuffle buffer: `datasets` refills it,
and loses its items."""

_RESTORES_SINCE = (5, 1)
"""In earlier versions, the state of `.map()` or `.filter()` over Arrow data is up to a whole table
(1,000 rows) too far (datasets#7630, #8145, #8359); in 5.0.0, a stream that was restored before
saves the state of its beginning (#8308). Observed by resuming in 3.6 to 5.2."""

_ROW_FORMATS = (None, "numpy", "torch")
_ROW_OPTIONS = {"device", "dtype"}
"""Formats and options that read a list of a row as a list, array or tensor of its values."""


def restores_exactly() -> bool:
    """Return whether this version of `datasets` restores the position of a stream exactly."""
    import datasets

    return tuple(map(int, re.findall(r"\d+", datasets.__version__)[:3])) >= _RESTORES_SINCE


def is_plain_table(dataset: Any) -> bool | None:
    """Return whether a row of a table is the same in any slice; `None` if this is no table.

    True for plain Python values, and for arrays and tensors of lists of integers without nulls.
    False for a table that applies a transform, decodes images or sound, or makes arrays of other
    columns: their dtype depends on the slice, since a null turns integers into floats.
    """
    if not is_table(dataset):
        return None
    from datasets.features.features import require_decoding

    if dataset.format["type"] is None:
        return not any(map(require_decoding, dataset.info.features.values()))
    columns = shown_columns(dataset)
    return columns is not None and all(_has_whole_lists(dataset, name) for name in columns)


def _has_whole_lists(dataset: Any, name: str) -> bool:
    """Return whether a column has lists of integers, and no null."""
    column = dataset.data.column(name)
    return has_integer_lists(dataset, name) and not (
        column.null_count or any(chunk.values.null_count for chunk in column.chunks)
    )


def is_table(dataset: Any) -> bool:
    """Return whether a dataset is a table of `datasets`, and not of a derived class."""
    kind = type(dataset)  # by full name: a user's module may be called `datasets`, too
    return (kind.__module__, kind.__qualname__) == ("datasets.arrow_dataset", "Dataset")


def shown_columns(dataset: Any) -> list[str] | None:
    """Return the columns that the rows of a table have.

    `None` if the dataset is no table, or if a transform or another format makes its rows.
    """
    if not is_table(dataset):
        return None
    style = dataset.format
    if style["type"] not in _ROW_FORMATS or not _ROW_OPTIONS.issuperset(style["format_kwargs"]):
        return None
    names: list[str] = style["columns"]
    return dataset.column_names if style["output_all_columns"] else names


def has_integer_lists(dataset: Any, name: str) -> bool:
    """Return whether the rows of a column are lists of integers, and read as they are stored.

    False for lists of lists, arrays of several dimensions, and features that decode.
    """
    from datasets.features.features import require_decoding
    from pyarrow import types

    kind = dataset.data.schema.field(name).type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    decodes = require_decoding(dataset.info.features[name])
    return is_list and types.is_integer(kind.value_type) and not decodes


def stored_column(dataset: Any, name: str) -> tuple[Any, Any]:
    """Return a column of Arrow, and the position of each row in it; `None` if they are in order."""
    indices = dataset._indices
    positions = None if indices is None else indices.column(0).to_numpy()
    return dataset.data.column(name), positions


def fingerprint_of_table(dataset: Any) -> str:
    """Return the fingerprint of a table: a hash of its content, or of the calls that made it."""
    return str(dataset._fingerprint)


def stages_of(stream: Any) -> list[Any]:
    """Return the stages of a stream, from last to first; an empty list if they are unknown."""
    return list(_walk(getattr(stream, "_ex_iterable", None)))


def consists_of(stages: list[Any], names: set[str]) -> bool:
    """Return whether the stages are known, and `names` has the class of each."""
    return bool(stages) and all(type(stage).__name__ in names for stage in stages)


def splits_by_shards(stages: list[Any]) -> bool:
    """Return whether ranks that each read some shards together get the items of a single rank."""
    of_all = any(
        getattr(stage, name, False)
        for stage in stages
        for name in ("with_indices", "drop_last_batch")
    )
    return consists_of(stages, SPLIT_BY_SHARDS) and not of_all


def independent_copy(stream: Any) -> Any:
    """Return a copy of a stream with its own epoch and position, which its stages hold."""
    copied = object.__new__(type(stream))  # With `__setstate__`, both would share attributes.
    copied.__dict__.update(vars(stream))
    copied._epoch = copy.deepcopy(stream._epoch)
    copied._ex_iterable = _copy_of_stage(stream._ex_iterable)
    return copied


def is_split(stream: Any) -> bool:
    """Return whether `split_dataset_by_node` has split a stream over ranks."""
    return getattr(stream, "_distributed", None) is not None


def split_over_ranks(stream: Any, rank: int, world_size: int) -> Any:
    """Return the share of `rank`."""
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, rank=rank, world_size=world_size)


def shuffle_states(stages: list[Any]) -> list[Any]:
    """Return the states of the random generators of stages that shuffle or mix."""
    return [stage.generator.bit_generator.state for stage in stages if hasattr(stage, "generator")]


def _walk(stage: Any) -> Iterator[Any]:
    if stage is None:
        return
    yield stage
    yield from _walk(getattr(stage, "ex_iterable", None))
    for source in getattr(stage, "ex_iterables", ()):
        yield from _walk(source)


def _copy_of_stage(stage: Any) -> Any:
    copied = copy.copy(stage)
    if hasattr(stage, "ex_iterable"):
        copied.ex_iterable = _copy_of_stage(stage.ex_iterable)
    if hasattr(stage, "ex_iterables"):
        copied.ex_iterables = [*map(_copy_of_stage, stage.ex_iterables)]
    return copied
