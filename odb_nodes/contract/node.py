"""The contract of a node, declared once: what it answers, what its state holds, how it fails."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Generic, TypeVar, cast

from torchdata.nodes import BaseNode

from odb_nodes.contract.fields import (
    check_declaration,
    check_fields,
    source_fields,
    sparse_defaults,
)
from odb_nodes.contract.item_location import ItemLocation
from odb_nodes.contract.items import check_items, hands_on_items
from odb_nodes.contract.members import call_member, check_node, member, snapshot
from odb_nodes.contract.source_states import check_sources
from odb_nodes.contract.state import ENVELOPE, NodeState, Snapshot, copy_state, frozen, seal, unseal
from odb_nodes.errors import StateError
from odb_nodes.planning import TokenBudget
from odb_nodes.sample import ItemKey, LeftOut

__all__ = ["StatefulNode", "call_member", "check_node", "member", "snapshot", "take"]

T = TypeVar("T")
S = TypeVar("S", bound=NodeState)


class StatefulNode(BaseNode[T], Generic[T, S]):
    """A node whose state is declared, sealed when it is saved, and checked when it is loaded.

    A node derives from it, declares its state as a dataclass, and defines four methods: `next`,
    `begin_epoch`, `save` and `restore`. It gets these in return:

    - A state of another version, node or configuration, one that lacks a field, and one that holds
      something else than was declared is a `StateError` that names node and field.
    - No list or dict of the node's own is shared with a state that was handed out.
    - An error in `next` is raised again until the next reset, so the item that caused it cannot
      pass unseen; and no state is given out that would stand after that item.

    A node that reads data may define `read(key) -> item` beside `item_key`: a restore then reads
    just the items that it needs. A node in between may pass that on by `recalls`, `recall(items)`
    and `select(wanted)`, as `LengthObserver` does.

    A node of many small items may define `next_items` beside `next`, which gives out several at
    once. A class that defines `next`, `item_key` or `item_location` anew, or takes it from a mixin,
    has to define `next_items` anew, too: it is otherwise not used. `next` must not call
    `next_items`, which a derived class may not use.

    A node that keeps states of its source takes them by `snapshot(source)`, which is cheap: a
    state is copied only where it is handed out.

    Sources are attributes of the node, or are in a list or dict that is one. A plain node of
    torchdata may stand anywhere in a graph, and may have any of the methods of this class.

    Class attributes:
        STATE: the dataclass that declares the state, see `NodeState`.
        retries_errors: the node stands before the item whose `next` raised, and the next call tries
            again.
        keeps_failed_items: `save` is right also after `next` raised.
        same_on_all_ranks: ranks that share data must have a node with an equal `fingerprint`.
    """

    STATE: ClassVar[type[Any]] = NodeState
    retries_errors: ClassVar[bool] = False
    keeps_failed_items: ClassVar[bool] = False
    same_on_all_ranks: ClassVar[bool] = False

    _STATE_BASE: ClassVar[type[Any]] = NodeState
    __is_made = __is_checked = False
    __failure: Exception | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hands_on_items(cls):
            cls.next_items = StatefulNode.next_items  # type: ignore[method-assign]
        if not (isinstance(cls.STATE, type) and issubclass(cls.STATE, cls._STATE_BASE)):
            raise TypeError(
                f"`STATE` of `{cls.__name__}` must be a dataclass derived from "
                f"`{cls._STATE_BASE.__name__}`, but is {cls.STATE!r} instead."
            )
        check_declaration(cls.STATE)
        if reserved := ENVELOPE & {*cls.STATE.__dataclass_fields__}:
            raise TypeError(
                f"`STATE` of `{cls.__name__}` must not have a field {sorted(reserved)}: the "
                "envelope of a state has one. Give it another name."
            )

    def __init__(self) -> None:
        super().__init__()
        self.__is_made = True
        self.__is_reset = self.__is_checked = False
        self.__failure = None

    # --- what a node defines --------------------------------------------------------------------

    def prepare_reset(self) -> None:
        """Let go of what a reset leaves behind, before `begin_epoch` or `restore`."""

    def begin_epoch(self) -> None:
        """Stand at the beginning of the next epoch, and reset the sources with `None`."""
        raise NotImplementedError(f"`{type(self).__name__}` must define `begin_epoch`.")

    def restore(self, state: S) -> None:
        """Go to where `state` stands, and reset the sources with their parts of it.

        Args:
            state: what `save` returned, of this node or of one with an equal fingerprint; the
                node's to keep.

        Raises:
            StateError: the node cannot go there.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must define `restore`.")

    def save(self) -> S:
        """Return where the node stands. It must not raise, and is called once per item by some.

        Every item that was pulled and not yet yielded must be in it, or after it. What takes long
        to make may be an object that never changes, with a method `to_state()` that makes it.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must define `save`.")

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output, as plain data: a state fits only where it is equal."""
        return {}

    def fixed_fields(self, _state: S) -> Collection[str]:
        """Return the fields of the fingerprint that `strict=False` may not change for a state."""
        return ()

    # --- what a node may be asked ---------------------------------------------------------------

    @property
    def budget(self) -> TokenBudget | None:
        """The budget of the groups that it yields; `None` where it forms none."""
        return None

    @property
    def remaining_samples(self) -> int:
        """Samples of this epoch that it holds or knows to be left, beside its sources'."""
        return 0

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset without a state begins, if it counts them."""

    def begin_cycle(self) -> None:
        """Make the next reset without a state begin this epoch again, in another order."""

    def item_location(self) -> ItemLocation | None:
        """Return where the last item comes from, for errors."""
        return None

    def item_key(self) -> ItemKey | None:
        """Return which item of the data the last one is; `None` where the node cannot tell.

        It must be the same number for the same item in every epoch and on every rank.
        """
        return None

    def next_items(self, count: int) -> tuple[list[T], list[ItemKey | None]]:  # noqa: ARG002
        """Return some of the next items, and their keys, as so many calls of `next` would.

        Args:
            count: the most items; at least one is returned.

        Raises:
            StopIteration: there are no more.
        """
        return [self.next()], [self.item_key()]

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last call."""
        return []

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
        self.__is_reset = self.__is_checked = False
        try:
            self.prepare_reset()
            if initial_state is None:
                self._begin()
            else:
                name, config = type(self).__name__, self.fingerprint()
                self._restore(unseal(initial_state, name, self.STATE, config, self.fixed_fields))
        except BaseException as error:  # It stands nowhere now: only another reset helps.
            self.__failure = self._as_exception(error)
            raise
        self.__failure, self.__is_reset = None, True

    def get_state(self) -> dict[str, Any]:
        """Return where the node stands. The caller owns the result.

        Raises:
            StateError: `next` raised, and a state would lose the item that caused it. The `Loader`
                uses the one before.
        """
        state: dict[str, Any] = copy_state(self.__sealed())
        return state

    def _snapshot_of_own(self) -> Snapshot | None:
        """Return the state for `snapshot`; `None` where a derived class changes what it is."""
        cls = type(self)
        if cls.get_state is StatefulNode.get_state and cls.state_dict is BaseNode.state_dict:
            return self.__sealed()
        return None

    def __sealed(self) -> Snapshot:
        if self.__failure is not None and not (self.keeps_failed_items and self.__is_reset):
            raise StateError(
                f"{type(self).__name__} has no state after an error, which would lose the item "
                f"that caused it ({self.__failure}). Load the last state saved before."
            )
        config, saved = self.fingerprint(), self.save()
        if not self.__is_checked:  # once after a reset: some ask for a state at each item
            self._check_saved(config, saved)
            self.__is_checked = True
        values, declared = self._values_of(saved), cast(Any, self.STATE)
        check_sources(self, source_fields(declared), values)
        if sparse := sparse_defaults(declared):
            values = {
                name: value
                for name, value in values.items()
                if name not in sparse or value != sparse[name]
            }
        return Snapshot(frozen(seal(type(self).__name__, config, values)))

    def __next__(self) -> T:
        self.__check_stands()
        try:
            return self._next()
        except StopIteration:
            raise
        except BaseException as error:
            self.__note(error)
            raise

    def take_items(self, count: int) -> tuple[list[T], list[ItemKey | None]]:
        """Return some of the next items, and their keys: see `next_items`."""
        self.__check_stands()
        try:
            items, keys = self._next_items(count)
            check_items(type(self).__name__, items, keys, count)
            return items, keys
        except StopIteration:
            raise
        except BaseException as error:
            self.__note(error)
            raise

    def __check_stands(self) -> None:
        if self.__failure is not None:
            raise self.__failure
        if not (self.__is_made and self.__is_reset):
            self.reset(None)

    def __note(self, error: BaseException) -> None:
        if not self.retries_errors:
            self.__failure = self._as_exception(error)

    def _as_exception(self, error: BaseException) -> Exception:
        """Return the error to raise from now on: Ctrl-C loses what was on its way."""
        if isinstance(error, Exception):
            return error
        return StateError(f"{type(self).__name__} was interrupted by {error!r}.")

    def _check_saved(self, config: object, saved: object) -> None:
        """Make sure that the node saves what it declared: a state is read long after."""
        name = type(self).__name__
        if not isinstance(config, dict):
            raise TypeError(
                f"`fingerprint` of `{name}` must return a dict, but returned {config!r}."
            )
        if not isinstance(saved, self.STATE):
            expected = self.STATE.__name__
            raise TypeError(f"`save` of `{name}` must return its `{expected}`, not {saved!r:.80}.")
        declared: Any = self.STATE
        check_sources(self, source_fields(declared), vars(saved))
        for field, rule in check_fields(self.STATE, copy_state(vars(saved))).items():
            value = getattr(saved, field)
            raise TypeError(
                f"`save` of `{name}` returned {value!r:.80} as `{field}`, which must {rule}."
            )

    def _begin(self) -> None:
        self.begin_epoch()

    def _restore(self, state: S) -> None:
        self.restore(state)

    def _next(self) -> T:
        return self.next()

    def _next_items(self, count: int) -> tuple[list[T], list[ItemKey | None]]:
        return self.next_items(count)

    def _values_of(self, saved: S) -> dict[str, Any]:
        return vars(saved)


def take(node: BaseNode[T], count: int) -> tuple[list[T], list[Any]]:
    """Return some of the next items of any node, at least one, and their keys.

    Args:
        node: the node.
        count: the most items.

    Raises:
        StopIteration: there are no more.
    """
    if isinstance(node, StatefulNode):
        return node.take_items(count)
    return [next(node)], [call_member(node, "item_key")]
