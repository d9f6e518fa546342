"""A root node as an iterable over epochs that can be saved and resumed at any point."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes._compat.torchdata import replays_items, unrepeatable_sampler
from odb_nodes._core.checks import check_bool, check_count
from odb_nodes._core.processes import Owner
from odb_nodes.contract import NodeState, SourceState, copy_state, snapshot
from odb_nodes.contract.config import loading_with, several_changes
from odb_nodes.contract.graph import (
    begin_epoch,
    close_nodes,
    describe_empty_epoch,
    epochs_of,
    has_threads,
    length_of,
    stop_threads,
    walk,
)
from odb_nodes.contract.node import StatefulNode, check_node
from odb_nodes.contract.state import seal_whole, unseal_whole
from odb_nodes.errors import SampleError, StateError
from odb_nodes.nodes.exclusions import ExcludedKeys
from odb_nodes.sources.source_mixer import SourceMixer

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_NODE = "Loader"  # the name in a state, that of subclasses too


@dataclass(kw_only=True)
class LoaderState(NodeState):
    """Where a `Loader` stands."""

    root: SourceState
    num_yielded: int  # in the epoch
    ended: bool  # the end of the epoch was seen
    # what `set_epoch` and `set_weights` have set for an epoch that has not begun
    next_epoch: int | None = None
    next_weights: dict[str, float] = field(default_factory=dict)
    left: bool  # the epoch was left, by an `iter` that failed: the next one follows

    @property
    def is_within(self) -> bool:
        """Whether items of the epoch are out, and its end was not seen: it goes on."""
        return self.num_yielded > 0 and not self.ended and not self.left


class Loader(Generic[T]):
    """Iterates a graph, one epoch per `iter()`; torchdata's `Loader` with its faults repaired.

    After loading a state, items and ends of epochs follow as in the run that saved it. A state that
    was saved after the last item of an epoch, but before its end was seen, gives an empty rest of
    that epoch and then the next one; a state saved after the end gives the next one.

    `iter()` continues from a loaded state, or from where the graph raised. It returns the present
    iterator if that has not yielded yet. Otherwise it leaves the present epoch, also after `close`,
    and begins the next one; older iterators become invalid. One thread takes all items; another one
    may call `close`.

    `close`, and an exception in the graph, stop the workers and keep the position: `state_dict`
    returns it.

    Args:
        root: last node of the graph.
        restart_on_stop_iteration: whether a state that was saved after the end of an epoch gives
            the next epoch, or nothing.
        stop_timeout_s: seconds to wait for a thread of the graph to finish what it is doing.

    Raises:
        TypeError: `root` is no node.
        ValueError: a node would lose or repeat items: it has `in_order=False`, a sampler that
            cannot yield its order again, or snapshots that `exclude` would change.
    """

    def __init__(
        self,
        root: BaseNode[T],
        restart_on_stop_iteration: bool = True,
        *,
        stop_timeout_s: float = 60.0,
    ) -> None:
        _check_root(root)
        self.root = root
        self._restart = restart_on_stop_iteration
        self._stop_timeout_s = stop_timeout_s
        self._it: LoaderIterator[T] | None = None  # the one that takes items from the graph
        self._state: LoaderState | None = None  # where it stands; `None` once that is outdated
        self._num_yielded, self._ended = 0, False  # of the present epoch
        self._touched = False  # the next iter() begins an epoch, wherever it stands
        self._strict, self._change_budget = True, False
        self._next_epoch: int | None = None
        self._asked_epoch: int | None = None  # by `set_epoch`, of a loaded state within an epoch
        self._next_weights: dict[str, float] = {}
        self._lost: Exception | None = None  # why the position of the graph is unknown
        self._had_items = False  # in an epoch before this one
        self._owner = Owner()
        self._beginning = threading.RLock()

    def __len__(self) -> int:
        """Return how many items an epoch has."""
        try:
            return length_of(self.root)
        except TypeError as error:
            raise TypeError(
                f"{error} Dynamic batches are counted only as they come: measure progress in "
                "samples, by `StepInfo.local_samples` of each batch, which add up to `num_samples` "
                "of an `ODBDataLoader`: `tqdm(total=loader.num_samples)`."
            ) from None

    def __bool__(self) -> bool:
        return True  # and not `len`, which few graphs know

    def __iter__(self) -> Iterator[T]:
        """Return the iterator of a loaded state's epoch, or of the next one."""
        it = self._it
        with _held(self._beginning), nullcontext() if it is None else _held(it.taking):
            return self._begin() if it is None or self._touched else it

    @property
    def position(self) -> LoaderState | None:
        """Where it stands; `None` before the first iterator. Shared: not to be changed."""
        if self._state is None and self._it is not None:
            self._state = LoaderState(
                root=snapshot(self.root),
                num_yielded=self._num_yielded,
                ended=self._ended,
                left=False,
            )
        return self._state

    def state_dict(self) -> dict[str, Any]:
        """Return where the most recent iterator stands: plain data, which the caller owns."""
        if self._it is not None or self._state is None:
            self._check_process()
        if self.position is None:
            iter(self)
        state: Any = self.position
        state = replace(state, next_epoch=self._next_epoch, next_weights=self._next_weights)
        return seal_whole(_NODE, state)

    def load_state_dict(
        self, state_dict: dict[str, Any], *, strict: bool = True, change_budget: bool = False
    ) -> None:
        """Make the next `iter()` continue from a state, which is copied.

        Args:
            state_dict: what `state_dict` returned.
            strict: whether a state of another configuration is an error, or only a warning.
            change_budget: whether the budget may have lower `tokens`, `max_samples` and
                `max_patches` than before, on all ranks. Not for padded budgets with `shapes`.

        Raises:
            StateError: it is no state of a `Loader`, or is damaged. `iter()` raises if the state
                does not fit the nodes.
            TypeError: `change_budget` is no bool.
        """
        check_bool("change_budget", change_budget)
        state = unseal_whole(state_dict, _NODE, LoaderState)
        self._it, self._state, self._touched, self._lost = None, state, False, None
        self._strict, self._change_budget = strict, change_budget
        self._next_epoch, self._next_weights = state.next_epoch, state.next_weights
        self._asked_epoch = None

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one that begins, in every node that counts epochs.

        The present iterator goes on within its epoch. A state that is saved there gives the rest of
        that epoch, and then `epoch`. A state within `epoch`, loaded before, goes on there; one that
        is loaded later replaces `epoch`. Where items of another epoch remain, `iter()` raises a
        `StateError`.
        """
        epoch = check_count("epoch", epoch, 0)
        state = self._state
        if self._it is None and not self._touched and state is not None and state.is_within:
            self._asked_epoch = epoch
        else:
            self._next_epoch, self._touched = epoch, self._touched or self._it is not None

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Mix by other weights from the next epoch on. All ranks set the same.

        States contain them, and a state that is loaded later replaces them. If ranks set different
        weights, all raise a `StateError` at the first step of the epoch.

        Args:
            weights: name of the source -> weight, any positive numbers.

        Raises:
            TypeError, ValueError: the weights are not valid, they follow a schedule, or the graph
                has no `SourceMixer`.
        """
        mixers = _outermost_mixers(self.root)
        if not mixers:
            raise ValueError(
                "`set_weights` needs a mixture, but the graph has none. Pass a dict of datasets, "
                "or use a `SourceMixer`."
            )
        for mixer in mixers:
            self._next_weights = mixer.check_can_set(weights)

    def close(self) -> None:
        """Stop all threads and workers of the graph and keep the position. Idempotent.

        The next `iter()` begins an epoch, as after `break`; to continue this one, load
        `state_dict()`. In a forked child, and while another loader iterates a node of the graph,
        this does nothing.

        Raises:
            TimeoutError: a thread did not finish within `stop_timeout_s`.
        """
        if not self._is_foreign() and _iterated_elsewhere(self.root, self) is None:
            self._suspend()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a `{type(self).__name__}` cannot be copied or pickled, since its nodes stand within "
            "their data. Make another one with the same arguments, and load `state_dict()` there."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> LoaderIterator[T]:
        """Make the iterator that `iter` asks for. If that raises, the next `iter` tries again."""
        self._check_process()
        if self._lost is not None:
            raise StateError(
                "the graph failed, and its position is unknown: load the last saved state."
            ) from self._lost
        _claim(self.root, self)
        goes_on = self._it is None and not self._touched
        before = self._known_position()
        self._had_items = self._had_items or (before is not None and before.num_yielded > 0)
        self._it, self._state = None, before
        try:
            stop_threads(self.root, self._stop_timeout_s)
            if before is not None and goes_on:
                self._restore(before)
            else:
                self._begin_epoch()
        except BaseException:
            if before is not None and not goes_on:
                self._state = replace(before, left=True)
            close_nodes(self.root, self._stop_timeout_s)  # as after an exception in `next`
            raise
        finally:
            self._touched = False
        self._state, self._strict, self._change_budget = None, True, False
        self._asked_epoch = None
        self._it = it = LoaderIterator(self)
        return it

    def _begin_epoch(self) -> None:
        for mixer in _outermost_mixers(self.root) if self._next_weights else ():
            mixer.set_weights(self._next_weights)
        begin_epoch(self.root, self._next_epoch)
        self._next_epoch, self._next_weights = None, {}
        self._num_yielded, self._ended = 0, False

    def _restore(self, state: LoaderState) -> None:
        try:
            with loading_with(
                may_differ=not self._strict,
                smaller_budget=self._change_budget,
                leaves_epoch=state.left,
            ):
                self.root.reset(copy_state(state.root))
        except StateError as error:
            if self._strict and (changes := self._changes(state)) is not None:
                raise StateError(changes) from error
            raise
        except SampleError:
            raise
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise StateError(
                f"a node cannot take its part of the state, or your own code raised {error!r}. "
                "If it is yours, mend that; else build the graph with the same nodes in the same "
                "order as when it was saved."
            ) from error
        # Some nodes of torchdata do not keep in their state that they have seen their end.
        if state.ended and self._has_items():
            raise StateError(
                "the state was saved at the end of an epoch, but the graph yields more items "
                "there. Resume over the data that the state was saved on."
            )
        asked = self._asked_epoch if state.is_within else self._next_epoch
        begins = state.left or (state.ended and self._restart)
        begins = begins or self._begins_another(state, asked)
        if asked is not None:
            self._next_epoch = asked if begins else None
        if begins:
            stop_threads(self.root, self._stop_timeout_s)
            self._begin_epoch()
        else:
            self._num_yielded, self._ended = state.num_yielded, state.ended

    def _changes(self, state: LoaderState) -> str | None:
        """Return an error that names all changes of the configuration, where there are several."""
        nodes = [node for node in walk(self.root) if isinstance(node, StatefulNode)]
        present = [(type(node).__name__, node.fingerprint()) for node in nodes]
        with loading_with(smaller_budget=self._change_budget):
            return several_changes(present, state.root)

    def _begins_another(self, state: LoaderState, asked: int | None) -> bool:
        """Tell whether `set_epoch` asks for another epoch than that of a restored state."""
        epochs = epochs_of(self.root)
        if asked is None or state.ended:
            return asked is not None
        if asked in epochs or not epochs:
            return False
        # A state may be after the last item, and before its end was seen.
        if state.num_yielded and self._has_items():
            epoch = max(epochs)
            raise StateError(
                f"`set_epoch` must be given {epoch}, the epoch that the state stands within, but "
                f"got {asked}, and items of epoch {epoch} remain. Call `set_epoch({epoch})` to go "
                f"on with them; to leave them out, call `iter(loader)` after that, and then "
                f"`set_epoch({asked})`."
            )
        return True

    def _has_items(self) -> bool:
        """Take an item of the graph, and tell whether there is one."""
        try:
            next(self.root)
        except StopIteration:
            return False
        return True

    def _suspend(self) -> None:
        """Close the graph, and keep where it stands."""
        try:
            self._state = self._known_position()
        finally:
            self._it = None
            close_nodes(self.root, self._stop_timeout_s)

    def _known_position(self) -> LoaderState | None:
        try:
            return self.position
        except Exception as error:
            self._it, self._lost = None, error
            raise

    def _check_process(self) -> None:
        """Raise a `WorkerError` where the threads and workers are those of another process."""
        if self._is_foreign():
            self._owner.check("this loader")

    def _is_foreign(self) -> bool:
        if self._owner.is_here:
            return False
        if has_threads(self.root):
            return True
        self._owner = Owner()  # A graph without threads and workers goes on in a forked child.
        return False

    def _take(self, it: LoaderIterator[T]) -> T:
        """Return the next item."""
        self._touched = True
        if self._ended:
            raise StopIteration
        try:
            _ = self.position  # Should the graph raise, this is where it is taken up again.
            item: T = next(self.root)
        except StopIteration:
            self._check_current(it)
            if self._had_items and not self._num_yielded:
                self._touched = False
                self._suspend()
                raise SampleError(
                    "the epoch has no item, but one before had some. "
                    f"{describe_empty_epoch(self.root)}"
                ) from None
            self._ended, self._state = True, None
            raise
        except BaseException:
            self._check_current(it)
            self._touched = False
            self._suspend()
            raise
        self._check_current(it)
        self._num_yielded, self._state = self._num_yielded + 1, None
        return item

    def _check_current(self, it: LoaderIterator[T]) -> None:
        """Raise if the loader has gone on without an iterator, perhaps on another thread."""
        self._check_process()
        if self._it is not it:
            raise RuntimeError(
                "this iterator is no longer valid: its `Loader` was closed, loaded, iterated "
                "again, or raised. Use the newest `iter(loader)`."
            )


class LoaderIterator(Iterator[T]):
    """One epoch of a graph, or the rest of one."""

    def __init__(self, loader: Loader[T]) -> None:
        self._loader = loader
        self.taking = threading.RLock()
        """Held by the thread that is inside of `next`, or begins another epoch."""

    def __next__(self) -> T:
        loader = self._loader
        loader._check_current(self)
        with _held(self.taking):
            return loader._take(self)


@contextmanager
def _held(lock: threading.RLock) -> Iterator[None]:
    """Hold the lock of an iterator or a loader, or raise where another thread holds it."""
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            "another thread is inside of `next` or `iter` of this loader: one thread must take all "
            "items. To use several, hand the items on by a `queue.Queue`."
        )
    try:
        yield
    finally:
        lock.release()


def _check_root(root: BaseNode[Any]) -> None:
    check_node("root", root)
    for node in walk(root):
        name = type(node).__name__
        if getattr(node, "in_order", True) is False:
            raise ValueError(
                f"`in_order` of `{name}` must be True: without an order, no state can say which "
                "items came out, and a resumed run loses and repeats some."
            )
        if (sampler := unrepeatable_sampler(node)) is not None:
            raise ValueError(
                f"`sampler` of `{name}` is a `{type(sampler).__name__}`, whose order cannot be "
                "drawn again: a resumed run loses and repeats samples. Use `ShardedSampler`, or a "
                "sampler that is seeded by `set_epoch`."
            )
        named = (getattr(one, "exclude", None) for one in walk(node))
        if replays_items(node) and any(isinstance(one, ExcludedKeys) and one for one in named):
            raise ValueError(
                f"`exclude` must be empty below a `{name}` that takes items of its source once "
                "more when it is restored, and would take others then. Leave `snapshot_frequency` "
                "at 1, and `prebatch` at None."
            )


_owners: weakref.WeakKeyDictionary[BaseNode[Any], weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Which `Loader` last moved a node: two at a time would take each other's items."""


def _claim(root: BaseNode[Any], loader: Loader[Any]) -> None:
    """Make `loader` the one that moves the nodes of a graph."""
    if (node := _iterated_elsewhere(root, loader)) is not None:
        raise RuntimeError(
            f"a `{type(node).__name__}` of this `{type(loader).__name__}` is iterated by "
            "another one, and each would take items that the other one then lacks. Make a node "
            "for each loader, or `close()` the other one before."
        )
    for node in walk(root):
        _owners[node] = weakref.ref(loader)


def _iterated_elsewhere(root: BaseNode[Any], loader: Loader[Any]) -> BaseNode[Any] | None:
    """Return a node of a graph that another `Loader` iterates; `None` where there is none."""
    nodes = list(walk(root))
    if any(_is_iterated_elsewhere(node, loader) for node in nodes):
        gc.collect()  # A loader and its iterator refer to each other: it may be gone already.
    return next((node for node in nodes if _is_iterated_elsewhere(node, loader)), None)


def _is_iterated_elsewhere(node: BaseNode[Any], loader: Loader[Any]) -> bool:
    owner = _owners[node]() if node in _owners else None
    return owner is not None and owner is not loader and owner._it is not None


def _outermost_mixers(root: BaseNode[Any]) -> list[SourceMixer]:
    """Return the mixtures that are not within another one: one per rank that is hosted."""
    mixers = [node for node in walk(root) if isinstance(node, SourceMixer)]
    inner = {id(node) for mixer in mixers for node in walk(mixer) if node is not mixer}
    return [mixer for mixer in mixers if id(mixer) not in inner]
