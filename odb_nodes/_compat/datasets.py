"""What we rely on inside of Hugging Face `datasets`: how a table is held, the stages of a stream.

`datasets` itself is imported only for somebody who has an object of it, and so has imported it.
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
"""Stages that yield the same items over ranks that each read some shards as on one rank. Not
`take`, which would take its number on each rank."""

RESTORABLE = SPLIT_BY_SHARDS - {"BufferShuffledExamplesIterable"} | {
    "CyclingMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "RepeatExamplesIterable",
    "SkipExamplesIterable",
    "TakeExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}
"""Stages whose own state brings back all that comes after it. Not a shuffle buffer: `datasets`
fills it anew, so what was in it is lost."""


_RESTORES_SINCE = (5, 1)
"""Before, the state of a stream of `.map()` or `.filter()` over Arrow data stands up to a whole
table (1,000 rows) too far (datasets#7630, #8145, #8359); in 5.0.0 also any that was restored before
stands at its beginning (#8308). Found by resuming in 3.6 to 5.2."""


_ROW_FORMATS = (None, "numpy", "torch")
_ROW_OPTIONS = {"device", "dtype"}
"""Formats, and their options, in which a row of a column of lists is a list, array or tensor of as
many values."""


def restores_exactly() -> bool:
    """Tell whether the states of this version bring a stream back to where it stood."""
    import datasets

    return tuple(map(int, re.findall(r"\d+", datasets.__version__)[:3])) >= _RESTORES_SINCE


def is_plain_table(dataset: Any) -> bool | None:
    """Tell whether rows of a table do not depend on the rows read with them; `None` for no table.

    They are plain Python values, or arrays and tensors of whole lists of integers. Not where a
    table applies a transform, decodes images or sound, or makes arrays of other columns, whose
    dtype depends on the rows that are read together: one with a null becomes one of floats.
    """
    if not is_table(dataset):
        return None
    from datasets.features.features import require_decoding

    if dataset.format["type"] is None:
        return not any(map(require_decoding, dataset.info.features.values()))
    columns = shown_columns(dataset)
    return columns is not None and all(_has_whole_lists(dataset, name) for name in columns)


def _has_whole_lists(dataset: Any, name: str) -> bool:
    """Tell whether a column has lists of integers, and no null."""
    column = dataset.data.column(name)
    return has_integer_lists(dataset, name) and not (
        column.null_count or any(chunk.values.null_count for chunk in column.chunks)
    )


def is_table(dataset: Any) -> bool:
    """Tell whether a dataset is a table of `datasets`, and of no class that is derived from it."""
    kind = type(dataset)  # by its name: a user's own module may be called `datasets`, too
    return (kind.__module__, kind.__qualname__) == ("datasets.arrow_dataset", "Dataset")


def shown_columns(dataset: Any) -> list[str] | None:
    """Return the columns that rows of a table have, each as the list, array or tensor that it is.

    `None` for what is no table, and where a transform makes the rows, or a format of another shape.
    """
    if not is_table(dataset):
        return None
    style = dataset.format
    if style["type"] not in _ROW_FORMATS or not _ROW_OPTIONS.issuperset(style["format_kwargs"]):
        return None
    names: list[str] = style["columns"]
    return dataset.column_names if style["output_all_columns"] else names


def has_integer_lists(dataset: Any, name: str) -> bool:
    """Tell whether the rows of a column are lists of integers, which reading them does not change.

    Not lists of lists, nor an array of several dimensions, nor what a feature decodes.
    """
    from datasets.features.features import require_decoding
    from pyarrow import types

    kind = dataset.data.schema.field(name).type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    decodes = require_decoding(dataset.info.features[name])
    return is_list and types.is_integer(kind.value_type) and not decodes


def stored_column(dataset: Any, name: str) -> tuple[Any, Any]:
    """Return a column as Arrow holds it, and the places in it of the rows; `None` if in order."""
    indices = dataset._indices
    places = None if indices is None else indices.column(0).to_numpy()
    return dataset.data.column(name), places


def fingerprint_of_table(dataset: Any) -> str:
    """Return what `datasets` tells tables apart by: a hash of their content, or of their making."""
    return str(dataset._fingerprint)


def stages_of(stream: Any) -> list[Any]:
    """Return the stages of a stream, from its end to its beginning; none where they are unknown."""
    return list(_walk(getattr(stream, "_ex_iterable", None)))


def consists_of(stages: list[Any], names: set[str]) -> bool:
    """Tell whether the stages are known, and the class of each is one of `names`."""
    return bool(stages) and all(type(stage).__name__ in names for stage in stages)


def splits_by_shards(stages: list[Any]) -> bool:
    """Tell whether ranks that each read some shards get, together, what one rank would."""
    of_all = any(
        getattr(stage, name, False)
        for stage in stages
        for name in ("with_indices", "drop_last_batch")
    )
    return consists_of(stages, SPLIT_BY_SHARDS) and not of_all


def own_copy(stream: Any) -> Any:
    """Return a stream that shares neither epoch nor position, which `datasets` keeps in stages."""
    copied = object.__new__(type(stream))  # Its `__setstate__` would let both share attributes.
    copied.__dict__.update(vars(stream))
    copied._epoch = copy.deepcopy(stream._epoch)
    copied._ex_iterable = _own_stage(stream._ex_iterable)
    return copied


def is_split(stream: Any) -> bool:
    """Tell whether a stream was split over ranks already, by `split_dataset_by_node`."""
    return getattr(stream, "_distributed", None) is not None


def split_over_ranks(stream: Any, rank: int, world_size: int) -> Any:
    """Return the share of one rank."""
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, rank=rank, world_size=world_size)


def shuffle_states(stages: list[Any]) -> list[Any]:
    """Return the states of the random generators that stages shuffle or mix by."""
    return [stage.generator.bit_generator.state for stage in stages if hasattr(stage, "generator")]


def _walk(stage: Any) -> Iterator[Any]:
    if stage is None:
        return
    yield stage
    yield from _walk(getattr(stage, "ex_iterable", None))
    for source in getattr(stage, "ex_iterables", ()):
        yield from _walk(source)


def _own_stage(stage: Any) -> Any:
    copied = copy.copy(stage)
    if hasattr(stage, "ex_iterable"):
        copied.ex_iterable = _own_stage(stage.ex_iterable)
    if hasattr(stage, "ex_iterables"):
        copied.ex_iterables = [*map(_own_stage, stage.ex_iterables)]
    return copied
