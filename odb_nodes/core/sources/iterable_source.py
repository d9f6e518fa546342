"""Source node: the samples of an iterable."""

from __future__ import annotations

import inspect
import json
import operator
import sys
import zlib
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DistributedSampler
from torchdata.nodes import Stateful

from odb_nodes._compat import datasets as hf_datasets
from odb_nodes._compat.self_splitting import split_by_itself
from odb_nodes._support.checks import check_bool, check_iterable
from odb_nodes._support.digest import content_digest
from odb_nodes._support.hashing import hash_ints
from odb_nodes._support.processes import resolve_rank
from odb_nodes._support.progress import SlowProgress
from odb_nodes.core.contract import EpochNode, EpochState, copy_state
from odb_nodes.core.contract.node import check_own_state
from odb_nodes.core.sample import ItemKey
from odb_nodes.errors import SampleError, StateError

T = TypeVar("T")

REPEATABLE = "Wrap a generator in an `IterableDataset` whose `__iter__` begins a new one."


@dataclass(kw_only=True)
class IterableState(EpochState):
    """Position of an `IterableSource`."""

    position: int  # items read, including the items of other ranks
    ended: bool  # the iterable has raised `StopIteration`
    iterable: Any  # the iterable's state, if it has one
    items_digest: int  # a digest of the items that this rank got
    shard: tuple[int, int]  # offset and stride of these items


class IterableSource(EpochNode[T, IterableState]):
    """Yields this rank's items of an iterable, iterated anew in every epoch.

    Rank r takes every `world_size`-th item, starting with the r-th. An iterable's `set_epoch` is
    called with the epoch (or with a 31-bit number when a mixer begins the source again). If it has
    `state_dict` and `load_state_dict` without further arguments, these restore it; otherwise it is
    read again up to the position. It must yield the same items in the same order when it is
    iterated again, which a digest checks.

    A streaming dataset of Hugging Face `datasets` is restored by its own state, unless it has a
    shuffle buffer, which that state loses: then it is read again. If its shards divide evenly, each
    rank reads only its own shards.

    State: epoch and position, and the iterable's own state if it has one.

    Args:
        iterable: an `IterableDataset`, a sampler, or any other iterable that can be iterated again.
        rank: this rank. Default: from torch.distributed, or `RANK`. Pass 0 (and a world
            size of 1) if the iterable shards itself.
        world_size: number of ranks. Default: from torch.distributed, or `WORLD_SIZE`.
        yields_indices: the items are indices into a dataset, and so are the keys of the samples.
            A negative item, or a bool, is a `SampleError`.
            Default: the key is the number of the item in the epoch.

    Raises:
        TypeError: `iterable` is an iterator, which can be read only once.
        ValueError: there are several ranks, and `iterable` splits itself over them already.
    """

    STATE = IterableState
    retries_errors = True  # an iterable may yield more items after an error

    def __init__(
        self,
        iterable: Iterable[T],
        rank: int | None = None,
        world_size: int | None = None,
        *,
        yields_indices: bool = False,
    ) -> None:
        super().__init__()
        check_iterable("iterable", iterable, REPEATABLE)
        self._yields_indices = check_bool("yields_indices", yields_indices)
        self._last: Any = None
        self._rank, self._world_size = resolve_rank(rank, world_size)
        _check_is_whole(iterable, self._world_size)
        self._iterable: Any = iterable
        if is_stream(iterable):
            self._iterable = _Stream(iterable, self._rank, self._world_size)
        self._stateful = _with_own_state(self._iterable)
        split = isinstance(self._iterable, _Stream) and self._iterable.split
        self._offset, self._stride = (0, 1) if split else (self._rank, self._world_size)
        self._position = 0
        self._loaded: Any = None  # the iterable's loaded state, until its next item
        self._ended = False
        self._restoring = ""  # for errors, until the next item
        # An iterable restored at its end may first yield the remaining items: none.
        self._retry = False
        self._digest = 0  # of the items of this rank
        self._it: Iterator[T] | None = None

    def __len__(self) -> int:
        """Return how many items this rank yields in an epoch."""
        if not isinstance(self._iterable, Sized):
            raise TypeError(f"`{type(self._iterable).__name__}` has no length.")
        return len(range(self._offset, len(self._iterable), self._stride))

    def begin_epoch(self) -> None:
        """Go to the first item."""
        self._forget(retry=self._ended and self._loaded is not None)
        self._set_epoch()

    def restore(self, state: IterableState) -> None:
        """Go to an item: by the iterable's own state, or by reading all items before it again."""
        self._forget(retry=False)
        self._position, self._ended, self._loaded = state.position, state.ended, state.iterable
        self._restoring = ", which a state continues"
        self._set_epoch()
        if self._stateful is not None and self._loaded is not None:
            self._load_own(self._stateful)
            self._digest = state.items_digest
            if not self._ended:
                self._it = self._iterate()
        elif self._position:
            self._it = self._iterate()
            self._fast_forward(self._it, state)

    def save(self) -> IterableState:
        """Return the position, and the iterable's own state."""
        inner = self._loaded
        if inner is None and self._stateful is not None and self._position:
            inner = self._stateful.state_dict()
            check_own_state(self._iterable, inner)
        return IterableState(
            position=self._position,
            ended=self._ended,
            iterable=inner,
            items_digest=self._digest,
            shard=self._shard,
        )

    def next(self) -> T:
        """Return the next item of this rank."""
        if self._ended:
            raise StopIteration
        if self._it is None:
            self._it = self._iterate()
        while True:
            try:
                item = next(self._it)
            except StopIteration:
                if self._retry:
                    self._it = self._iterate()
                    self._retry = False
                    continue
                if self._position == 0 and resolve_rank(None, None)[1] == 1:
                    raise SampleError(
                        f"`iterable` (`{type(self._iterable).__name__}`) yielded no sample in "
                        f"epoch {self._epochs.epoch}{self._restoring}: it is empty, or can be "
                        "iterated only once."
                    ) from None
                self._ended = True
                raise
            self._loaded = None
            self._retry = False
            self._restoring = ""
            if self._count(item):
                self._last = item
                return item

    def item_key(self) -> ItemKey | None:
        """Return the number of the last item in the epoch; or the item, where it is an index."""
        number = self._position - 1
        if not self._yields_indices:
            return ItemKey("", number, self._stride, self._epochs.cycle)
        if type(self._last) is not int:
            return None
        return ItemKey("", self._last, self._stride, (self._epochs.cycle << 40) + number)

    def _load_own(self, iterable: Stateful) -> None:
        try:
            iterable.load_state_dict(copy_state(self._loaded))
        except Exception as error:  # of any type: it is the user's
            raise StateError(
                f"`load_state_dict` of `{type(iterable).__name__}` raised {error!r}: the state of "
                f"{type(self).__name__} holds {self._loaded!r:.80} for it."
            ) from error

    def _iterate(self) -> Iterator[T]:
        items = iter(self._iterable)
        # Not a generator, which an error of the iterable would end.
        return map(_plain_index, items) if self._yields_indices else items

    def _forget(self, *, retry: bool) -> None:
        if self._loaded is not None and self._it is not None:
            # An iterable that restores itself when its iteration begins would do so too late.
            next(self._it, None)
        self._retry = retry
        self._it = self._loaded = None
        self._ended = False
        self._restoring = ""
        self._position = self._digest = 0

    def _set_epoch(self) -> None:
        if callable(set_epoch := getattr(self._iterable, "set_epoch", None)):
            set_epoch(self._epochs.shuffle_key)

    def _count(self, item: Any) -> bool:
        """Count an item as read, and tell whether it belongs to this rank."""
        is_mine = self._position % self._stride == self._offset
        self._position += 1
        if is_mine:
            digest = item if type(item) is int else content_digest(item)
            self._digest = hash_ints(self._digest, digest) >> 1  # torch's states hold 63 bits
        return is_mine

    @property
    def _shard(self) -> tuple[int, int]:
        return self._offset, self._stride

    def _fast_forward(self, it: Iterator[T], state: IterableState) -> None:
        end = self._position
        self._position = 0
        text = f"items of `{type(self._iterable).__name__}` read again up to the state's position"
        progress = SlowProgress(text, end)
        for item in islice(it, end):
            self._count(item)
            progress.update(self._position)
        if self._position < end:
            raise StateError(
                f"the state of {type(self).__name__} stands at item {end}, but the iterable ended "
                f"after {self._position}. Resume over the data it was saved on."
            )
        # With `strict=False`, the state may be another rank's.
        if self._digest != state.items_digest and self._shard == state.shard:
            raise StateError(
                f"`{type(self._iterable).__name__}` yielded other items than when the state of "
                f"{type(self).__name__} was saved: it draws its order, or what it yields, from a "
                "generator that is not seeded, and samples would be lost. Seed it in `__iter__`, "
                "by the epoch that `set_epoch` tells it, or use `ShardedSampler`; draw random "
                "numbers for single samples in `process_fn`, where they are seeded."
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return the configuration that decides the output; a state fits only an equal one."""
        order = self._iterable.fingerprint if isinstance(self._iterable, _Stream) else {}
        return {"rank": self._rank, "world_size": self._world_size, **order}


def _plain_index(item: Any) -> Any:
    """Return an integer of any type (numpy, 0-d tensor) as the int that keys and states hold."""
    if getattr(item, "shape", ()) != ():
        return item
    is_bool = isinstance(item, (bool, np.bool_)) or getattr(item, "dtype", None) is torch.bool
    if type(item) is not int and not is_bool:
        with suppress(TypeError):
            item = operator.index(item)
    if is_bool or (type(item) is int and item < 0):
        raise SampleError(
            f"an index must be at least 0 and no bool, but `sampler` yields {item!r} "
            f"(`{type(item).__name__}`): it is the key of the sample, which `exclude` and ledgers "
            "name. Yield `index % len(dataset)`; of a mask, its `nonzero()`."
        )
    return item


def _check_is_whole(iterable: Any, world_size: int) -> None:
    """Raise a ValueError for an iterable that is split over the ranks already."""
    # Several ranks in one process, or a single rank, may get all of its items.
    if world_size == 1:
        return
    by = split_by_itself(iterable)
    if by is None:
        return
    if resolve_rank(None, None)[1] > 1 or isinstance(iterable, DistributedSampler):
        raise ValueError(
            f"`{type(iterable).__name__}` splits itself over the ranks already ({by}), and would "
            f"be split again: of {world_size} samples, {world_size - 1} would be lost. Pass "
            "`sharded=True` (`rank=0, world_size=1` for an `IterableSource`)."
        )


def _with_own_state(iterable: Any) -> Stateful | None:
    """Return the iterable if it can be restored by its own state; `None` otherwise."""
    if not isinstance(iterable, Stateful):  # a protocol: by the names of the methods
        return None
    # torch's `DataLoader` may get the methods, and raise in them unless it has `stateful=True`
    # (pytorch#166732).
    if getattr(iterable, "stateful", True) is False:
        return None
    if isinstance(iterable, _Stream):
        return iterable if iterable.restores else None
    try:
        inspect.signature(iterable.state_dict).bind()
    except TypeError:  # It takes arguments that only a loader of its library knows.
        return None
    except ValueError:  # It has no signature.
        pass
    return iterable


# --- streams of Hugging Face `datasets` -----------------------------------------------------------


def is_stream(dataset: Any) -> bool:
    """Tell whether something is an `IterableDataset` of `datasets`."""
    library = sys.modules.get("datasets")
    kind = getattr(library, "IterableDataset", None)
    return isinstance(kind, type) and isinstance(dataset, kind)


class _Stream:
    """A stream that begins each epoch anew, split over ranks if its shards divide evenly.

    The state of the stream is saved as text, since it may hold integers of 128 bits.
    """

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        if world_size > 1 and hf_datasets.is_split(dataset):
            raise ValueError(
                "the stream was split over ranks already (`split_dataset_by_node`), and would be "
                "split again. Pass it unsplit, or pass `sharded=True` (`rank=0, world_size=1` for "
                "an `IterableSource`)."
            )
        stages = hf_datasets.stages_of(dataset)
        shards = int(dataset.num_shards)
        are_restorable = hf_datasets.consists_of(stages, hf_datasets.RESTORABLE)
        self.restores = are_restorable and hf_datasets.restores_exactly()
        divides = 1 < world_size and not shards % world_size
        self.split = divides and hf_datasets.splits_by_shards(stages)
        self._dataset = hf_datasets.independent_copy(dataset)
        if self.split:
            self._dataset = hf_datasets.split_over_ranks(self._dataset, rank, world_size)
        states = [json.dumps(state, default=str) for state in hf_datasets.shuffle_states(stages)]
        seed = zlib.crc32(" ".join(states).encode()) if states else None
        self.fingerprint = {"num_shards": shards, "shuffle_seed": seed}
        self._loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        # `datasets` would apply a loaded state to every iteration of its epoch.
        state, self._loaded = self._loaded, None
        self._dataset.load_state_dict(state)
        return iter(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        self._dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self._dataset.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration resume at a state."""
        self._loaded = json.loads(state["json"])
