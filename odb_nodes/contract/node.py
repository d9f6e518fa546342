"""The contract of a node, declared once: what it answers, what its state holds, how it fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import MAX_KEY, check_count, check_type
from odb_nodes._core.hashing import hash_ints
from odb_nodes.contract.state import (
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
from odb_nodes.errors import SampleError, StateError
from odb_nodes.sample import ItemKey

T = TypeVar("T")
S = TypeVar("S", bound=NodeState)
R = TypeVar("R")
Chunk = tuple[Sequence[T], Sequence[ItemKey | None]]  # some items, and the key of each
ItemLocation = tuple[Any, ...]
"""Where an item comes from: a format for `%`, and its values, which may be such again."""

_GIVES_ITEMS = {"next_chunk", "next", "item_key", "item_location"}


# --- epochs ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class EpochState(NodeState):
    """The part of the state of an `EpochNode` that says which epoch it is in.

    Attributes:
        epoch: the number of the epoch, from 0.
        cycle: how often the epoch was begun again.
        started: whether `next` was called in it.
    """

    epoch: int = 0
    cycle: int = 0
    started: bool = False


class EpochCounter:
    """Which epoch a node is in.

    An epoch counts as started from the first call of `next` on, also if that found nothing; only a
    reset after that begins the next one. A mixer may begin a source again within an epoch: the
    epoch stays, and `cycle` counts.
    """

    epoch = cycle = 0
    started = _again = False
    _requested: int | None = None

    @property
    def shuffle_key(self) -> int:
        """What the order is drawn from, 31 bits: the epoch; in a later cycle a number of its own.

        It depends on nothing before the epoch, so `set_epoch` gives the same orders in any run.
        """
        return hash_ints(self.epoch, self.cycle) >> 33 if self.cycle else self.epoch

    def advance(self) -> None:
        """Begin the requested epoch, the next one, or this one if it has not started."""
        if self._again:
            self.cycle += 1
        else:
            if self._requested is not None:
                self.epoch, self._requested = self._requested, None
            elif self.started or self.cycle:
                self.epoch += 1
            self.cycle = 0
        self.started = self._again = False

    def start(self) -> None:
        """Note a call of `next`."""
        self.started = True

    def request(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset begins."""
        self._requested = check_count("epoch", epoch, 0)

    def request_cycle(self) -> None:
        """Make the next reset begin this epoch again, in another order."""
        self._again = True

    def restore(self, state: EpochState) -> None:
        """Go to where a state stands."""
        self.epoch, self.started, self.cycle = state.epoch, state.started, state.cycle
        self._requested, self._again = None, False

    def save(self) -> dict[str, Any]:
        """Return the fields of an `EpochState`."""
        return {"epoch": self.epoch, "cycle": self.cycle, "started": self.started}


# --- nodes ----------------------------------------------------------------------------------------


class StatefulNode(BaseNode[T], Generic[T, S]):
    """A node whose state is declared, sealed when it is saved, and checked when it is loaded.

    A subclass declares its state as a dataclass and defines `next`. Each field of the state is an
    attribute of the node with the same name: a source, a dict of sources, or a value, whose default
    an epoch begins with. A node whose state is something else also defines `begin_epoch`, `save`
    and `restore`. In return:

    - A state of another version, node or configuration, a state without a field, and a damaged
      state are a `StateError` that names the node and what is wrong.
    - A state that was handed out shares no list or dict with the node.
    - An error in `next` is raised again until the next reset, and no state skips its item.

    A node that reads data may define `read(key) -> item` beside `item_key`: a restore then reads
    only the items that it needs. A node in between passes that on by `can_restore`,
    `make_again(items)` and `keep_items(first, distance)`, as `LengthObserver` does.

    A node of many small items may define `next_chunk` beside `next`, which returns a `SampleBlock`
    (for samples) and `ItemKeys`, without an object for each. A subclass that redefines `next`,
    `item_key` or `item_location` must define `next_chunk` too, or it is not used.

    Sources are attributes of the node, or items of a dict that is an attribute; of a list, where
    the node defines `begin_epoch`, `save` and `restore`. A plain node of torchdata may stand
    anywhere in a graph and may have any of these methods.

    Class attributes:
        STATE: the dataclass that declares the state, see `NodeState`.
        retries_errors: whether the node stands before the item whose `next` raised, so that the
            next call tries again.
        keeps_failed_items: whether `save` is also right after `next` raised.
        same_on_all_ranks: whether ranks that share data must have equal fingerprints.
    """

    STATE: ClassVar[type[Any]] = NodeState
    retries_errors: ClassVar[bool] = False
    keeps_failed_items: ClassVar[bool] = False
    same_on_all_ranks: ClassVar[bool] = False

    _STATE_BASE: ClassVar[type[Any]] = NodeState
    _epochs: Any = None  # the `EpochCounter` of an `EpochNode`
    __is_made = __is_reset = False
    __sources: ClassVar[list[tuple[str, bool]]] = []  # fields, and whether each holds several
    __declared: ClassVar[list[tuple[Field[Any], bool]]] = []  # own fields, and which are of sources
    __envelope: dict[str, Any] | None = None  # with the fingerprint; stays until the next reset
    __failure: Exception | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        first = next(one for one in cls.__mro__ if not _GIVES_ITEMS.isdisjoint(vars(one)))
        if "next_chunk" not in vars(first):
            cls.next_chunk = StatefulNode.next_chunk  # type: ignore[method-assign]
        check_declaration(cls.__name__, cls.STATE, cls._STATE_BASE)
        cls.__sources = [*(sources := source_fields(cls.STATE)).items()]
        base = {one.name for one in fields(cls._STATE_BASE)}
        own = [one for one in fields(cls.STATE) if one.name not in base]
        cls.__declared = [(one, one.name in sources) for one in own]

    def __init__(self) -> None:
        super().__init__()
        for name in ("begin_epoch", "restore", "save"):
            if getattr(type(self), name) is getattr(StatefulNode, name) and not self.__declared:
                raise TypeError(
                    f"`{type(self).__name__}` must define `{name}`, or declare as `STATE` what its "
                    "state holds."
                )
        self.__is_made, self.__is_reset = True, False

    # --- what a node defines --------------------------------------------------------------------

    def prepare_reset(self) -> None:
        """Let go of what a reset leaves behind, before `begin_epoch` or `restore`."""

    def begin_epoch(self) -> None:
        """Stand at the beginning of the next epoch, and reset the sources with `None`.

        By default, each attribute that the state declares becomes its default.
        """
        for one, is_source in self.__declared:
            if is_source:
                _reset(getattr(self, one.name), None)
            elif one.default_factory is not MISSING:
                setattr(self, one.name, one.default_factory())
            elif one.default is not MISSING:
                setattr(self, one.name, one.default)
            else:
                raise TypeError(
                    f"`{one.name}` of `{self.STATE.__name__}` must have a default, which an epoch "
                    f"begins with, or `{type(self).__name__}` must define `begin_epoch`."
                )

    def restore(self, state: S) -> None:
        """Go to where `state` stands, and reset the sources with their parts of it.

        Args:
            state: what `save` returned, of this node or of one with an equal fingerprint; the
                node's to keep.

        Raises:
            StateError: the node cannot go there.
        """
        for one, is_source in self.__declared:
            saved = getattr(state, one.name)
            if is_source:
                _reset(getattr(self, one.name), saved)
            else:
                setattr(self, one.name, saved)

    def save(self) -> S:
        """Return where the node stands. It must not raise, and is called once per item by some.

        Every item that was pulled and not yet yielded must be in it, or after it. A source says by
        `snapshot(source)` where it stands. What takes long to make may be an object that never
        changes, with a method `to_state()` that makes it.
        """
        values = {one.name: getattr(self, one.name) for one, _ in self.__declared}
        for one, is_source in self.__declared:
            if is_source and isinstance(node := values[one.name], BaseNode):
                values[one.name] = snapshot(node)
            elif is_source:
                values[one.name] = {key: snapshot(source) for key, source in node.items()}
        state: S = self.STATE(**values)
        return state

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output, as plain data: a state fits only if it is equal.

        It stays the same until the next reset, and is asked for once.
        """
        return {}

    def fixed_fields(self, _state: S) -> Collection[str]:
        """Return the fields of the fingerprint that `strict=False` may not change for a state."""
        return ()

    # --- what a node may be asked ---------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset without a state begins, if it counts them."""
        if self._epochs is not None:
            self._epochs.request(epoch)

    def begin_cycle(self) -> None:
        """Make the next reset without a state begin this epoch again, in another order."""
        if self._epochs is not None:
            self._epochs.request_cycle()

    def item_location(self) -> ItemLocation | None:
        """Return where the last item comes from, for errors."""
        return None

    def item_key(self) -> ItemKey | None:
        """Return which item of the data the last one is; `None` where the node cannot tell.

        It must be the same number for the same item in every epoch and on every rank.
        """
        return None

    def next_chunk(self, count: int) -> Chunk[T]:  # noqa: ARG002
        """Return some of the next items, and their keys, as so many calls of `next` would.

        Args:
            count: the most items; at least one is returned.

        Raises:
            StopIteration: there are no more.
        """
        return [self.next()], [self.item_key()]

    def interrupt(self) -> None:
        """Make a `next` that waits on another thread raise now. A reset takes it back."""

    def close(self) -> None:
        """Let go of threads, workers and files. A later reset starts them again."""

    # --- what torchdata calls -------------------------------------------------------------------

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state is damaged, or does not fit the node or its data.
        """
        if not self.__is_made:
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
        except BaseException as error:  # It stands nowhere now: only another reset helps.
            self.__fail(error)
            raise
        self.__failure, self.__is_reset = None, True

    def __check_declares_sources(self) -> None:
        """Raise a `TypeError` where the state has no field for a source that the node holds."""
        by_name, declared = _held_by(self), {name for name, _ in self.__sources}
        held = [node for nodes in by_name.values() for node in nodes]
        below = {id(one) for node in held for one in [*walk(node)][1:]}  # what is a source's own
        known = {id(node) for name in declared for node in by_name.get(name, ())} | below
        names = {
            name for name, nodes in by_name.items() if any(id(one) not in known for one in nodes)
        }
        if type(self).save is not StatefulNode.save:  # It may name them otherwise.
            several = any(several for _, several in self.__sources)
            own = {id(node) for node in held} - below
            names = set() if several or len(declared) >= len(own) else names
        if names:
            raise TypeError(
                f"`STATE` of `{type(self).__name__}` must have a field for the state of each "
                f"source, but lacks one for {sorted(names)}: a resume would repeat or lose its "
                "items. Declare it, as `source: SourceState` (a dict of sources as `SourceStates`)."
            )

    def get_state(self) -> dict[str, Any]:
        """Return where the node stands. The caller owns the result.

        Raises:
            StateError: `next` raised, and a state would lose the item that caused it. The `Loader`
                uses the one before.
        """
        return add_digest(copy_state(self.__snapshot()))

    def _snapshot_of_own(self) -> Snapshot | None:
        """Return the state for `snapshot`; `None` where a derived class changes what it is."""
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
        # Once after a reset, since some ask for a state at each item.
        if (envelope := self.__envelope) is None or type(saved) is not self.STATE:
            name, config = type(self).__name__, self.fingerprint()
            check_saved(name, config, self.STATE, saved)
            self.__envelope = envelope = seal(name, kept(config, {}), {})
        values = vars(saved)
        for name, holds_several in self.__sources:
            if type(values[name]) is not Snapshot:  # else `snapshot` has checked it
                _check_source(self, name, values[name], holds_several)
        state = kept(values, envelope)
        if self._epochs is not None:
            state.update(self._epochs.save())
        return state

    def __next__(self) -> T:
        return self.__guarded(self.next)

    def take_chunk(self, count: int) -> Chunk[T]:
        """Return some of the next items, and their keys: see `next_chunk`."""

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
        if not (self.__is_made and self.__is_reset):
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
        """Raise an error from now on; Ctrl-C, too, loses what was on its way."""
        if not isinstance(error, Exception):
            error = StateError(f"{type(self).__name__} was interrupted by {error!r}.")
        self.__failure = error


class EpochNode(StatefulNode[T, S]):
    """A node that counts epochs, because its order or random numbers depend on the epoch.

    Its `STATE` derives from `EpochState`, whose fields this class fills in: `save` leaves them out.
    `_epochs` is set before `begin_epoch` and `restore` are called.
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


# --- any node, also one of torchdata --------------------------------------------------------------


_MOST_SOURCES = 4096  # that a node holds in one list or dict


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
        waiting += reversed([one for ones in _held_by(node).values() for one in ones])


def _held_by(node: BaseNode[Any]) -> dict[str, list[BaseNode[Any]]]:
    """Return the nodes that a node holds, by attribute: itself, or in a list, tuple or dict."""
    found = {}
    for name, value in list(vars(node).items()):
        # Plain containers only: another mapping or sequence may be a dataset, and slow.
        is_plain = type(value) in (dict, list, tuple)
        if is_plain and len(value) > _MOST_SOURCES:  # It holds data.
            continue
        held = value.values() if type(value) is dict else value
        inner = held if is_plain else (value,)
        if nodes := [item for item in inner if isinstance(item, BaseNode)]:
            found[name] = nodes
    return found


def check_node(name: str, value: Any) -> None:
    """Raise a `TypeError` unless `value` is a node."""
    check_type(name, value, BaseNode, "Wrap an iterable in `IterableSource`.")


def call_member(node: BaseNode[Any], name: str, *arguments: Any) -> Any:
    """Call a method of the contract; return `None` where a plain node does not have it."""
    method = getattr(node, name, None)
    return method(*arguments) if callable(method) else None


def take(node: BaseNode[T], count: int) -> Chunk[T]:
    """Return some of the next items of any node, 1 to `count`, and their keys."""
    if isinstance(node, StatefulNode):
        return node.take_chunk(count)
    return [next(node)], [call_member(node, "item_key")]


def format_location(location: ItemLocation | None) -> str:
    """Return the words of a location, after a comma; nothing where it is not known."""
    if location is None:
        return ""
    words, *values = location
    shown = (
        format_location(one) if one is None or isinstance(one, tuple) else one for one in values
    )
    return f", {words % tuple(shown)}"


def snapshot(node: BaseNode[Any]) -> dict[str, Any]:
    """Return the state of any node, to keep in a state: it never changes and is cheap to take.

    Raises:
        TypeError: a plain node has no `get_state`.
    """
    own = getattr(node, "_snapshot_of_own", None)
    state: dict[str, Any] | None = own() if own is not None else None
    if state is None:
        state = node.state_dict()
        _check_plain_state(node, state)
        state = Snapshot(copy_state(state))
    return state


def _reset(holder: Any, states: Any) -> None:
    """Reset a source, or each of a dict of them."""
    if isinstance(holder, BaseNode):
        holder.reset(states)
        return
    for key, node in holder.items():
        node.reset(None if states is None else states[key])


def _check_source(node: object, name: str, saved: Any, holds_several: bool) -> None:
    """Make sure that what a node saves of a source, or of several, says where they stand."""
    holder = f"a source of `{type(node).__name__}`"
    if not holds_several:
        _check_plain_state(getattr(node, name, holder), saved)
        return
    for state in saved.values():
        if type(state) is not Snapshot:
            _check_plain_state(holder, state)


def _check_plain_state(node: object, state: Any) -> None:
    """Make sure that a plain node, and those below it, said where they stand."""
    check_own_state(node, state, "get_state")
    if "node" in state:  # It is sealed: one of ours has checked its own sources.
        return
    below = getattr(node, "source", f"a node below {_name(node)}")
    for key in ("source", "snapshot", "it_state"):  # where torchdata's keep those of their sources
        if key in state and (key != "snapshot" or state[key] is not None):
            # A mapper keeps its state in that of an iterator, one level further down.
            _check_plain_state(node if key == "it_state" else below, state[key])
    for key in ("iterable", "_sampler"):  # which have none before their first item
        if key in state and state.get("_num_yielded"):
            name = key.strip("_")
            check_own_state(getattr(node, name, f"the {name} of {_name(node)}"), state[key])


def check_own_state(holder: object, state: Any, method: str = "state_dict") -> None:
    """Raise a `TypeError` unless what a node or an iterable returned says where it stands.

    An empty state loses items when it is loaded.
    """
    if state is None or not state or (method == "get_state" and not isinstance(state, Mapping)):
        raise TypeError(
            f"`{method}` of {_name(holder)} must return where it stands, a dict that is not empty, "
            f"but returned {state!r:.80} instead: a run that resumes from it would lose or repeat "
            'items. Return a position at least, as in `{"position": self.position}`, and go there '
            "when it is loaded."
        )


def _name(holder: object) -> str:
    return holder if isinstance(holder, str) else f"`{type(holder).__name__}`"


# --- items by their keys --------------------------------------------------------------------------


def can_restore(node: BaseNode[Any]) -> bool:
    """Tell whether a node can make its items again from their keys.

    A source can if it has `read(key)`; other nodes say so by `can_restore`.
    """
    if isinstance(said := getattr(node, "can_restore", None), bool):
        return said
    item_key = getattr(type(node), "item_key", None)
    tells_keys = item_key is not None and item_key is not StatefulNode.item_key
    return tells_keys and callable(getattr(node, "read", None))


def checked_key(node: BaseNode[Any], key: Any) -> ItemKey | None:
    """Return what `item_key` of a node has returned, once it is known to be valid."""
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
