"""A root node as an iterable over epochs that can be saved and resumed at any point."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, get_args

from torchdata.nodes import BaseNode

from odb_nodes._compat.torchdata import replays_items, unrepeatable_sampler
from odb_nodes._core.checks import check_bool, check_choice, check_count
from odb_nodes._core.processes import Owner
from odb_nodes.contract import NodeState, SourceState, copy_state, graph, snapshot
from odb_nodes.contract.config import Loading, loading_with, several_changes
from odb_nodes.contract.node import StatefulNode, check_node
from odb_nodes.contract.state import seal_whole, unseal_whole
from odb_nodes.errors import PositionError, SampleError, StateError
from odb_nodes.nodes.exclusions import ExcludedKeys
from odb_nodes.sources.source_mixer import SourceMixer

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

Verify = Literal["lazy", "eager"]
"""When the samples of a state are compared with those that are made again: see `Loader`."""

_NODE = "Loader"  # the name in a state, that of subclasses too
_NO_ITEM: Any = object()


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


# --- where a loader stands ------------------------------------------------------------------------
#
# idle    -- `iter` begins the next epoch                --> running
# paused  -- `iter` goes on at its position              --> running
# running -- `iter`, once used, as from idle             --> running
#         -- `close`                                     --> paused; once used, idle
#         -- `next` raises                               --> paused; lost if `snapshot` raises too
# any     -- `load_state_dict`, an `iter` that raises    --> paused; idle if none was begun before


class _Idle(NamedTuple):
    """Before the next epoch: none was begun, or `close` has left one at a position."""

    position: LoaderState | None = None


class _Paused(NamedTuple):
    """At a position that the graph is taken back to."""

    position: LoaderState
    loading: Loading = Loading()
    asked_epoch: int | None = None  # by `set_epoch`, where the position is within an epoch


class _Running(Generic[T]):
    """Within an epoch. It is used once `next` or `set_epoch` was called."""

    def __init__(self, root: BaseNode[T], num_yielded: int, ended: bool, had_items: bool) -> None:
        self.is_used = False
        self._root, self._had_items = root, had_items  # in an epoch before this one
        self._num_yielded, self._ended = num_yielded, ended
        self._position: LoaderState | None = None  # `None` once that is outdated

    @property
    def position(self) -> LoaderState:
        position = self._position
        if position is None:
            root, count = snapshot(self._root), self._num_yielded
            position = LoaderState(root=root, num_yielded=count, ended=self._ended, left=False)
            self._position = position
        return position

    def use(self) -> None:
        """Have the next `iter` begin another epoch."""
        self.is_used = True

    def take(self) -> T:
        """Return the next item. If that raises, `position` is where it is taken up again."""
        self.use()
        if self._ended:
            raise StopIteration
        self._position = self.position
        item: T = next(self._root, _NO_ITEM)
        if item is _NO_ITEM:
            if self._had_items and not self._num_yielded:
                why = graph.describe_empty_epoch(self._root)
                raise SampleError(f"the epoch has no item, but one before had some. {why}")
            self._ended, self._position = True, None
            raise StopIteration
        self._num_yielded, self._position = self._num_yielded + 1, None
        return item


class _Lost(NamedTuple):
    """Nowhere: the graph has raised, and so has its `snapshot`."""

    error: BaseException
    position: None = None


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
        self._at: _Idle | _Paused | _Running[T] | _Lost = _Idle()
        self._next_epoch: int | None = None  # set for the epoch that begins next
        self._next_weights: dict[str, float] = {}
        self._had_items = False  # in an epoch before this one
        self._iterators = weakref.WeakValueDictionary[_Running[T], LoaderIterator[T]]()
        self._owner = Owner()
        self._moving = threading.RLock()  # held within `next` and `iter`

    def __len__(self) -> int:
        """Return how many items an epoch has."""
        try:
            return graph.length_of(self.root)
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
        with _held(self._moving):
            at = self._at
            if not isinstance(at, _Running) or at.is_used:
                at = self._begin()
            return self._iterators.setdefault(at, LoaderIterator(self, at))

    @property
    def position(self) -> LoaderState | None:
        """Where it stands; `None` before the first iterator. Shared: not to be changed."""
        return self._at.position

    def state_dict(self) -> dict[str, Any]:
        """Return where the most recent iterator stands: plain data, which the caller owns."""
        if isinstance(self._at, _Running):
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
            StateError: it is no state of a `Loader`, or is damaged. `iter()` raises if the state
                does not fit the nodes, and it or a later batch if a sample has changed.
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
        self._at = _Paused(state, loading)
        self._next_epoch, self._next_weights = state.next_epoch, state.next_weights

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one that begins, in every node that counts epochs.

        The present iterator goes on within its epoch. A state that is saved there gives the rest of
        that epoch, and then `epoch`. A state within `epoch`, loaded before, goes on there; one that
        is loaded later replaces `epoch`. Where items of another epoch remain, `iter()` raises a
        `StateError`.
        """
        epoch = check_count("epoch", epoch, 0)
        at = self._at
        if isinstance(at, _Paused) and at.position.is_within:
            self._at = at._replace(asked_epoch=epoch)
            return
        self._next_epoch = epoch
        if isinstance(at, _Running):
            at.use()

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
            self._stop(goes_on=False)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a `{type(self).__name__}` cannot be copied or pickled, since its nodes stand within "
            "their data. Make another one with the same arguments, and load `state_dict()` there."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> _Running[T]:
        """Begin what `iter` asks for. If that raises, the next `iter` tries again."""
        self._check_process()
        at = self._at
        if isinstance(at, _Lost):
            raise PositionError(
                "the graph failed, and its position is unknown: load the last saved state."
            ) from at.error
        _claim(self.root, self)
        if at.position is not None:
            self._had_items = self._had_items or at.position.num_yielded > 0
            if not isinstance(at, _Paused):
                self._at = _Paused(replace(at.position, left=True), Loading(leaves_epoch=True))
        try:
            graph.stop_threads(self.root, self._stop_timeout_s)
            running = self._resume(at) if isinstance(at, _Paused) else self._begin_epoch()
        except BaseException:
            graph.close_nodes(self.root, self._stop_timeout_s)  # as after an exception in `next`
            raise
        self._at = running
        return running

    def _begin_epoch(self) -> _Running[T]:
        for mixer in _outermost_mixers(self.root) if self._next_weights else ():
            mixer.set_weights(self._next_weights)
        graph.begin_epoch(self.root, self._next_epoch)
        self._next_epoch, self._next_weights = None, {}
        return _Running(self.root, 0, ended=False, had_items=self._had_items)

    def _resume(self, at: _Paused) -> _Running[T]:
        """Go on at a position, or from there to the next epoch."""
        state = at.position
        self._reset(at)
        # Some nodes of torchdata do not keep in their state that they have seen their end.
        if state.ended and self._has_items():
            raise StateError(
                "the state was saved at the end of an epoch, but the graph yields more items "
                "there. Resume over the data that the state was saved on."
            )
        asked = at.asked_epoch if state.is_within else self._next_epoch
        begins = state.left or (state.ended and (self._restart or asked is not None))
        epochs = graph.epochs_of(self.root)
        is_another = asked is not None and bool(epochs) and asked not in epochs
        # A state may be after the last item, and before its end was seen.
        if is_another and not begins and state.num_yielded and self._has_items():
            epoch = max(epochs)
            raise PositionError(
                f"`set_epoch` must be given {epoch}, the epoch that the state stands within, but "
                f"got {asked}, and items of epoch {epoch} remain. Call `set_epoch({epoch})` to go "
                f"on with them; to leave them out, call `iter(loader)` after that, and then "
                f"`set_epoch({asked})`."
            )
        begins = begins or is_another
        if asked is not None:
            self._next_epoch = asked if begins else None
        if not begins:
            return _Running(self.root, state.num_yielded, state.ended, self._had_items)
        graph.stop_threads(self.root, self._stop_timeout_s)
        return self._begin_epoch()

    def _reset(self, at: _Paused) -> None:
        """Take the graph to a position."""
        with loading_with(**at.loading._asdict()):
            try:
                self.root.reset(copy_state(at.position.root))
            except StateError as error:
                nodes = [node for node in graph.walk(self.root) if isinstance(node, StatefulNode)]
                configs = [(type(node).__name__, node.fingerprint()) for node in nodes]
                several = several_changes(configs, at.position.root)
                if several is None or at.loading.may_differ:
                    raise
                raise StateError(several) from error
            except SampleError:
                raise
            except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
                raise StateError(
                    f"a node cannot take its part of the state, or your own code raised {error!r}. "
                    "If it is yours, mend that; else build the graph with the same nodes in the "
                    "same order as when it was saved."
                ) from error

    def _has_items(self) -> bool:
        """Take an item of the graph, and tell whether there is one."""
        return next(self.root, _NO_ITEM) is not _NO_ITEM

    def _stop(self, *, goes_on: bool) -> None:
        """Close the graph, and keep where it stands; a used epoch is left, unless it goes on."""
        at = self._at
        try:
            if isinstance(at, _Running):
                self._at = (_Paused if goes_on or not at.is_used else _Idle)(at.position)
        except BaseException as error:
            self._at = _Lost(error)
            raise
        finally:
            graph.close_nodes(self.root, self._stop_timeout_s)

    def _check_process(self) -> None:
        """Raise a `WorkerError` where the threads and workers are those of another process."""
        if self._is_foreign():
            self._owner.check("this loader")

    def _is_foreign(self) -> bool:
        if self._owner.is_here:
            return False
        if graph.has_threads(self.root):
            return True
        self._owner = Owner()  # A graph without threads and workers goes on in a forked child.
        return False

    def _check_current(self, running: _Running[T]) -> None:
        """Raise if the loader has gone on without an iterator, perhaps on another thread."""
        self._check_process()
        if self._at is not running:
            raise RuntimeError(
                "this iterator is no longer valid: its `Loader` was closed, loaded, iterated "
                "again, or raised. Use the newest `iter(loader)`."
            )


class LoaderIterator(Iterator[T]):
    """Items of a `Loader`, which refers to it weakly: once forgotten, both are gone at once."""

    def __init__(self, loader: Loader[T], running: _Running[T]) -> None:
        self._loader, self._running = loader, running

    def __next__(self) -> T:
        loader, running = self._loader, self._running
        loader._check_current(running)
        with _held(loader._moving):
            try:
                item = running.take()
            except BaseException as error:
                loader._check_current(running)
                if not isinstance(error, StopIteration):
                    loader._stop(goes_on=True)
                raise
            loader._check_current(running)
            return item


@contextmanager
def _held(lock: threading.RLock) -> Iterator[None]:
    """Hold the lock of a loader, or raise where another thread holds it."""
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
    for node in graph.walk(root):
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
        named = (getattr(one, "exclude", None) for one in graph.walk(node))
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
    for node in graph.walk(root):
        _owners[node] = weakref.ref(loader)


def _iterated_elsewhere(root: BaseNode[Any], loader: Loader[Any]) -> BaseNode[Any] | None:
    """Return a node of a graph that another `Loader` iterates; `None` where there is none."""
    for node in graph.walk(root):
        owner = _owners[node]() if node in _owners else None
        if owner is not None and owner is not loader and isinstance(owner._at, _Running):
            return node
    return None


def _outermost_mixers(root: BaseNode[Any]) -> list[SourceMixer]:
    """Return the mixtures that are not within another one: one per rank that is hosted."""
    mixers = [node for node in graph.walk(root) if isinstance(node, SourceMixer)]
    inner = {id(node) for mixer in mixers for node in graph.walk(mixer) if node is not mixer}
    return [mixer for mixer in mixers if id(mixer) not in inner]
