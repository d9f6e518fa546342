"""A root node as an iterable over epochs that can be saved and resumed at any point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Annotated, Any, Generic, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes._compat.torchdata import unrepeatable_sampler
from odb_nodes._core.checks import MAX_COUNT, check_count
from odb_nodes.contract import Count, InRange, NodeState, SourceState, copy_state
from odb_nodes.contract.graph import begin_epoch, close_nodes, length_of, stop_threads, walk
from odb_nodes.contract.node import check_node
from odb_nodes.contract.source_states import check_state_of
from odb_nodes.contract.state import allow_mismatch, seal_whole, unseal_whole
from odb_nodes.errors import SampleError, StateError
from odb_nodes.loader.ownership import claim, release

T = TypeVar("T")


@dataclass(kw_only=True)
class LoaderState(NodeState):
    """Where a `Loader` stands.

    Attributes:
        root: the state of the graph.
        num_yielded: items yielded in the epoch.
        ended: the end of the epoch was seen.
        next_epoch: the epoch that was asked for by `set_epoch`, and has not begun.
        left: the epoch was left by `set_epoch`, so the next one follows.
    """

    root: SourceState
    num_yielded: Count
    ended: bool
    next_epoch: Annotated[int, InRange(0, MAX_COUNT)] | None = None
    left: bool


class Loader(Generic[T]):
    """Iterates a graph, one epoch per `iter()`; torchdata's `Loader` with its faults repaired.

    The sequence of items and ends of epochs after loading a state is the one that would have
    followed in the run that saved it. So a state saved after an epoch's last item, but before its
    end was seen, gives an empty rest of that epoch, and then the next one; a state saved after the
    end gives the next one.

    `iter()` goes on with a loaded state; it returns the present iterator if that has not yielded
    yet; otherwise it leaves the present epoch and begins the next. An older iterator is then no
    longer valid.

    After `close`, and after an exception in the graph, the workers are gone and the position is
    kept: the next `iter()` goes on from there. For that, the state is taken before each item.

    Args:
        root: last node of the graph.
        restart_on_stop_iteration: what a state gives that was saved after the end of an epoch: the
            next epoch, or nothing.
        stop_timeout_s: seconds to wait for a thread of the graph to finish what it is doing.

    Raises:
        TypeError: `root` is no node.
        ValueError: a node has `in_order=False`, or a sampler that cannot yield its order again:
            these lose and repeat items on resume.
    """

    def __init__(
        self,
        root: BaseNode[T],
        restart_on_stop_iteration: bool = True,
        *,
        stop_timeout_s: float = 60.0,
    ) -> None:
        check_node("root", root)
        for node in walk(root):
            if getattr(node, "in_order", True) is False:
                raise ValueError(
                    f"`in_order` of `{type(node).__name__}` must be True: without an order, no "
                    "state can say which items came out, and a resumed run loses and repeats some."
                )
            if (sampler := unrepeatable_sampler(node)) is not None:
                raise ValueError(
                    f"`sampler` of `{type(node).__name__}` is a `{type(sampler).__name__}`, whose "
                    "order cannot be drawn again: a resumed run loses and repeats samples. Use "
                    "`ShardedSampler`, or a sampler that is seeded by `set_epoch`."
                )
        self.root = root
        self._restart = restart_on_stop_iteration
        self._stop_timeout_s = stop_timeout_s
        self._it: LoaderIterator[T] | None = None
        self._pending: LoaderState | None = None  # a state that the next iter() begins with
        self._strict = True
        self._next_epoch: int | None = None
        self._lost: Exception | None = None  # why nobody knows where the graph stands

    def __len__(self) -> int:
        """Return how many items an epoch has.

        Raises:
            TypeError: it cannot be known before the epoch has ended, as with dynamic batches.
        """
        try:
            return length_of(self.root)
        except TypeError as error:
            raise TypeError(
                f"{error} Dynamic batches are counted only as they come: measure progress in "
                "samples, by `local_samples` of the `StepInfo` of each batch."
            ) from None

    def __iter__(self) -> LoaderIterator[T]:
        """Return the iterator of a loaded state's epoch, or of the next one.

        Raises:
            RuntimeError: another `Loader` iterates a node of the graph, and is not closed.
            StateError: the loaded state does not fit the graph. It stays loaded.
        """
        if self._pending is not None or self._it is None or self._it.touched:
            self._begin()
        assert self._it is not None
        return self._it

    def state_dict(self) -> dict[str, Any]:
        """Return where the most recent iterator stands. The caller owns the result."""
        state = self._pending
        if state is None:
            state = (iter(self) if self._it is None else self._it).state()
        return seal_whole(type(self).__name__, replace(state, next_epoch=self._next_epoch))

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Make the next `iter()` go on from a state, which is copied.

        Args:
            state_dict: what `state_dict` returned.
            strict: refuse a state that was saved with another configuration; else warn.

        Raises:
            StateError: it is no state of a `Loader`, or is damaged. What does not fit the nodes is
                raised by `iter()`.
        """
        state = unseal_whole(state_dict, type(self).__name__, LoaderState)
        self._pending, self._strict = state, strict
        self._next_epoch = state.next_epoch
        self._it, self._lost = None, None

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one that begins, in every node that counts epochs.

        A loaded state that stands within an epoch wins: it says itself which epoch it is in.
        """
        epoch = check_count("epoch", epoch, 0)
        pending = self._pending
        if pending is not None and not (pending.ended or pending.left):
            return
        self._next_epoch = epoch
        if self._it is not None:
            self._it.leave()

    def close(self) -> None:
        """Stop all threads and workers of the graph and keep the position. Idempotent.

        Raises:
            TimeoutError: a thread did not finish within `stop_timeout_s`.
        """
        it, self._it = self._it, None
        try:
            if it is not None:
                self._pending, self._strict = self._position(it), True
        finally:
            close_nodes(self.root, self._stop_timeout_s)
            release(self.root, self)

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self) -> None:
        """Make the iterator that `iter` asks for. If that raises, all stays as it was."""
        if self._lost is not None:
            raise StateError(
                "the graph failed, and its position is unknown: load the last saved state."
            ) from self._lost
        claim(self.root, self)
        state = before = self._pending
        if before is None and self._it is not None:
            before = self._position(self._it)
        self._it = None
        try:
            stop_threads(self.root, self._stop_timeout_s)
            it = self._begin_epoch() if state is None else self._restore(state)
        except BaseException:
            self._pending = before
            raise
        self._it, self._pending = it, None

    def _position(self, it: LoaderIterator[T]) -> LoaderState:
        try:
            return it.state()
        except Exception as error:
            self._lost = error
            raise

    def _restore(self, state: LoaderState) -> LoaderIterator[T]:
        try:
            with allow_mismatch(not self._strict):
                self.root.reset(copy_state(state.root))
        except (SampleError, StateError):
            raise
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise StateError(
                f"a node cannot take its part of the state, or your own code raised {error!r}. "
                "Build the graph with the same nodes in the same order as when it was saved."
            ) from error
        if state.ended:
            self._see_end()
        if (state.ended and self._restart) or state.left:
            stop_threads(self.root, self._stop_timeout_s)
            return self._begin_epoch()
        return LoaderIterator(self, state.num_yielded, state.ended)

    def _begin_epoch(self) -> LoaderIterator[T]:
        begin_epoch(self.root, self._next_epoch)
        self._next_epoch = None
        return LoaderIterator(self, 0)

    def _see_end(self) -> None:
        """Let the nodes see their end again: some of torchdata's do not keep it in their state."""
        try:
            next(self.root)
        except StopIteration:
            return
        raise StateError(
            "the state was saved at the end of an epoch, but the graph yields more items there. "
            "Resume over the data that the state was saved on."
        )


class LoaderIterator(Iterator[T]):
    """One epoch of a `Loader`, or the rest of one."""

    def __init__(self, loader: Loader[T], num_yielded: int, ended: bool = False) -> None:
        self._loader = loader
        self._num_yielded = num_yielded
        self._ended = ended
        self._state: LoaderState | None = None  # as long as it is the present one
        self.touched = False  # so that the next `iter()` begins an epoch
        self._left = False  # by `set_epoch`, and not taken up again

    def leave(self) -> None:
        """Make the next `iter()` begin an epoch, unless this one is taken up again."""
        self.touched = self._left = True
        self._state = None

    def state(self) -> LoaderState:
        """Return where this iterator stands. Shared: not to be changed or given away."""
        if self._state is None:
            root = self._loader.root.state_dict()
            check_state_of(self._loader.root, root)
            self._state = LoaderState(
                root=copy_state(root),
                num_yielded=self._num_yielded,
                ended=self._ended,
                left=self._left,
            )
        return self._state

    def __next__(self) -> T:
        loader = self._loader
        self._check_valid()
        if self._left:
            self._left, self._state = False, None
        self.touched = True
        if self._ended:
            raise StopIteration
        try:
            self.state()  # Should the graph raise, this is where it is taken up again.
            item: T = next(loader.root)
        except StopIteration:
            self._check_valid()
            self._ended, self._state = True, None
            raise
        except BaseException:
            self._check_valid()
            loader.close()
            raise
        self._num_yielded, self._state = self._num_yielded + 1, None
        return item

    def _check_valid(self) -> None:
        """Raise if the loader has gone on without this iterator, perhaps on another thread."""
        if self._loader._it is not self:
            raise RuntimeError(
                "this iterator is no longer valid: its `Loader` was closed, loaded, iterated "
                "again, or raised. Use the newest `iter(loader)`."
            )
