"""Source node: the shuffled indices of one rank."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from odb_nodes._core.checks import check_bool, check_integer
from odb_nodes._core.hashing import hash_ints
from odb_nodes._core.ranks import has_data_elsewhere, resolve_rank
from odb_nodes.contract import EpochNode
from odb_nodes.errors import StateError
from odb_nodes.sample import ItemKey
from odb_nodes.sample_block import ItemKeys
from odb_nodes.sources.permutation import Permutation
from odb_nodes.sources.share import Share, ShareState

T = TypeVar("T")

_BLOCK = 1024  # indices computed at a time
_MAX_SIZE = 2**62  # they are computed in 64 bits


@dataclass(kw_only=True)
class SamplerState(ShareState):
    """Where a `ShardedSampler` stands: how many indices of the epoch are out."""

    position: int


class ShardedOrder(EpochNode[T, SamplerState]):
    """The base of nodes that yield this rank's items of `size`, shuffled anew in every epoch.

    A class that derives from it takes numbers with `_take`, and defines `next` and `item_key`.
    """

    STATE = SamplerState

    def __init__(
        self,
        size: int | Sized,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        self._size = len(size) if isinstance(size, Sized) else check_integer("size", size)
        self._shuffle = check_bool("shuffle", shuffle)
        self._seed = check_integer("seed", seed)
        self._rank, self._world_size = resolve_rank(rank, world_size)
        if self._size == 0 and not has_data_elsewhere(self._world_size):
            raise ValueError("`size` must be at least 1, but the dataset is empty.")
        if not 0 <= self._size <= _MAX_SIZE:
            raise ValueError(f"`size` must be in 1..{_MAX_SIZE}, but is {self._size} instead.")
        self._share = Share(self._rank, self._world_size)
        self._position = 0
        self._block: list[int] = []
        self._block_start = 0
        self._last = 0

    def __len__(self) -> int:
        """Return how many indices this rank yields in the epoch.

        In an epoch that another number of ranks has begun, what they have read is shared out.
        """
        return self._share.count(self._size)

    def begin_epoch(self) -> None:
        """Stand at the first index of the epoch."""
        self._share = Share(self._rank, self._world_size)
        self._go_to(0)

    def restore(self, state: SamplerState) -> None:
        """Go to an index of the epoch."""
        self._share = Share(self._rank, self._world_size, state)
        if state.position > len(self):
            raise StateError(
                f"the state of {type(self).__name__} stands after {state.position} indices, but "
                f"an epoch of this rank has {len(self)}. Resume over the data it was saved on."
            )
        self._go_to(state.position)

    def save(self) -> SamplerState:
        """Return the number of indices of the epoch that are out."""
        state = SamplerState(position=self._position)
        self._share.put_into(state)
        return state

    def _go_to(self, position: int) -> None:
        self._position = self._block_start = position
        self._block = []
        seed = hash_ints(self._seed, self._epochs.shuffle_key)
        self._permutation = Permutation(self._size, seed) if self._shuffle else None

    def _take(self, count: int) -> list[int]:
        offset = self._position - self._block_start
        if offset >= len(self._block):
            if self._position >= len(self):
                raise StopIteration
            offset = 0
            self._block_start = self._position
            self._block = self._indices(self._position, min(self._position + _BLOCK, len(self)))
        indices = self._block[offset : offset + count]
        self._position += len(indices)
        self._last = indices[-1]
        return indices

    def _indices(self, start: int, stop: int) -> list[int]:
        places = self._share.at(start, stop)
        elements = places if self._permutation is None else self._permutation(places)
        indices: list[int] = elements.tolist()
        return indices

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only where it is equal."""
        return {
            "size": self._size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "rank": self._rank,
            "world_size": self._world_size,
        }


class ShardedSampler(ShardedOrder[int]):
    """Yields this rank's indices into `range(size)`, shuffled anew in every epoch.

    Rank r takes every `world_size`-th element of the epoch's permutation, from the r-th on: the
    shards differ by at most one index and share none.

    State: epoch and position, whatever the size; in an epoch that another number of ranks has
    begun, also 8 bytes for each index that some of them had read beyond others. Memory: constant.

    Args:
        size: number of samples, or anything with a length (a dataset).
        shuffle: permute the indices, differently in every epoch; else 0, 1, 2, ...
        seed: any integer; the same on all ranks.
        rank: this rank; by default that of torch.distributed, or of `RANK`.
        world_size: number of ranks; by default that of torch.distributed, or of `WORLD_SIZE`.

    Raises:
        TypeError: `size` is neither an integer nor sized, or `shuffle` is no bool.
        ValueError: `rank` is not in `range(world_size)`; or `size` is 0, unless this is one of
            several ranks that each have data of their own (`rank=0, world_size=1`).
    """

    def next(self) -> int:
        """Return the next index of this rank."""
        (index,) = self._take(1)
        return index

    def next_chunk(self, count: int) -> tuple[list[int], ItemKeys]:
        """Return some of the next indices of this rank, and their keys."""
        indices = self._take(count)
        numbers = np.array(indices, np.int64)
        repeats = np.full_like(numbers, self._epochs.cycle)
        origin = ("", self._world_size)
        return indices, ItemKeys(numbers, repeats, np.zeros_like(numbers), [origin])

    def item_key(self) -> ItemKey:
        """Return the last index."""
        return ItemKey("", self._last, self._world_size, self._epochs.cycle)

    def read(self, key: int) -> int:
        """Return the index of a key: itself.

        Raises:
            StateError: there is no such index.
        """
        if not 0 <= key < self._size:
            raise StateError(
                f"there is no sample {key}: the data have {self._size} now. Resume over the data "
                "that the state was saved on."
            )
        return key
