"""Values of a state that are made when the state is handed out, which most states never are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Later", "keeps_states"]

V = TypeVar("V")

_TELLS_STATE = {"save_to_keep", "save", "get_state", "state_dict"}


class Later(Generic[V]):
    """A value that is made when it is first asked for.

    It stands in states that nodes keep, and in no other: a copy of it, by `copy_state`,
    `copy.deepcopy` or pickle, is the value itself.

    Args:
        make: returns the value, whenever and on whichever thread: of what never changes.
    """

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], V]) -> None:
        self._make: Callable[[], V] | None = make
        self._value: V

    def value(self) -> V:
        """Return the value. Shared: not to be changed."""
        make = self._make
        if make is not None:
            self._value = make()
            self._make = None  # After the value: another thread may be asking, too.
        return self._value

    def __deepcopy__(self, memo: dict[int, Any]) -> V:
        return copy.deepcopy(self.value(), memo)

    def __reduce__(self) -> tuple[Callable[[V], V], tuple[V]]:
        return _itself, (self.value(),)


def _itself(value: V) -> V:
    return value


def keeps_states(cls: type[Any]) -> bool:
    """Tell whether `save_to_keep` of a class still says what its other methods do.

    Not where one of those is defined, perhaps by a mixin, before it.
    """
    first = next((one for one in cls.__mro__ if not _TELLS_STATE.isdisjoint(vars(one))), cls)
    return "save_to_keep" in vars(first)
