"""Iterables of WebDataset, LitData and MosaicML Streaming that split themselves over ranks.

None of the libraries is imported: classes and functions are recognized by name and module.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any

from torch.utils.data import DistributedSampler

_DATASETS = {
    ("litdata", "StreamingDataset"),
    ("litdata", "CombinedStreamingDataset"),
    ("litdata", "ParallelStreamingDataset"),
    ("streaming", "StreamingDataset"),
}
"""(package, class); derived classes count, too."""
_NODE_SPLITTER = ("webdataset", "split_by_node")  # a stage of a WebDataset's pipeline
_MOST_SEEN, _MOST_HELD = 500, 32  # objects within an iterable, and within a list


def split_by_itself(iterable: Any) -> str | None:
    """Return the name of an object within an iterable that splits over ranks; or None."""
    return next(filter(None, map(_name_of, _within(iterable))), None)


def _name_of(value: Any) -> str | None:
    if isinstance(value, DistributedSampler):
        return "torch's `DistributedSampler`" if value.num_replicas > 1 else None
    if isinstance(value, FunctionType):
        return "WebDataset's `split_by_node`" if _named(value) == _NODE_SPLITTER else None
    for base in type(value).__mro__:
        # A file `streaming.py` of the user's is a module without a package.
        if _named(base) in _DATASETS and "." in base.__module__:
            return f"`{base.__name__}` of {_named(base)[0]}"
    return None


def _named(definition: FunctionType | type[Any]) -> tuple[str, str]:
    return str(definition.__module__).partition(".")[0], definition.__name__


def _within(root: Any) -> Iterator[Any]:
    """Yield an object, then the objects in its attributes, lists and dicts, breadth first."""
    queue = [root]
    seen = {id(root)}
    for value in queue:
        yield value
        inner_values: list[Any] = []
        if isinstance(value, partial):
            inner_values = [value.func]
        elif isinstance(value, (list, tuple)):
            inner_values = [*value[:_MOST_HELD]]
        elif isinstance(value, dict):
            inner_values = [*islice(value.values(), _MOST_HELD)]
        elif _is_iterable(value):
            inner_values = [*vars(value).values()]
        for inner in inner_values:
            is_candidate = isinstance(inner, (list, tuple, dict, partial, FunctionType))
            if (is_candidate or _is_iterable(inner)) and id(inner) not in seen:
                seen.add(id(inner))
                queue.append(inner)
        del queue[_MOST_SEEN:]


def _is_iterable(value: Any) -> bool:
    return hasattr(type(value), "__iter__") and hasattr(value, "__dict__")
