"""Source node: the shuffled indices of one rank."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_bool, check_integer
from odb_nodes._core.hashing import hash_ints
from odb_nodes._core.ranks import has_data_elsewhere, resolve_rank
from odb_nodes.contract.epochs import EpochCounter
from odb_nodes.contract.state import seal, unseal
from odb_nodes.sources.permutation import Permutation

_BLOCK = 1024  # indices computed at a time
_MAX_SIZE = 2**62  # they are computed in 64 bits


class ShardedSampler(BaseNode[int]):
    """Yields this rank's indices into `range(size)`, shuffled anew in every epoch.

    Rank r takes every `world_size`-th element of the epoch's permutation, from the r-th on: the
    shards differ by at most one index and share none.

    State: epoch and position, whatever the size. Memory: constant.

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

    EPOCH_KEY = "epoch"
    POSITION_KEY = "position"
    STARTED_KEY = "started"
    CYCLE_KEY = "cycle"
    STATE_KEYS = (EPOCH_KEY, POSITION_KEY, STARTED_KEY, CYCLE_KEY)

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
        self._epochs = EpochCounter()
        self._position = 0
        self._block: list[int] = []
        self._block_start = 0

    def __len__(self) -> int:
        """Return how many indices this rank yields in an epoch."""
        return len(range(self._rank, self._size, self._world_size))

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset without a state begins."""
        self._epochs.request(epoch)

    def begin_cycle(self) -> None:
        """Make the next reset without a state begin this epoch again, in another order."""
        self._epochs.request_cycle()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state was saved with another size, shuffle, seed, rank or world size.
        """
        super().reset(initial_state)
        if initial_state is None:
            self._epochs.advance()
            self._position = 0
        else:
            state = unseal(initial_state, type(self).__name__, self.fingerprint(), self.STATE_KEYS)
            self._epochs.restore(
                state[self.EPOCH_KEY], state[self.STARTED_KEY], state[self.CYCLE_KEY]
            )
            self._position = state[self.POSITION_KEY]
        self._block = []
        self._block_start = self._position
        seed = hash_ints(self._seed, self._epochs.shuffle_key)
        self._permutation = Permutation(self._size, seed) if self._shuffle else None

    def next(self) -> int:
        """Return the next index of this rank."""
        self._epochs.started = True
        offset = self._position - self._block_start
        if offset >= len(self._block):
            if self._position >= len(self):
                raise StopIteration
            offset = 0
            self._block_start = self._position
            self._block = self._indices(self._position, min(self._position + _BLOCK, len(self)))
        self._position += 1
        return self._block[offset]

    def get_state(self) -> dict[str, Any]:
        """Return epoch, cycle and position."""
        return seal(
            type(self).__name__,
            self.fingerprint(),
            epoch=self._epochs.epoch,
            position=self._position,
            started=self._epochs.started,
            cycle=self._epochs.cycle,
        )

    def _indices(self, start: int, stop: int) -> list[int]:
        places = np.arange(start, stop, dtype=np.int64) * self._world_size + self._rank
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
