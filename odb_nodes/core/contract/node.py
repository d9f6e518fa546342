"""The contract of a node: its methods, its declared state, its errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import MAX_KEY, check_count, check_type
from odb_nodes._support.hashing import hash_ints
from odb_nodes.core.contract.state import (
    NodeState,
    Snapshot,
    add_digest,
    check_declaration,
    check_saved,
    copy_state,
    kept,
    seal,
    source_fields,
    unseal,
)
from odb_nodes.core.sample import ItemKey
from odb_nodes.errors import SampleError, StateError

T = TypeVar("T")
S = TypeVar("S", bound=NodeState)
R = TypeVar("R")
Chunk = tuple[Sequence[T], Sequence[ItemKey | None]]  # items, and the key of each
ItemLocation = tuple[Any, ...]
"""Where an item comes from: a format for `%` and its values, which may be locations themselves."""

_ITEM_METHODS = {"next_chunk", "next", "item_key", "item_location"}


# --- epochs ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class EpochState(NodeState):
    """The epoch fields in the state of an `EpochNode`.

    Attributes:
        epoch: the number of the epoch, from 0.
        cycle: how often the epoch was begun again.
        started: whether `next` was called in the epoch.
    """

    epoch: int = 0
    cycle: int = 0
    started: bool = False


class EpochCounter:
    """Counts the epochs of a node.

    The first call of `next` starts an epoch, even if it raises `StopIteration`; only a reset after
    that begins the next epoch. A mixer may begin a source again within an epoch: `epoch` stays, and
    `cycle` counts up.
    """

    epoch = cycle = 0
    started = _cycle_requested = False
    _requested: int | None = None

    @property
    def shuffle_key(self) -> int:
        """Seed of the order, 31 bits: the epoch, or a hash of epoch and cycle in a later cycle.

        It depends on no earlier epoch, so `set_epoch` gives the same orders in any run.
        """
        return hash_ints(self.epoch, self.cycle) >> 33 if self.cycle else self.epoch

    def advance(self) -> None:
        """Begin the requested epoch, the next epoch, or this epoch if it has not started."""
        if self._cycle_requested:
            self.cycle += 1
        else:
            if self._requested is not None:
                self.epoch = self._requested
                self._requested = None
            elif self.started or self.cycle:
                self.epoch += 1
            self.cycle = 0
        self.started = self._cycle_requested = False

    def start(self) -> None:
        """Note a call of `next`."""
        self.started = True

    def request(self, epoch: int) -> None:
        """Have the next reset begin `epoch`."""
        self._requested = check_count("epoch", epoch, 0)

    def request_cycle(self) -> None:
        """Have the next reset begin this epoch again, in another order."""
        self._cycle_requested = True

    def restore(self, state: EpochState) -> None:
        """Take the epoch of a state."""
        self.epoch = state.epoch
        self.started = state.started
        self.cycle = state.cycle
        self._requested = None
        self._cycle_requested = False

    def save(self) -> dict[str, Any]:
        """Return the fields of an `EpochState`."""
        return {"epoch": self.epoch, "cycle": self.cycle, "started": self.started}


# --- nodes ----------------------------------------------------------------------------------------


class StatefulNode(BaseNode[T], Generic[T, S]):
    """A node whose state is declared, sealed when it is saved, and checked when it is loaded.

    A subclass declares its state as a dataclass and defines `next`. Each field of the state is an
    attribute of the node with the same name: a source, a dict of sources, or a value. An epoch
    begins with the default of each value. A node whose attributes are not its state also defines
    `begin_epoch`, `save` and `restore`. In return:

    - A state of another version, node or configuration, a state without a field, and a damaged
      state raise a `StateError` that names the node and the fault.
    - A state returned by `get_state` shares no list or dict with the node.
    - An error in `next` is raised again until the next reset, and no state skips its item.

    A node that reads data may define `read(key) -> item` beside `item_key`: a restore then reads
    only the items that it needs. A node over such a source passes this on by `can_restore`,
    `make_again(items)` and `keep_items(first, distance)`, as `LengthObserver` does.

    A node of many small items may define `next_chunk` beside `next`, which returns a `SampleBlock`
    (for samples) and `ItemKeys`, without an object for each item. A subclass that redefines `next`,
    `item_key` or `item_location` must also redefine `next_chunk`; else `next_chunk` calls `next`.

    Sources are attributes of the node, or values of a dict that is an attribute. They may be in a
    list if the node defines `begin_epoch`, `save` and `restore`. A plain torchdata node may stand
    anywhere in a graph and may have any of these methods.

    Class attributes:
        STATE: the dataclass that declares the state, see `NodeState`.
        retries_errors: whether the node stands before the item whose `next` raised, so that the
            next call tries again.
        keeps_failed_items: whether `save` is also correct after `next` raised.
        same_on_all_ranks: whether ranks that share data must have equal fingerprints.
    """

    STATE: ClassVar[type[Any]] = NodeState
    retries_errors: ClassVar[bool] = False
    keeps_failed_items: ClassVar[bool] = False
    same_on_all_ranks: ClassVar[bool] = False

    _STATE_BASE: ClassVar[type[Any]] = NodeState
    _epochs: Any = None  # the `EpochCounter` of an `EpochNode`
    __is_initialised = __is_reset = False
    __sources: ClassVar[list[tuple[str, bool]]] = []  # name of a field; whether it is a dict
    __declared: ClassVar[list[tuple[Field[Any], bool]]] = []  # without fields of `_STATE_BASE`
    __envelope: dict[str, Any] | None = None  # with the fingerprint; stays until the next reset
    __failure: Exception | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        base = next(base for base in cls.__mro__ if not _ITEM_METHODS.isdisjoint(vars(base)))
        if "next_chunk" not in vars(base):
            cls.next_chunk = StatefulNode.next_chunk  # type: ignore[method-assign]
        check_declaration(cls.__name__, cls.STATE, cls._STATE_BASE)
        sources = source_fields(cls.STATE)
        cls.__sources = [*sources.items()]
        inherited = {field.name for field in fields(cls._STATE_BASE)}
        declared = [field for field in fields(cls.STATE) if field.name not in inherited]
        cls.__declared = [(field, field.name in sources) for field in declared]

    def __init__(self) -> None:
        super().__init__()
        for name in ("begin_epoch", "restore", "save"):
            if getattr(type(self), name) is getattr(StatefulNode, name) and not self.__declared:
                raise TypeError(
                    f"`{type(self).__name__}` must define `{name}`, or declare its state as "
                    "`STATE`."
                )
        self.__is_initialised = True
        self.__is_reset = False

    # --- methods that a node defines ------------------------------------------------------------

    def prepare_reset(self) -> None:
        """Release what belongs to the previous epoch, before `begin_epoch` or `restore`."""

    def begin_epoch(self) -> None:
        """Go to the beginning of the next epoch, and reset the sources with `None`.

        By default, each attribute that the state declares becomes its default.
        """
        for field, is_source in self.__declared:
            if is_source:
                _reset(getattr(self, field.name), None)
            elif field.default_factory is not MISSING:
                setattr(self, field.name, field.default_factory())
            elif field.default is not MISSING:
                setattr(self, field.name, field.default)
            else:
                raise TypeError(
                    f"`{field.name}` of `{self.STATE.__name__}` must have a default, which an "
                    f"epoch begins with, or `{type(self).__name__}` must define `begin_epoch`."
                )

    def restore(self, state: S) -> None:
        """Go to the position of `state`, and reset the sources with their states in it.

        Args:
            state: the result of `save`, of this node or of a node with an equal fingerprint. The
                node may keep it.

        Raises:
            StateError: the node cannot go there.
        """
        for field, is_source in self.__declared:
            saved = getattr(state, field.name)
            if is_source:
                _reset(getattr(self, field.name), saved)
            else:
                setattr(self, field.name, saved)

    def save(self) -> S:
        """Return the position of the node. It must not raise; some callers save after every item.

        Every item that was pulled and not yet yielded must be in the state, or come after it. The
        position of a source is `snapshot(source)`. A value that takes long to compute may be an
        immutable object with a method `to_state()`, which computes it.
        """
        values = {field.name: getattr(self, field.name) for field, _ in self.__declared}
        for field, is_source in self.__declared:
            if not is_source:
                continue
            source = values[field.name]
            if isinstance(source, BaseNode):
                values[field.name] = snapshot(source)
            else:
                values[field.name] = {key: snapshot(node) for key, node in source.items()}
        state: S = self.STATE(**values)
        return state

    def fingerprint(self) -> dict[str, Any]:
        """Return the configuration that decides the output, as plain data.

        A state fits only a node with an equal fingerprint. It must not change between resets.
        """
        return {}

    def fixed_fields(self, _state: S) -> Collection[str]:
        """Return the fields of the fingerprint that `strict=False` may not change for a state."""
        return ()

    # --- methods that other nodes call ----------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Have the next reset without a state begin `epoch`, if the node counts epochs."""
        if self._epochs is not None:
            self._epochs.request(epoch)

    def begin_cycle(self) -> None:
        """Have the next reset without a state begin this epoch again, in another order."""
        if self._epochs is not None:
            self._epochs.request_cycle()

    def item_location(self) -> ItemLocation | None:
        """Return where the last item comes from, for errors."""
        return None

    def item_key(self) -> ItemKey | None:
        """Return the key of the last item, or `None` if the node has no keys.

        An item must have the same key in every epoch and on every rank.
        """
        return None

    def next_chunk(self, count: int) -> Chunk[T]:  # noqa: ARG002
        """Return the next items and their keys, as repeated calls of `next` would.

        Args:
            count: the most items; at least one is returned.

        Raises:
            StopIteration: there are no more items.
        """
        return [self.next()], [self.item_key()]

    def interrupt(self) -> None:
        """Make a `next` that waits on another thread raise, until the next reset."""

    def close(self) -> None:
        """Release threads, workers and files. A later reset starts them again."""

    # --- methods that torchdata calls -----------------------------------------------------------

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to the position of `initial_state`.

        Raises:
            StateError: the state is damaged, or does not fit the node or its data.
        """
        if not self.__is_initialised:
            raise TypeError(f"`{type(self).__name__}.__init__` must call `super().__init__()`.")
        super().reset(initial_state)
        self.__is_reset, self.__envelope = False, None
        try:
            self.prepare_reset()
            self.__check_declares_sources()
            if initial_state is None:
                if self._epochs is not None:
                    self._epochs.advance()
                self.begin_epoch()
            else:
                name, config = type(self).__name__, self.fingerprint()
                state = unseal(initial_state, name, self.STATE, config, self.fixed_fields)
                if self._epochs is not None:
                    self._epochs.restore(state)
                self.restore(state)
        except BaseException as error:  # The position is unknown: only another reset helps.
            self.__fail(error)
            raise
        self.__failure = None
        self.__is_reset = True

    def __check_declares_sources(self) -> None:
        """Raise a `TypeError` where the state has no field for a source that the node holds."""
        by_attribute = _sources_of(self)
        held = {id(node) for nodes in by_attribute.values() for node in nodes}
        below_sources = {
            id(node)
            for sources in by_attribute.values()
            for source in sources
            for node in walk(source)
            if node is not source
        }
        fields_of_sources = {name for name, _ in self.__sources}
        declared = {id(node) for name in fields_of_sources for node in by_attribute.get(name, ())}
        covered = declared | below_sources
        undeclared = {
            name
            for name, nodes in by_attribute.items()
            if any(id(node) not in covered for node in nodes)
        }
        if type(self).save is not StatefulNode.save:  # Its fields may have other names.
            has_dict = any(is_dict for _, is_dict in self.__sources)
            if has_dict or len(fields_of_sources) >= len(held - below_sources):
                return
        if undeclared:
            raise TypeError(
                f"`STATE` of `{type(self).__name__}` must have a field for the state of each "
                f"source, but lacks one for {sorted(undeclared)}: a resume would repeat or lose "
                "its items. Declare it, as `source: SourceState` (a dict of sources as "
                "`SourceStates`)."
            )

    def get_state(self) -> dict[str, Any]:
        """Return the state of the node. The caller owns the result.

        Raises:
            StateError: `next` raised, and a state would lose the item that caused it. The `Loader`
                then uses the previous state.
        """
        return add_digest(copy_state(self.__snapshot()))

    def _own_snapshot(self) -> Snapshot | None:
        """Return the state for `snapshot`; `None` if a subclass overrides how states are taken."""
        cls = type(self)
        if cls.get_state is StatefulNode.get_state and cls.state_dict is BaseNode.state_dict:
            return self.__snapshot()
        return None

    def __snapshot(self) -> Snapshot:
        if self.__failure is not None and not (self.keeps_failed_items and self.__is_reset):
            raise StateError(
                f"{type(self).__name__} has no state after an error, which would lose the item "
                f"that caused it ({self.__failure}). Load the last state saved before."
            )
        saved = self.save()
        envelope = self.__envelope
        if envelope is None or type(saved) is not self.STATE:  # Checked once after a reset.
            name, config = type(self).__name__, self.fingerprint()
            check_saved(name, config, self.STATE, saved)
            self.__envelope = envelope = seal(name, kept(config, {}), {})
        values = vars(saved)
        for name, is_dict in self.__sources:
            if type(values[name]) is not Snapshot:  # else `snapshot` has checked it
                _check_source(self, name, values[name], is_dict)
        state = kept(values, envelope)
        if self._epochs is not None:
            state.update(self._epochs.save())
        return state

    def __next__(self) -> T:
        return self.__guarded(self.next)

    def take_chunk(self, count: int) -> Chunk[T]:
        """Return the next items and their keys: see `next_chunk`."""

        def take() -> Chunk[T]:
            items, keys = self.next_chunk(count)
            if not 0 < len(items) == len(keys) <= count:
                raise TypeError(
                    f"`next_chunk` of `{type(self).__name__}` must return 1 to {count} items, and "
                    f"a key for each, but returned {len(items)} and {len(keys)} keys."
                )
            return items, keys

        return self.__guarded(take)

    def __guarded(self, take: Callable[[], R]) -> R:
        if self.__failure is not None:
            raise self.__failure
        if not (self.__is_initialised and self.__is_reset):
            self.reset(None)
        if self._epochs is not None:
            self._epochs.start()
        try:
            return take()
        except StopIteration:
            raise
        except BaseException as error:
            if not self.retries_errors:
                self.__fail(error)
            raise

    def __fail(self, error: BaseException) -> None:
        """Raise an error until the next reset. After Ctrl-C, items on their way are lost, too."""
        if not isinstance(error, Exception):
            error = StateError(f"{type(self).__name__} was interrupted by {error!r}.")
        self.__failure = error


class EpochNode(StatefulNode[T, S]):
    """A node that counts epochs, because its order or random numbers depend on the epoch.

    Its `STATE` derives from `EpochState`, whose fields this class fills in; `save` does not set
    them. `_epochs` is up to date when `begin_epoch` and `restore` are called.
    """

    STATE: ClassVar[type[Any]] = EpochState
    _STATE_BASE = EpochState
    _epochs: EpochCounter

    def __init__(self) -> None:
        super().__init__()
        self._epochs = EpochCounter()

    @property
    def epoch(self) -> int:
        """Number of the epoch that the node is in."""
        return self._epochs.epoch


# --- functions for any node, also of torchdata ----------------------------------------------------


_MOST_SOURCES = 4096  # A longer list or dict holds data.


def walk(root: BaseNode[Any]) -> Iterator[BaseNode[Any]]:
    """Yield the nodes of a graph, each once and before its sources."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        sources = [source for sources in _sources_of(node).values() for source in sources]
        waiting += reversed(sources)


def _sources_of(node: BaseNode[Any]) -> dict[str, list[BaseNode[Any]]]:
    """Return the nodes that a node holds, by attribute: as its value, in a list, tuple or dict."""
    by_attribute = {}
    for name, value in list(vars(node).items()):
        # Plain containers only: another mapping or sequence may be a dataset, and slow.
        is_container = type(value) in (dict, list, tuple)
        if is_container and len(value) > _MOST_SOURCES:
            continue
        items = value.values() if type(value) is dict else value if is_container else (value,)
        if nodes := [item for item in items if isinstance(item, BaseNode)]:
            by_attribute[name] = nodes
    return by_attribute


def check_node(name: str, value: Any) -> None:
    """Raise a `TypeError` unless `value` is a node."""
    check_type(name, value, BaseNode, "Wrap an iterable in `IterableSource`.")


def call_member(node: BaseNode[Any], name: str, *arguments: Any) -> Any:
    """Call a method of the contract; return `None` where a plain node does not have it."""
    method = getattr(node, name, None)
    return method(*arguments) if callable(method) else None


def take(node: BaseNode[T], count: int) -> Chunk[T]:
    """Return the next 1 to `count` items of any node, and their keys."""
    if isinstance(node, StatefulNode):
        return node.take_chunk(count)
    return [next(node)], [call_member(node, "item_key")]


def format_location(location: ItemLocation | None) -> str:
    """Return a comma and the text of a location; "" for `None`."""
    if location is None:
        return ""
    template, *values = location
    texts = [
        format_location(value) if value is None or isinstance(value, tuple) else value
        for value in values
    ]
    return f", {template % tuple(texts)}"


def snapshot(node: BaseNode[Any]) -> dict[str, Any]:
    """Return the state of any node as part of another state: cheap to take, and immutable.

    Raises:
        TypeError: a plain node has no `get_state`.
    """
    take_own = getattr(node, "_own_snapshot", None)
    state: dict[str, Any] | None = None if take_own is None else take_own()
    if state is None:
        state = node.state_dict()
        _check_plain_state(node, state)
        state = Snapshot(copy_state(state))
    return state


def _reset(holder: Any, states: Any) -> None:
    """Reset a source, or each source of a dict."""
    if isinstance(holder, BaseNode):
        holder.reset(states)
        return
    for key, node in holder.items():
        node.reset(None if states is None else states[key])


def _check_source(node: object, name: str, saved: Any, is_dict: bool) -> None:
    """Raise a `TypeError` unless the saved state of a source, or of a dict, has a position."""
    holder = f"a source of `{type(node).__name__}`"
    if not is_dict:
        _check_plain_state(getattr(node, name, holder), saved)
        return
    for state in saved.values():
        if type(state) is not Snapshot:
            _check_plain_state(holder, state)


def _check_plain_state(node: object, state: Any) -> None:
    """Raise a `TypeError` unless a plain node and the nodes below it returned their positions."""
    check_own_state(node, state, "get_state")
    if "node" in state:  # A sealed state: a `StatefulNode` has checked its own sources.
        return
    below = getattr(node, "source", f"a node below {_name(node)}")
    for key in ("source", "snapshot", "it_state"):  # keys of source states in torchdata
        if key in state and (key != "snapshot" or state[key] is not None):
            # A mapper keeps its state in the state of an iterator, one level further down.
            _check_plain_state(node if key == "it_state" else below, state[key])
    for key in ("iterable", "_sampler"):  # They have no state before their first item.
        if key in state and state.get("_num_yielded"):
            name = key.strip("_")
            check_own_state(getattr(node, name, f"the {name} of {_name(node)}"), state[key])


def check_own_state(holder: object, state: Any, method: str = "state_dict") -> None:
    """Raise a `TypeError` unless the state of a node or an iterable is there and not empty.

    An empty state loses items when it is loaded.
    """
    if state is None or not state or (method == "get_state" and not isinstance(state, Mapping)):
        raise TypeError(
            f"`{method}` of {_name(holder)} must return its position, a dict that is not empty, "
            f"but returned {state!r:.80} instead: a run that resumes from it would lose or repeat "
            'items. Return at least `{"position": self.position}`, and go there when it is loaded.'
        )


def _name(holder: object) -> str:
    return holder if isinstance(holder, str) else f"`{type(holder).__name__}`"


# --- items by their keys --------------------------------------------------------------------------


def can_restore(node: BaseNode[Any]) -> bool:
    """Return whether a node can make its items again from their keys.

    A source can if it has `item_key` and `read(key)`; other nodes have an attribute `can_restore`.
    """
    declared = getattr(node, "can_restore", None)
    if isinstance(declared, bool):
        return declared
    item_key = getattr(type(node), "item_key", None)
    has_keys = item_key is not None and item_key is not StatefulNode.item_key
    return has_keys and callable(getattr(node, "read", None))


def checked_key(node: BaseNode[Any], key: Any) -> ItemKey | None:
    """Return the result of `item_key` of a node, checked."""
    if key is None:
        return None
    try:
        source, number, world_size, repeat = key
        check_type("source", source, str)
        return ItemKey(
            source,
            check_count("key", number, 0, MAX_KEY),
            check_count("world_size", world_size),
            check_count("repeat", repeat, 0, MAX_KEY),
        )
    except (TypeError, ValueError) as error:
        raise SampleError(
            f"`item_key()` of `{type(node).__name__}` must return an `ItemKey` or None, but "
            f"returned {key!r:.200}: {error}"
        ) from error
