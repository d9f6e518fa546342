"""What we rely on inside of Hugging Face `datasets`: the stages that a stream is made of.

`datasets` itself is imported only for somebody who has a stream of it, and so has imported it.
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
"""Stages that yield, over ranks with shards of their own, exactly what they yield on one rank. Not
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


def restores_exactly() -> bool:
    """Tell whether the states of this version bring a stream back to where it stood."""
    import datasets

    return tuple(map(int, re.findall(r"\d+", datasets.__version__)[:3])) >= _RESTORES_SINCE


def is_plain_table(dataset: Any) -> bool | None:
    """Tell whether a table now reads rows as plain Python values; `None` for what is no table.

    Not where it applies a transform, decodes images or sound, or makes arrays, whose dtype depends
    on the rows that are read together: a column with a null becomes one of floats.
    """
    kind = type(dataset)  # by its name: a user's own module may be called `datasets`, too
    if (kind.__module__, kind.__qualname__) != ("datasets.arrow_dataset", "Dataset"):
        return None
    from datasets.features.features import require_decoding

    decodes = map(require_decoding, dataset.info.features.values())
    return dataset.format["type"] is None and not any(decodes)


def stages_of(stream: Any) -> list[Any]:
    """Return the stages of a stream, from its end to its beginning; none where they are unknown."""
    return list(_walk(getattr(stream, "_ex_iterable", None)))


def consists_of(stages: list[Any], names: set[str]) -> bool:
    """Tell whether the stages are known, and the class of each is one of `names`."""
    return bool(stages) and all(type(stage).__name__ in names for stage in stages)


def splits_by_shards(stages: list[Any]) -> bool:
    """Tell whether ranks with shards of their own get, together, what one rank would."""
    of_all = any(
        getattr(stage, name, False)
        for stage in stages
        for name in ("with_indices", "drop_last_batch")
    )
    return consists_of(stages, SPLIT_BY_SHARDS) and not of_all


def own_copy(stream: Any) -> Any:
    """Return a stream that shares neither epoch nor position, which `datasets` keeps in stages."""
    found = object.__new__(type(stream))  # Its `__setstate__` would let both share attributes.
    found.__dict__.update(vars(stream))
    found._epoch = copy.deepcopy(stream._epoch)
    found._ex_iterable = _own_stage(stream._ex_iterable)
    return found


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
    found = copy.copy(stage)
    if hasattr(stage, "ex_iterable"):
        found.ex_iterable = _own_stage(stage.ex_iterable)
    if hasattr(stage, "ex_iterables"):
        found.ex_iterables = [*map(_own_stage, stage.ex_iterables)]
    return found
