"""Node: reads ahead on a thread, without a trace in the state."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from torchdata.nodes import BaseNode, Prefetcher

from odb_nodes.checks import check_node

T = TypeVar("T")


class ReadAhead(BaseNode[T]):
    """Takes items from its source ahead of time, on a thread: torchdata's `Prefetcher`, plainer.

    Its state is the source's, as of the item that was last taken, so a run that read ahead may
    resume without, and the other way round. An error of the source is raised as it is.

    It begins with the first `next` after a reset: an iterator that is only asked for its state
    reads nothing, and meets no other rank.

    Args:
        source: node to read from.
        depth: items to read ahead.
    """

    def __init__(self, source: BaseNode[T], depth: int) -> None:
        super().__init__()
        check_node("source", source)
        self._relay = _Relay(source)
        self._prefetcher = Prefetcher(self._relay, depth)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state`, the source's, stands."""
        super().reset(initial_state)
        self.interrupt()
        self._relay = self._prefetcher.source = _Relay(self._relay.source)  # a gate of its own
        state = {"snapshot": initial_state, "steps_since_snapshot": 0}
        self._prefetcher.reset(None if initial_state is None else state)

    def next(self) -> T:
        """Return the next item."""
        self._relay.gate.open()
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
        state: dict[str, Any] = self._prefetcher.state_dict()["snapshot"]
        return state

    def interrupt(self) -> None:
        """Let a thread go that waits for the first `next`."""
        self._relay.gate.shut()

    def __del__(self) -> None:
        if hasattr(self, "_relay"):
            self._relay.gate.shut()


class _Gate:
    """Where a thread waits until it may go on, or has to end."""

    def __init__(self) -> None:
        self._decided = threading.Event()
        self._is_open = False

    def open(self) -> None:
        if not self._decided.is_set():
            self._is_open = True
            self._decided.set()

    def shut(self) -> None:
        self._decided.set()

    def wait(self) -> bool:
        self._decided.wait()
        return self._is_open


class _Relay(BaseNode[T]):
    """Keeps the error of its source, which torchdata's threads hand on as text."""

    def __init__(self, source: BaseNode[T]) -> None:
        super().__init__()
        self.source = source
        self.error: BaseException | None = None
        self.gate = _Gate()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.error = None
        self.source.reset(initial_state)

    def next(self) -> T:
        if not self.gate.wait():
            raise StopIteration
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
