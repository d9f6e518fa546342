"""What we know of WebDataset, LitData and MosaicML Streaming: which iterables split themselves.

None of them is imported: a class, or a function, is recognized by its name and its module's.
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
"""Package and class; a class derived from one counts as well."""
_NODE_SPLITTER = ("webdataset", "split_by_node")  # a stage of a WebDataset's pipeline
_MOST_SEEN, _MOST_HELD = 500, 32  # objects within one that is asked about, and within a list


def split_by_itself(iterable: Any) -> str | None:
    """Return what in an iterable, or within what it holds, yields each rank a share; or None."""
    return next(filter(None, map(_name_of, _within(iterable))), None)


def _name_of(one: Any) -> str | None:
    if isinstance(one, DistributedSampler):
        return "torch's `DistributedSampler`" if one.num_replicas > 1 else None
    if isinstance(one, FunctionType):
        return "WebDataset's `split_by_node`" if _named(one) == _NODE_SPLITTER else None
    for base in type(one).__mro__:
        # A file `streaming.py` of the user's is a module without a package.
        if _named(base) in _DATASETS and "." in base.__module__:
            return f"`{base.__name__}` of {_named(base)[0]}"
    return None


def _named(one: FunctionType | type[Any]) -> tuple[str, str]:
    return str(one.__module__).partition(".")[0], one.__name__


def _within(root: Any) -> Iterator[Any]:
    """Yield an object, and what it holds in attributes, lists and dicts, the nearest first."""
    queue, seen = [root], {id(root)}
    for one in queue:
        yield one
        held: list[Any] = []
        if isinstance(one, partial):
            held = [one.func]
        elif isinstance(one, (list, tuple)):
            held = [*one[:_MOST_HELD]]
        elif isinstance(one, dict):
            held = [*islice(one.values(), _MOST_HELD)]
        elif _is_iterable(one):
            held = [*vars(one).values()]
        for each in held:
            is_candidate = isinstance(each, (list, tuple, dict, partial, FunctionType))
            if (is_candidate or _is_iterable(each)) and id(each) not in seen:
                seen.add(id(each))
                queue.append(each)
        del queue[_MOST_SEEN:]


def _is_iterable(one: Any) -> bool:
    return hasattr(type(one), "__iter__") and hasattr(one, "__dict__")
