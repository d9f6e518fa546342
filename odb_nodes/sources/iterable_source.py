"""Source node: the samples of an iterable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any, TypeVar

from torchdata.nodes import BaseNode, Stateful

from odb_nodes.errors import SampleError, StateError
from odb_nodes.sources.epochs import EpochCounter
from odb_nodes.sources.rank import resolve_rank
from odb_nodes.state import detach, seal, unseal

T = TypeVar("T")


class IterableSource(BaseNode[T]):
    """Yields this rank's items of an iterable, iterated anew in every epoch.

    Rank r takes every `world_size`-th item, from the r-th on. An iterable with `set_epoch` is told
    the epoch; one with `state_dict` and `load_state_dict` is restored by them, any other by reading
    it again up to the position. It must yield the same items in the same order when iterated again.

    State: epoch and position, and the iterable's own where it has one.

    Args:
        iterable: an `IterableDataset`, a sampler, or any other iterable that can be iterated again.
        rank: this rank; by default that of torch.distributed, or of `RANK`. Give 0 (and a world
            size of 1) where the iterable shards itself.
        world_size: number of ranks; by default that of torch.distributed, or of `WORLD_SIZE`.

    Raises:
        TypeError: `iterable` is an iterator, which can be read only once.
    """

    EPOCH_KEY = "epoch"
    POSITION_KEY = "position"
    STARTED_KEY = "started"
    ITERABLE_KEY = "iterable"
    ENDED_KEY = "ended"
    STATE_KEYS = (EPOCH_KEY, POSITION_KEY, STARTED_KEY, ITERABLE_KEY, ENDED_KEY)

    def __init__(
        self, iterable: Iterable[T], rank: int | None = None, world_size: int | None = None
    ) -> None:
        super().__init__()
        if isinstance(iterable, Iterator) or not isinstance(iterable, Iterable):
            raise TypeError(
                "`iterable` must be an iterable that can be iterated once per epoch, but is "
                f"`{type(iterable).__name__}` instead. Wrap a generator in an `IterableDataset`."
            )
        self._iterable = iterable
        self._rank, self._world_size = resolve_rank(rank, world_size)
        self._epochs = EpochCounter()
        self._position = 0  # items read, other ranks' included
        self._loaded: Any = None  # the iterable's state, until it has yielded again
        self._ended = False
        self._early: Iterator[T] | None = None  # of the next epoch, begun to see this one's end
        self._it: Iterator[T] | None = None

    def __len__(self) -> int:
        """Return how many items this rank yields in an epoch.

        Raises:
            TypeError: the iterable does not know its length.
        """
        if not isinstance(self._iterable, Sized):
            raise TypeError(f"`{type(self._iterable).__name__}` has no length.")
        return len(range(self._rank, len(self._iterable), self._world_size))

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset without a state begins."""
        self._epochs.request(epoch)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state was saved with another rank or world size, or lies beyond the end
                of the iterable.
        """
        super().reset(initial_state)
        if self._loaded is not None and self._it is not None:
            # An iterable that restores itself when its iteration begins would do so too late.
            next(self._it, None)
        self._it, self._early = self._early if initial_state is None else None, None
        self._loaded, self._ended = None, False
        if initial_state is None:
            self._epochs.advance()
            self._position = 0
            self._tell_epoch()
            return
        state = unseal(initial_state, type(self).__name__, self._config(), self.STATE_KEYS)
        self._epochs.restore(state[self.EPOCH_KEY], state[self.STARTED_KEY])
        self._position = state[self.POSITION_KEY]
        self._loaded = state[self.ITERABLE_KEY]
        self._tell_epoch()
        if isinstance(self._iterable, Stateful) and self._loaded is not None:
            self._iterable.load_state_dict(detach(self._loaded))
            self._it = iter(self._iterable)
        elif self._position:
            self._it = iter(self._iterable)
            self._fast_forward(self._it)
        if state[self.ENDED_KEY]:
            self._see_end()

    def next(self) -> T:
        """Return the next item of this rank."""
        self._epochs.started = True
        if self._ended:
            raise StopIteration
        if self._it is None:
            self._it = iter(self._iterable)
        while True:
            try:
                item = next(self._it)
            except StopIteration:
                if self._position == 0:
                    raise SampleError(
                        f"`iterable` (`{type(self._iterable).__name__}`) yielded no sample in "
                        f"epoch {self._epochs.epoch}: it is empty, or can be iterated only once."
                    ) from None
                self._ended = True
                raise
            self._loaded = None
            self._position += 1
            if (self._position - 1) % self._world_size == self._rank:
                return item

    def get_state(self) -> dict[str, Any]:
        """Return epoch and position, and the iterable's own state."""
        own = self._loaded
        if own is None and isinstance(self._iterable, Stateful) and self._position:
            own = self._iterable.state_dict()
        return seal(
            type(self).__name__,
            self._config(),
            epoch=self._epochs.epoch,
            position=self._position,
            started=self._epochs.started,
            iterable=detach(own),
            ended=self._ended,
        )

    def _tell_epoch(self) -> None:
        if callable(set_epoch := getattr(self._iterable, "set_epoch", None)):
            set_epoch(self._epochs.epoch)

    def _see_end(self) -> None:
        """Stand at the end of the epoch, whether the iterable then ends or begins the next one."""
        self._ended = True
        it, self._it = self._it, None
        if it is not None:
            first = list(islice(it, 1))
            self._early = chain(first, it) if first else None

    def _fast_forward(self, it: Iterator[T]) -> None:
        for read in range(self._position):
            try:
                next(it)
            except StopIteration:
                raise StateError(
                    f"the state of {type(self).__name__} stands at item {self._position}, but the "
                    f"iterable ended after {read}. Resume over the data it was saved on."
                ) from None

    def _config(self) -> dict[str, Any]:
        return {"rank": self._rank, "world_size": self._world_size}
