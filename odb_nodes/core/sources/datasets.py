"""From a dataset, or torch's `DataLoader` over one, to a source node."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
)
from torchdata.nodes import BaseNode, Stateful

from odb_nodes._compat.datasets import is_plain_table
from odb_nodes._compat.torchdata import is_random, shuffling_samplers
from odb_nodes._support.checks import check_iterable
from odb_nodes._support.processes import may_be_empty
from odb_nodes._support.seeds import declares_draws
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.sources.iterable_source import REPEATABLE, IterableSource, is_stream
from odb_nodes.core.sources.jsonl_source import JsonlSource
from odb_nodes.core.sources.sharded_sampler import ShardedSampler

_REPEATABLE_ORDER = (
    "Pass an object whose `__iter__` begins the order anew each time, such as a list of indices or "
    "a `Sampler`; one that shuffles seeds itself there, by the epoch that `set_epoch` tells it."
)
_PLAIN = (list, tuple, range)


def source_of(
    dataset: Any,
    shuffle: bool | None,
    seed: int,
    sampler: Iterable[int] | None,
    shard: tuple[int, int],
) -> tuple[BaseNode[Any], Any]:
    """Return the source node, and the dataset that its items index; `None` if they are samples."""
    _check_is_no_path_or_loader(dataset)
    if isinstance(dataset, JsonlSource):
        if shuffle and not dataset.fingerprint()["shuffle"]:
            raise ValueError(
                f"`shuffle` must not be True for a `{type(dataset).__name__}` with `shuffle=False`."
                " Leave out one of the two."
            )
        # Each loader reads the files with a copy, which has a position for this loader alone.
        dataset = dataset.copy(shuffle=shuffle, seed=seed)
        shuffle = None
    if isinstance(dataset, BaseNode):
        if sampler is not None or shuffle:
            raise ValueError(
                f"`sampler` and `shuffle` must not be given for a node (`{type(dataset).__name__}`)"
                ", which decides the order. Leave them out, and make the node with the order that "
                "you want."
            )
        _check_share(dataset, shard)
        return dataset, None
    if is_iterated(dataset):
        _check_iterated(dataset, shuffle, sampler)
        return IterableSource(dataset, *shard), None
    _check_indexed(dataset, shard[1])
    if sampler is None:
        return ShardedSampler(dataset, shuffle is not False, seed, *shard), dataset
    _check_sampler(sampler, shuffle)
    return IterableSource(sampler, *shard, yields_indices=True), dataset


def _check_is_no_path_or_loader(dataset: object) -> None:
    if isinstance(dataset, (str, bytes, os.PathLike)):
        raise TypeError(
            f"`dataset` must be a dataset, but is {dataset!r:.80} instead. For files pass "
            "`JsonlSource(path)`, `ParquetDataset(path)` or `TarDataset(path)`."
        )
    if isinstance(dataset, DataLoader):
        raise TypeError(
            f"`dataset` must be a dataset, but is a `{type(dataset).__name__}` instead, which "
            "yields batches. Use `ODBDataLoader.from_dataloader(loader, token_budget=...)`, which "
            "takes over its dataset, order, collate function and workers."
        )


def _check_iterated(dataset: object, shuffle: bool | None, sampler: Iterable[int] | None) -> None:
    """Raise an error unless an iterable dataset can be iterated again, and decides the order."""
    check_iterable("dataset", dataset, REPEATABLE)
    if sampler is not None:
        raise ValueError("`sampler` must be None for an iterable dataset.")
    if shuffle:
        raise ValueError(
            "`shuffle` must not be True for an iterable dataset, which decides the order: "
            "shuffle in the dataset, seeded by its `set_epoch`."
        )


def _check_indexed(dataset: object, world_size: int) -> None:
    """Raise an error unless a map-style dataset has a length, which may be 0 on some ranks."""
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"`dataset` must have a length, but `{type(dataset).__name__}` has none. Make it an "
            "`IterableDataset`, or pass something with `__len__`."
        )
    if len(dataset) == 0 and not may_be_empty(world_size):
        raise ValueError(
            "`dataset` must have at least 1 sample, but is empty. With `sharded=True`, some of "
            "several ranks may have none."
        )


def _check_sampler(sampler: Iterable[int], shuffle: bool | None) -> None:
    """Raise an error unless a sampler alone decides the order, and can repeat it."""
    if shuffle:
        raise ValueError(
            "`sampler` must be None where `shuffle` is True: both decide the order. Leave one out."
        )
    check_iterable("sampler", sampler, _REPEATABLE_ORDER)
    if is_random(sampler):
        raise ValueError(
            f"`sampler` is a `{type(sampler).__name__}`, whose order cannot be drawn again when a "
            "run resumes. Pass `shuffle=`, or as `sampler=` an iterable that yields the same order "
            "again."
        )


def draws_nothing(dataset: Any) -> bool:
    """Tell whether a dataset is known to draw no random numbers."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    return type(dataset) in _PLAIN or declares_draws(dataset) is False


def reads_alike(dataset: Any) -> bool:
    """Tell whether an item is known not to depend on the items that are read with it."""
    if type(dataset) is Subset:
        return reads_alike(dataset.dataset)
    is_plain = is_plain_table(dataset)  # decides for tables, even if one declares something else
    return draws_nothing(dataset) if is_plain is None else is_plain


def holds_no_generators(dataset: Any) -> bool:
    """Tell whether a dataset is a table of `datasets` without a transform.

    Searching a table for random generators takes longer than reading some hundreds of its rows.
    """
    if type(dataset) is Subset:
        return holds_no_generators(dataset.dataset)
    return is_plain_table(dataset) is True


def is_iterated(dataset: Any) -> bool:
    """Tell whether a dataset is iterated in its order, and not read by index."""
    streams = isinstance(dataset, IterableDataset) or is_stream(dataset)
    return streams or not hasattr(dataset, "__getitem__")


def dataset_of_rank(dataset: Any, rank: int, world_size: int) -> Any:
    """Return a dataset, or a dict of them, for one of several ranks in one process.

    Datasets that keep a position are copied.
    """
    if type(dataset) is dict:
        return {name: dataset_of_rank(part, rank, world_size) for name, part in dataset.items()}
    if isinstance(dataset, JsonlSource):
        return dataset.copy(rank, world_size)
    if isinstance(dataset, BaseNode):
        raise TypeError(
            f"`dataset` must not be a node (`{type(dataset).__name__}`) with `virtual_ranks`: it "
            "reads for one rank. Pass a dataset, an iterable, or a `JsonlSource`."
        )
    if isinstance(dataset, (IterableDataset, Stateful)) or is_stream(dataset):
        try:
            return copy.deepcopy(dataset)
        except Exception as error:  # of any type: it is the user's
            raise TypeError(
                f"`dataset` (`{type(dataset).__name__}`) must be copied for each of several "
                f"`virtual_ranks` in one process, which raised {error!r}. Open files and "
                "connections in `__iter__`, or pass a map-style dataset."
            ) from error
    return dataset


def order_of(loader: DataLoader[Any], shard: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of `ODBDataLoader` for the order of a `DataLoader`."""
    sampler: Any = loader.sampler
    if loader.batch_sampler is not None and loader.batch_size is None:
        # The user's batch sampler: the `sampler` of torch says nothing of its order.
        if type(loader.batch_sampler) is not BatchSampler:
            raise ValueError(
                f"`loader.batch_sampler` is a `{type(loader.batch_sampler).__name__}`, whose order "
                "of single samples is not known. Pass `shuffle=` or `sampler=`."
            )
        sampler = loader.batch_sampler.sampler
    whole = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    if whole is not None and len(whole) == len(loader.dataset):  # type: ignore[arg-type]
        # A `DistributedSampler` is replaced, since it repeats samples to make the shards equal.
        if isinstance(sampler, DistributedSampler):
            if shard == (sampler.rank, sampler.num_replicas):
                return {"shuffle": bool(sampler.shuffle), "seed": sampler.seed}
        if isinstance(sampler, SequentialSampler):
            return {"shuffle": False}
        if isinstance(sampler, shuffling_samplers()) and not sampler.replacement:
            if sampler.num_samples == len(whole):
                return {"shuffle": True}
    if isinstance(sampler, DistributedSampler):
        return {"sampler": sampler, "sharded": sampler.num_replicas > 1}
    return {"sampler": sampler}


def _check_share(node: BaseNode[Any], shard: tuple[int, int]) -> None:
    """Raise a ValueError if items of a node would be read by no rank, or by several."""
    kinds = (IterableSource, JsonlSource, ShardedSampler)
    sources = [source for source in walk(node) if isinstance(source, kinds)]
    shares = [(node.fingerprint()["world_size"], type(node).__name__) for node in sources]
    ranks, name = max(shares, default=(shard[1], ""))
    if shard[1] == 1 and ranks > 1:
        raise ValueError(
            f"`dataset` must yield all of its items, but its `{name}` yields the share of one of "
            f"{ranks} ranks, and this rank has all data (`sharded=True`), or is the only rank. "
            "Make it with `rank=0, world_size=1`."
        )
    if shard[1] > 1 and ranks == 1:
        raise ValueError(
            f"`dataset` must yield the share of one rank, but its `{name}` yields all items, on "
            f"each of {shard[1]} ranks: all would train on each sample. Make it with `rank=` and "
            "`world_size=`, or pass `sharded=True` if each rank has different data."
        )
