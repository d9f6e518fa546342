"""Source node: the shuffled indices of one rank, and the share that they come from."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from odb_nodes._support.arrays import IntArray, int64_array, int64_state
from odb_nodes._support.checks import check_bool, check_integer
from odb_nodes._support.hashing import hash_ints
from odb_nodes._support.processes import may_be_empty, resolve_rank
from odb_nodes.core.contract import EpochNode, EpochState
from odb_nodes.core.sample import ItemKey
from odb_nodes.core.sample_block import ItemKeys
from odb_nodes.core.sources.dataset_order import BlockPermutation, DatasetOrder, Permutation
from odb_nodes.errors import StateError

T = TypeVar("T")

_BLOCK = 1024  # indices computed at a time
_MAX_SIZE = 2**62  # Indices are computed in 64 bits.


# --- the share of a rank --------------------------------------------------------------------------


@dataclass(kw_only=True)
class SamplerState(EpochState):
    """The position of a source, and the share of its rank in the epoch."""

    position: int = 0  # samples of the epoch that were yielded, plus `done`
    # samples that this rank counts as read, of those read when the job had another number of ranks
    done: int = 0
    start: int = 0  # the number from which on the ranks take turns
    extra: bytes | None = None  # lower numbers of this rank, ascending, as bytes


class Share:
    """The numbers that a rank takes: a list of extra numbers, then every `world_size`-th one."""

    def __init__(self, rank: int, world_size: int, state: SamplerState | None = None) -> None:
        self._rank, self._world_size = rank, world_size
        self.state = state or SamplerState()  # defines the share; its position is not used
        self.done, self._start = self.state.done, self.state.start
        self._extra = int64_array(self.state.extra)

    def count(self, size: int) -> int:
        """Return how many of `size` numbers are this rank's, including `done`."""
        extra = int(np.searchsorted(self._extra, size))
        return self.done + extra + len(range(self._start + self._rank, size, self._world_size))

    def at(self, first: int, stop: int) -> IntArray:
        """Return the numbers of the samples `first`..`stop - 1`, none of which is `done`."""
        first, stop = first - self.done, stop - self.done
        extra = self._extra[first:stop]
        turns = np.arange(max(first - len(self._extra), 0), max(stop - len(self._extra), 0))
        return np.concatenate((extra, self._start + self._rank + turns * self._world_size))

    def after(self, samples: int) -> tuple[IntArray, int]:
        """Return what remains after `samples` samples, including `done`.

        This is the remaining extra numbers, and the number from which on the ranks take turns.
        """
        read = max(0, samples - self.done)
        turns = max(0, read - len(self._extra))
        first = self._start + self._rank + turns * self._world_size
        return self._extra[read:], first - self._rank


def divide_unread(
    unread: Sequence[tuple[IntArray, int]], world_size: int, size: int
) -> list[SamplerState]:
    """Divide the unread samples of an epoch among another number of ranks.

    From the first number that no rank has reached, the new ranks take turns. Lower numbers, which
    ranks that have read less have left, become extra numbers.

    Args:
        unread: for each old rank, what `Share.after` returned.
        world_size: the new number of ranks.
        size: number of samples of the epoch.
    """
    start = max(begin for _, begin in unread)
    parts = [extra for extra, _ in unread]
    for rank, (_, begin) in enumerate(unread):
        parts.append(np.arange(begin + rank, start + rank, len(unread)))
    extra = np.sort(np.concatenate(parts))
    extra = extra[: int(np.searchsorted(extra, size))]
    return [
        SamplerState(start=start, extra=int64_state(extra[rank::world_size]))
        for rank in range(world_size)
    ]


# --- nodes ----------------------------------------------------------------------------------------


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
        self._sized = size if isinstance(size, Sized) else None
        self._size = len(size) if isinstance(size, Sized) else check_integer("size", size)
        self._shuffle = check_bool("shuffle", shuffle)
        self._order = DatasetOrder(size)
        self._seed = check_integer("seed", seed)
        self._rank, self._world_size = resolve_rank(rank, world_size)
        if self._size == 0 and not may_be_empty(self._world_size):
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

        In an epoch that another number of ranks began, this includes a share of the read samples.
        """
        return self._share.count(self._size)

    @property
    def size(self) -> int:
        """Number of items of an epoch, which all ranks share."""
        return self._size

    def begin_epoch(self) -> None:
        """Go to the first index of the epoch."""
        size = self._size if self._sized is None else len(self._sized)
        if size != self._size:
            raise ValueError(
                f"the dataset must keep its number of samples, {self._size} when this "
                f"`{type(self).__name__}` was made, but has {size} now. For other data, make a new "
                "loader, and call its `set_epoch`."
            )
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
        """Return the position, and the share of this rank."""
        return replace(self._share.state, position=self._position)

    def _go_to(self, position: int) -> None:
        self._position = self._block_start = position
        self._block = []
        self._permutation: Permutation | BlockPermutation | None = None
        if self._shuffle:
            seed = hash_ints(self._seed, self._epochs.shuffle_key)
            self._permutation = self._order.permutation(self._size, seed)

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
        """Return the configuration that decides the output; a state fits only an equal one."""
        return {
            **self._order.fingerprint(),
            "size": self._size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "rank": self._rank,
            "world_size": self._world_size,
        }


class ShardedSampler(ShardedOrder[int]):
    """Yields this rank's indices into `range(size)`, shuffled anew in every epoch.

    Rank r takes every `world_size`-th element of the epoch's permutation, starting with the r-th:
    shards are disjoint and differ in size by at most one.

    State: epoch and position. In an epoch that another number of ranks began, also 8 bytes for each
    index that some of these had read ahead of others. Memory: constant.

    Args:
        size: number of samples, or anything with a length (a dataset). Of a dataset whose samples
            are read in blocks, such as `ParquetDataset`, the attribute `shuffle_blocks` says where
            each begins, ascending, and `mixed_blocks` (4) how many are shuffled together. A state
            fits only where its `data_id`, if it has one, is equal.
        shuffle: whether to permute the indices, differently in every epoch; otherwise 0, 1, 2, ...
        seed: any integer; the same on all ranks.
        rank: this rank. Default: from torch.distributed, or `RANK`.
        world_size: number of ranks. Default: from torch.distributed, or `WORLD_SIZE`.

    Raises:
        TypeError: `size` is neither an integer nor sized, or `shuffle` is no bool.
        ValueError: `rank` is not in `range(world_size)`; or `size` is 0, unless each rank has its
            own data (`rank=0, world_size=1` in a job of several ranks).
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
        """Return the index of a key: itself."""
        if not 0 <= key < self._size:
            raise StateError(
                f"there is no sample {key}: the data have {self._size} now. Resume over the data "
                "that the state was saved on."
            )
        return key
