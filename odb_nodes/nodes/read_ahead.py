"""Node: reads ahead on a thread, without a trace in the state."""

from __future__ import annotations

from typing import Any, TypeVar

from torchdata.nodes import BaseNode, Prefetcher

from odb_nodes._compat.torchdata import snapshot_of
from odb_nodes._core.forks import Owner
from odb_nodes.contract.node import check_node

T = TypeVar("T")


class ReadAhead(BaseNode[T]):
    """Takes items from its source ahead of time, on a thread: torchdata's `Prefetcher`, plainer.

    Its state is the source's, as of the item that was last taken, so a run that read ahead may
    resume without, and the other way round. An error of the source is raised as it is.

    The thread begins with the first `next` after a reset: an iterator that is only asked for its
    state reads nothing, and meets no other rank.

    Args:
        source: node to read from.
        depth: items to read ahead.
    """

    def __init__(self, source: BaseNode[T], depth: int) -> None:
        super().__init__()
        check_node("source", source)
        self._depth = depth
        self._prefetcher = Prefetcher(_Relay(source), depth)
        self._reads = False
        self._owner = Owner()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state`, the source's, stands."""
        super().reset(initial_state)
        source = self._relay.source
        self._prefetcher, self._reads = Prefetcher(_Relay(source), self._depth), False
        source.reset(initial_state)

    def next(self) -> T:
        """Return the next item.

        Raises:
            WorkerError: the thread belongs to the process that this one was forked from.
        """
        if not self._reads:
            self._prefetcher.reset(None)
            self._reads, self._owner = True, Owner()
        self._owner.check("the read-ahead thread")
        try:
            item: T = next(self._prefetcher)
        except StopIteration:
            raise
        except Exception:
            if self._relay.error is not None:
                raise self._relay.error from None  # and not its copy in another message
            raise
        return item

    def get_state(self) -> dict[str, Any]:
        """Return the source's state after the last item that was taken."""
        if not self._reads:
            return self._relay.source.state_dict()
        return snapshot_of(self._prefetcher)

    @property
    def _relay(self) -> _Relay[T]:
        relay = self._prefetcher.source
        assert isinstance(relay, _Relay)
        return relay


class _Relay(BaseNode[T]):
    """Keeps the error of its source, which torchdata's threads hand on as text."""

    def __init__(self, source: BaseNode[T]) -> None:
        super().__init__()
        self.source = source
        self.error: BaseException | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)  # The source has been reset before.

    def next(self) -> T:
        try:
            item: T = next(self.source)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            # torchdata's thread would die of a SystemExit, and leave its reader waiting for ever.
            raise RuntimeError(f"the source raised {error!r}.") from error
        return item

    def get_state(self) -> dict[str, Any]:
        return self.source.state_dict()
