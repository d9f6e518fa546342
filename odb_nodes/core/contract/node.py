"""The contract of a node: its methods, its declared state, its errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, Generic, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import MAX_KEY, check_count, check_type
from odb_nodes.core.contract.epochs import EpochCounter, EpochState
from odb_nodes.core.contract.plain_states import check_own_state as check_own_state
from odb_nodes.core.contract.plain_states import check_plain_state, check_source_state
from odb_nodes.core.contract.state import (
    NodeState,
    Snapshot,
    add_digest,
    check_declaration,
    check_saved,
    copy_state,
    seal,
    source_fields,
    to_snapshot,
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
    __envelope: dict[str, Any] | None = None  # of all states until the next reset
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
        """Return the position of the node, without raising. Some callers save after every item.

        A state must hold every item that the node has pulled and not yet yielded, or must be from
        before that item. The position of a source is `snapshot(source)`. A value that takes long to
        compute may be an immutable object whose method `to_state()` computes it.
        """
        values: dict[str, Any] = {}
        for field, is_source in self.__declared:
            value = getattr(self, field.name)
            if is_source and isinstance(value, BaseNode):
                value = snapshot(value)
            elif is_source:
                value = {key: snapshot(node) for key, node in value.items()}
            values[field.name] = value
        state: S = self.STATE(**values)
        return state

    def fingerprint(self) -> dict[str, Any]:
        """Return the configuration that decides the output, as plain data.

        A state fits only a node with an equal fingerprint. The fingerprint must not change between
        two resets.
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
                name = type(self).__name__
                config = self.fingerprint()
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
        """Raise a `TypeError` unless the state has a field for each source of the node."""
        by_attribute = _sources_of(self)
        sources = [source for nodes in by_attribute.values() for source in nodes]
        below = {id(node) for source in sources for node in walk(source) if node is not source}
        field_names = {name for name, _ in self.__sources}
        declared = {id(source) for name in field_names for source in by_attribute.get(name, ())}
        undeclared = [
            name
            for name, nodes in by_attribute.items()
            if not declared | below >= {*map(id, nodes)}
        ]
        if type(self).save is not StatefulNode.save:  # The fields may have other names.
            has_dict = any(is_dict for _, is_dict in self.__sources)
            if has_dict or len(field_names) >= len({*map(id, sources)} - below):
                return
        if undeclared:
            raise TypeError(
                f"`STATE` of `{type(self).__name__}` must have a field for the state of each "
                f"source, but lacks a field for {sorted(undeclared)}: a resume would repeat or "
                "lose items of that source. Declare `source: SourceState`, or `SourceStates` for a "
                "dict of sources."
            )

    def get_state(self) -> dict[str, Any]:
        """Return the state of the node. The caller owns the result.

        Raises:
            StateError: `next` raised, and a state would lose the item that caused the error. The
                `Loader` then uses the previous state.
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
            name = type(self).__name__
            config = self.fingerprint()
            check_saved(name, config, self.STATE, saved)
            self.__envelope = envelope = seal(name, to_snapshot(config, {}), {})
        values = vars(saved)
        for name, is_dict in self.__sources:
            if type(values[name]) is not Snapshot:  # else `snapshot` has checked it
                check_source_state(self, name, values[name], is_dict)
        state = to_snapshot(values, envelope)
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
        """Raise an error until the next reset. Ctrl-C, too, loses items between two nodes."""
        if not isinstance(error, Exception):
            error = StateError(f"{type(self).__name__} was interrupted by {error!r}.")
        self.__failure = error


class EpochNode(StatefulNode[T, S]):
    """A node that counts epochs, because its order or random numbers depend on the epoch.

    The `STATE` of a subclass derives from `EpochState`. This class sets the fields of `EpochState`
    in each state; `save` does not. `begin_epoch` and `restore` find `_epochs` up to date.
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
        if type(value) not in (dict, list, tuple):
            value = (value,)
        if len(value) > _MOST_SOURCES:
            continue
        items = value.values() if type(value) is dict else value
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
        check_plain_state(node, state)
        state = Snapshot(copy_state(state))
    return state


def _reset(holder: Any, states: Any) -> None:
    """Reset a source, or each source of a dict."""
    if isinstance(holder, BaseNode):
        holder.reset(states)
        return
    for key, node in holder.items():
        node.reset(None if states is None else states[key])


def can_restore(node: BaseNode[Any]) -> bool:
    """Return whether a node can make its items again from their keys.

    A source can do so if it has `item_key` and `read(key)`. Any other node says so by its attribute
    `can_restore`.
    """
    declared = getattr(node, "can_restore", None)
    if isinstance(declared, bool):
        return declared
    item_key = getattr(type(node), "item_key", None)
    has_keys = item_key is not None and item_key is not StatefulNode.item_key
    return has_keys and callable(getattr(node, "read", None))


def checked_key(node: BaseNode[Any], key: Any) -> ItemKey | None:
    """Return the key that `item_key` of a node has returned; raise unless it is valid."""
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
