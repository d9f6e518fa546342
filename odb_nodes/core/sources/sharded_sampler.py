"""Source node: the shuffled indices of one rank; the permutation and the share they come from."""

from __future__ import annotations

import zlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray, int64_array, int64_bytes, int64_state
from odb_nodes._support.checks import check_bool, check_count, check_integer
from odb_nodes._support.hashing import hash_ints
from odb_nodes._support.processes import may_be_empty, resolve_rank
from odb_nodes.core.contract import EpochNode, EpochState
from odb_nodes.core.sample import ItemKey
from odb_nodes.core.sample_block import ItemKeys
from odb_nodes.errors import StateError

T = TypeVar("T")

_BLOCK = 1024  # indices computed at a time
_ORDERED = 1 << 18  # indices of a whole epoch's order computed at a time, in 40 bytes each
_MAX_SIZE = 2**62  # Indices are computed in 64 bits.
_ROUNDS = 6
_MIN_HALF_BITS = 4  # Tiny Feistel halves mix badly.
_MIXED_BLOCKS = 4
_TABLE_SIZE = 64  # Up to this size, most values of the smallest network are outside: use a table.


# --- a permutation --------------------------------------------------------------------------------


class Permutation:
    """A permutation of `range(size)`, decided by a seed and computed element by element.

    A balanced Feistel network over the next larger power of four. Results outside the range are
    encrypted again until they fall into it (Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002). Only integer arithmetic decides the result, and no library's version.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
        self._half = np.uint64(bits)
        self._mask = np.uint64((1 << bits) - 1)
        self._keys = [np.uint64(hash_ints(seed, index)) for index in range(_ROUNDS)]
        self._table: npt.NDArray[np.uint64] | None = None
        if size <= _TABLE_SIZE:
            self._table = self._encrypt(np.arange(1 << 2 * bits, dtype=np.uint64))

    def __call__(self, positions: IntArray) -> IntArray:
        """Return the elements at `positions`: (n,) int64 in `range(size)` -> (n,) int64."""
        elements = self._map(positions.astype(np.uint64))
        outside = np.flatnonzero(elements >= self._size)
        while outside.size:
            elements[outside] = self._map(elements[outside])
            outside = outside[elements[outside] >= self._size]
        return elements.astype(np.int64)

    def _map(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return self._encrypt(values) if self._table is None else self._table[values]

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        high, low = values >> self._half, values & self._mask
        for key in self._keys:
            mixed = (low ^ key) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
            high, low = low, high ^ ((mixed >> np.uint64(32)) & self._mask)
        return (high << self._half) | low


def epoch_order(size: int, seed: int, epoch: int, *, shuffle: bool) -> IntArray:
    """Return the order of an epoch whose samples are in no blocks, (size,)."""
    order = np.arange(size)
    if shuffle:
        permutation = Permutation(size, hash_ints(seed, epoch))
        for start in range(0, size, _ORDERED):
            part = order[start : start + _ORDERED]
            part[:] = permutation(part)
    return order


class BlockPermutation:
    """A permutation of `range(size)` that keeps the elements of a block close to each other.

    The blocks are permuted, and then the elements within each run of `mixed` blocks.
    """

    def __init__(self, size: int, starts: Sequence[int], mixed: int, seed: int) -> None:
        sizes = np.diff([*starts, size])
        order = Permutation(len(sizes), seed)(np.arange(len(sizes)))
        self._mixed, self._seed = mixed, seed
        self._starts = np.asarray(starts, np.int64)[order]
        self._ends = np.cumsum(sizes[order])  # of each block, among the positions

    def __call__(self, positions: IntArray) -> IntArray:
        """Return the elements at `positions`: (n,) int64 in `range(size)` -> (n,) int64."""
        elements, ends = np.empty_like(positions), self._ends
        mixes = np.searchsorted(ends, positions, "right") // self._mixed
        for mix in np.unique(mixes).tolist():
            first = mix * self._mixed
            is_in_mix = mixes == mix
            begin = int(ends[first - 1]) if first else 0
            end = int(ends[min(first + self._mixed, len(ends)) - 1])
            permutation = Permutation(end - begin, hash_ints(self._seed, mix))
            places = begin + permutation(positions[is_in_mix] - begin)
            blocks = np.searchsorted(ends, places, "right")
            elements[is_in_mix] = self._starts[blocks] + places - np.append(0, ends)[blocks]
        return elements


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
        self._blocks: list[int] | None = None
        if (blocks := shuffle_blocks(size)) is not None:
            self._blocks, self._mixed_blocks = blocks
        self._data_id: str | None = getattr(size, "data_id", None)
        self._file_versions: dict[str, str] = getattr(size, "file_versions", {})
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
        seed = hash_ints(self._seed, self._epochs.shuffle_key)
        self._permutation: Permutation | BlockPermutation | None = None
        if self._shuffle and self._blocks is not None:
            self._permutation = BlockPermutation(self._size, self._blocks, self._mixed_blocks, seed)
        elif self._shuffle:
            self._permutation = Permutation(self._size, seed)

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
        data: dict[str, Any] = {} if self._data_id is None else {"data_id": self._data_id}
        if self._blocks is not None:
            starts = zlib.crc32(int64_bytes(self._blocks))
            data["blocks"] = f"{len(self._blocks)}, CRC-32 {starts}"
            data["mixed_blocks"] = self._mixed_blocks
        return {
            **data,
            **self._file_versions,
            "size": self._size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "rank": self._rank,
            "world_size": self._world_size,
        }


def shuffle_blocks(dataset: Any) -> tuple[list[int], int] | None:
    """Return the starts of a dataset's blocks, and how many are mixed; `None` without blocks."""
    if (starts := getattr(dataset, "shuffle_blocks", None)) is None:
        return None
    size = len(dataset)
    mixed = check_count("mixed_blocks", getattr(dataset, "mixed_blocks", _MIXED_BLOCKS))
    first = np.asarray(starts)
    are_integers = first.dtype.kind in "iu"
    bounds = np.append(first.astype(np.int64), size) if are_integers else first
    if not are_integers or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"`shuffle_blocks` must be the first index of each block, ascending from 0 to at most "
            f"{size}, the length of the dataset, but is {starts!r:.200} instead."
        )
    return bounds[:-1].tolist(), mixed


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
