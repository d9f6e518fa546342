"""A root node as an iterable over epochs that can be saved and resumed at any point."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, get_args

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import check_bool, check_choice, check_count
from odb_nodes._support.processes import Owner
from odb_nodes.core.contract import NodeState, SourceState, copy_state, graph, snapshot
from odb_nodes.core.contract.config import Loading, loading_with, several_changes
from odb_nodes.core.contract.node import StatefulNode
from odb_nodes.core.contract.state import seal_whole, unseal_whole
from odb_nodes.core.loader.graph_checks import check_root, claim, iterated_elsewhere
from odb_nodes.core.sources.source_mixer import SourceMixer
from odb_nodes.errors import PositionError, SampleError, StateError

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

Verify = Literal["lazy", "eager"]
"""When samples are made again and compared with a state: see `Loader.load_state_dict`."""

_NODE = "Loader"  # the name in a state, also for subclasses
_NO_ITEM: Any = object()


@dataclass(kw_only=True)
class LoaderState(NodeState):
    """The position of a `Loader`."""

    root: SourceState
    num_yielded: int  # items of the epoch that were yielded
    ended: bool  # whether `next` raised `StopIteration`: the epoch is at its end
    # from `set_epoch` and `set_weights`, for an epoch that has not begun
    next_epoch: int | None = None
    next_weights: dict[str, float] = field(default_factory=dict)
    left: bool  # whether an `iter` that failed has left the epoch: the next epoch follows

    @property
    def is_within(self) -> bool:
        """Whether the position is between the first item and the end of an epoch."""
        return self.num_yielded > 0 and not self.ended and not self.left


# --- the status of a loader -----------------------------------------------------------------------
#
# idle    -- `iter` begins the next epoch                --> running
# paused  -- `iter` resumes at its position              --> running
# running -- `iter`, once used, as from idle             --> running
#         -- `close`                                     --> paused; once used, idle
#         -- `next` raises                               --> paused; lost if `snapshot` raises too
# any     -- `load_state_dict`, an `iter` that raises    --> paused; idle before the first epoch


class _Idle(NamedTuple):
    """Before the next epoch: no epoch has begun, or `close` has left an epoch at a position."""

    position: LoaderState | None = None


class _Paused(NamedTuple):
    """At a position that the graph will be restored to."""

    position: LoaderState
    loading: Loading = Loading()
    requested_epoch: int | None = None  # from a `set_epoch` at a position within an epoch


class _Running(Generic[T]):
    """Within an epoch. It is used once `next` or `set_epoch` was called."""

    def __init__(self, root: BaseNode[T], num_yielded: int, ended: bool, had_items: bool) -> None:
        self.is_used = False
        self._root = root
        self._had_items = had_items  # whether an earlier epoch had items
        self._num_yielded = num_yielded
        self._ended = ended
        self._position: LoaderState | None = None  # `None` when out of date

    @property
    def position(self) -> LoaderState:
        position = self._position
        if position is None:
            self._position = position = LoaderState(
                root=snapshot(self._root),
                num_yielded=self._num_yielded,
                ended=self._ended,
                left=False,
            )
        return position

    def use(self) -> None:
        """Have the next `iter` begin another epoch."""
        self.is_used = True

    def take(self) -> T:
        """Return the next item. After an error, `position` is where to resume."""
        self.use()
        if self._ended:
            raise StopIteration
        self._position = self.position
        item: T = next(self._root, _NO_ITEM)
        if item is _NO_ITEM:
            if self._had_items and not self._num_yielded:
                why = graph.describe_empty_epoch(self._root)
                raise SampleError(f"the epoch has no item, but an earlier epoch had items. {why}")
            self._ended = True
            self._position = None
            raise StopIteration
        self._num_yielded += 1
        self._position = None
        return item


class _Lost(NamedTuple):
    """The graph failed, and so did its `snapshot`: the position is unknown."""

    error: BaseException
    position: None = None


class Loader(Generic[T]):
    """Iterates a graph, one epoch per `iter()`; torchdata's `Loader` with its faults repaired.

    After loading a state, items and ends of epochs follow as in the run that saved it. With a state
    from after the last item of an epoch, but before its `StopIteration`, the first iterator is
    empty, and the second begins the next epoch. A state from after the end begins the next epoch.

    `iter()` continues from a loaded state, or from where the graph raised. If the present iterator
    has not yielded yet, `iter()` returns that iterator. Otherwise, also after `close`, `iter()`
    leaves the present epoch and begins the next; older iterators become invalid. One thread takes
    all items; another thread may call `close`.

    `close`, and an exception in the graph, stop the workers and keep the position: `state_dict`
    returns it.

    Args:
        root: last node of the graph.
        restart_on_stop_iteration: whether the first `iter()` after loading a state from the end of
            an epoch begins the next epoch; otherwise that iterator is empty.
        stop_timeout_s: seconds to wait until a thread of the graph has stopped.

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
        check_root(root)
        self.root = root
        self._restart = restart_on_stop_iteration
        self._stop_timeout_s = stop_timeout_s
        self._status: _Idle | _Paused | _Running[T] | _Lost = _Idle()
        self._next_epoch: int | None = None  # from `set_epoch`
        self._next_weights: dict[str, float] = {}
        self._had_items = False  # whether an earlier epoch had items
        self._iterators = weakref.WeakValueDictionary[_Running[T], LoaderIterator[T]]()
        self._owner = Owner()
        self._moving = threading.RLock()  # held within `next` and `iter`

    def __len__(self) -> int:
        """Return how many items an epoch has."""
        try:
            return graph.length_of(self.root)
        except TypeError as error:
            raise TypeError(
                f"{error} The number of dynamic batches is not known in advance: measure progress "
                "in samples, by `StepInfo.local_samples` of each batch, which add up to "
                "`num_samples` of an `ODBDataLoader`: `tqdm(total=loader.num_samples)`."
            ) from None

    def __bool__(self) -> bool:
        return True  # By default, `bool` would call `len`, which few graphs have.

    def __iter__(self) -> Iterator[T]:
        """Return the iterator of a loaded state's epoch, or of the next one."""
        with _locked(self._moving):
            status = self._status
            if not isinstance(status, _Running) or status.is_used:
                status = self._begin()
            return self._iterators.setdefault(status, LoaderIterator(self, status))

    @property
    def position(self) -> LoaderState | None:
        """The present position; `None` before the first iterator. Shared: do not change it."""
        return self._status.position

    @property
    def _is_iterating(self) -> bool:
        return isinstance(self._status, _Running)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the most recent iterator: plain data, which the caller owns."""
        if isinstance(self._status, _Running):
            self._check_process()
        if self.position is None:
            iter(self)
        state: Any = self.position
        state = replace(state, next_epoch=self._next_epoch, next_weights=self._next_weights)
        return seal_whole(_NODE, state)

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        *,
        strict: bool = True,
        change_budget: bool = False,
        verify: Verify = "lazy",
    ) -> None:
        """Make the next `iter()` continue from a state, which is copied.

        Args:
            state_dict: what `state_dict` returned.
            strict: whether a state of another configuration is an error, or only a warning.
            change_budget: whether the budget may have lower `tokens`, `max_samples` and
                `max_patches` than before, on all ranks. Not for padded budgets with `shapes`.
            verify: when the waiting samples are made again and compared with the state. `"lazy"`:
                each before the batch that holds it; `"eager"`, and with `strict=False`: all of
                them in `iter()`.

        Raises:
            StateError: the state is damaged, or not of a `Loader`. If the state does not fit the
                nodes, `iter()` raises; if a sample has changed, `iter()` or a later batch.
            TypeError, ValueError: `change_budget` is no bool, or `verify` is another string.
        """
        check_bool("change_budget", change_budget)
        check_choice("verify", verify, get_args(Verify))
        state = unseal_whole(state_dict, _NODE, LoaderState)
        loading = Loading(
            may_differ=not strict,
            smaller_budget=change_budget,
            makes_all=verify == "eager",
            leaves_epoch=state.left,
        )
        self._status = _Paused(state, loading)
        self._next_epoch, self._next_weights = state.next_epoch, state.next_weights

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next epoch, in every node that counts epochs.

        The present iterator completes its epoch first. A state that is saved there gives the
        remaining items of that epoch, and then `epoch`. A state within `epoch` that was loaded
        before resumes; a state that is loaded later replaces `epoch`. If items of another epoch
        remain, `iter()` raises a `StateError`.
        """
        epoch = check_count("epoch", epoch, 0)
        status = self._status
        if isinstance(status, _Paused) and status.position.is_within:
            self._status = status._replace(requested_epoch=epoch)
            return
        self._next_epoch = epoch
        if isinstance(status, _Running):
            status.use()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Mix by these weights from the next epoch on. All ranks must set the same weights.

        States contain the weights, and a state that is loaded later replaces them. If ranks set
        different weights, all raise a `StateError` at the first step of the epoch.

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

        The next `iter()` begins an epoch, as after `break`; to continue the present epoch, load
        `state_dict()`. In a forked child, and while another loader iterates a node of the graph,
        this does nothing.

        Raises:
            TimeoutError: a thread did not finish within `stop_timeout_s`.
        """
        if not self._is_foreign() and iterated_elsewhere(self.root, self) is None:
            self._stop(continues=False)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a `{type(self).__name__}` cannot be copied or pickled, since its nodes are within an "
            "epoch. Make another one with the same arguments, and load `state_dict()` there."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> _Running[T]:
        """Resume, or begin the next epoch. After an error, the next `iter` tries again."""
        self._check_process()
        status = self._status
        if isinstance(status, _Lost):
            raise PositionError(
                "the graph failed, and its position is unknown: load the last saved state."
            ) from status.error
        claim(self.root, self)
        position = status.position
        if position is not None:
            self._had_items = self._had_items or position.num_yielded > 0
            if not isinstance(status, _Paused):
                self._status = _Paused(replace(position, left=True), Loading(leaves_epoch=True))
        try:
            graph.stop_threads(self.root, self._stop_timeout_s)
            running = self._resume(status) if isinstance(status, _Paused) else self._begin_epoch()
        except BaseException:
            graph.close_nodes(self.root, self._stop_timeout_s)  # as after an exception in `next`
            raise
        self._status = running
        return running

    def _begin_epoch(self) -> _Running[T]:
        for mixer in _outermost_mixers(self.root) if self._next_weights else ():
            mixer.set_weights(self._next_weights)
        graph.begin_epoch(self.root, self._next_epoch)
        self._next_epoch, self._next_weights = None, {}
        return _Running(self.root, 0, ended=False, had_items=self._had_items)

    def _resume(self, paused: _Paused) -> _Running[T]:
        """Resume at a position, or begin the epoch after it."""
        state = paused.position
        self._reset(paused)
        # The state of some torchdata nodes does not say that the node is at its end.
        if state.ended and self._has_items():
            raise StateError(
                "the state was saved at the end of an epoch, but the graph yields more items "
                "there. Resume over the data that the state was saved on."
            )
        requested = paused.requested_epoch if state.is_within else self._next_epoch
        begins = state.left or (state.ended and (self._restart or requested is not None))
        epochs = graph.epochs_of(self.root)
        is_another = requested is not None and bool(epochs) and requested not in epochs
        # The state may be from after the last item, but before the `StopIteration`.
        if is_another and not begins and state.num_yielded and self._has_items():
            epoch = max(epochs)
            raise PositionError(
                f"`set_epoch` must be given {epoch}, the epoch of the loaded state, but got "
                f"{requested}, and items of epoch {epoch} remain. Call `set_epoch({epoch})` to "
                "continue with them; to skip them, call `iter(loader)` after that, and then "
                f"`set_epoch({requested})`."
            )
        begins = begins or is_another
        if requested is not None:
            self._next_epoch = requested if begins else None
        if not begins:
            return _Running(self.root, state.num_yielded, state.ended, self._had_items)
        graph.stop_threads(self.root, self._stop_timeout_s)
        return self._begin_epoch()

    def _reset(self, paused: _Paused) -> None:
        with loading_with(**paused.loading._asdict()):
            try:
                self.root.reset(copy_state(paused.position.root))
            except StateError as error:
                nodes = [node for node in graph.walk(self.root) if isinstance(node, StatefulNode)]
                configs = [(type(node).__name__, node.fingerprint()) for node in nodes]
                several = several_changes(configs, paused.position.root)
                if several is None or paused.loading.may_differ:
                    raise
                raise StateError(several) from error
            except SampleError:
                raise
            except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
                raise StateError(_why_not_reset(self.root, paused.position.root, error)) from error

    def _has_items(self) -> bool:
        """Take an item of the graph; return whether there was an item."""
        return next(self.root, _NO_ITEM) is not _NO_ITEM

    def _stop(self, *, continues: bool) -> None:
        """Close the graph, and keep the position; `continues`: the next `iter` resumes there."""
        status = self._status
        try:
            if isinstance(status, _Running):
                kind = _Paused if continues or not status.is_used else _Idle
                self._status = kind(status.position)
        except BaseException as error:
            self._status = _Lost(error)
            raise
        finally:
            graph.close_nodes(self.root, self._stop_timeout_s)

    def _check_process(self) -> None:
        """Raise a `WorkerError` if threads and workers belong to another process."""
        if self._is_foreign():
            self._owner.check("this loader")

    def _is_foreign(self) -> bool:
        if self._owner.is_here:
            return False
        if graph.has_threads(self.root):
            return True
        self._owner = Owner()  # A forked child may use a graph without threads and workers.
        return False

    def _check_current(self, running: _Running[T]) -> None:
        """Raise if another iterator has replaced this one, perhaps on another thread."""
        self._check_process()
        if self._status is not running:
            raise RuntimeError(
                "this iterator is no longer valid: its `Loader` was closed, loaded, iterated "
                "again, or raised. Use the newest `iter(loader)`."
            )


class LoaderIterator(Iterator[T]):
    """Yields the items of a `Loader`, which has only a weak reference to its iterator."""

    def __init__(self, loader: Loader[T], running: _Running[T]) -> None:
        self._loader, self._running = loader, running

    def __next__(self) -> T:
        loader, running = self._loader, self._running
        loader._check_current(running)
        with _locked(loader._moving):
            try:
                item = running.take()
            except BaseException as error:
                loader._check_current(running)
                if not isinstance(error, StopIteration):
                    loader._stop(continues=True)
                raise
            loader._check_current(running)
            return item


@contextmanager
def _locked(lock: threading.RLock) -> Iterator[None]:
    """Hold the lock of a loader; raise if another thread holds the lock."""
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            "another thread is inside `next` or `iter` of this loader: one thread must take all "
            "items. To use several, pass the items on by a `queue.Queue`."
        )
    try:
        yield
    finally:
        lock.release()


def _why_not_reset(root: BaseNode[Any], state: object, error: Exception) -> str:
    """Return the text of an error: the state is of another root, or a reset raised `error`."""
    same_nodes = "the graph with the same nodes in the same order as when it was saved."
    saved_root = state.get("node") if isinstance(state, Mapping) else None
    present_root = type(root).__name__
    if isinstance(saved_root, str) and saved_root != present_root:
        return (
            f"the state was saved by a `{saved_root}`, but the graph's root is a "
            f"`{present_root}`. Build {same_nodes}"
        )
    return (
        f"a node cannot restore its part of the state, or your code raised {error!r}. Correct "
        f"your code, or build {same_nodes}"
    )


def _outermost_mixers(root: BaseNode[Any]) -> list[SourceMixer]:
    """Return the mixtures that are in no other mixture: one for each rank of this process."""
    mixers = [node for node in graph.walk(root) if isinstance(node, SourceMixer)]
    inner = {id(node) for mixer in mixers for node in graph.walk(mixer) if node is not mixer}
    return [mixer for mixer in mixers if id(mixer) not in inner]
