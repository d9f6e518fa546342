"""Items of a source without keys, by their numbers in the epoch: how to read them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes._support.progress import Bar
from odb_nodes.core.contract.again import ItemsAgain
from odb_nodes.core.contract.node import Chunk, snapshot, take
from odb_nodes.core.contract.state import copy_state
from odb_nodes.core.sample import ItemKey
from odb_nodes.errors import StateError

T = TypeVar("T")


class NumberedItems(Generic[T]):
    """Numbers the items that a node takes from its source, and keeps states of the source.

    A state of the source is kept every `distance` items. `forget` drops the states before the
    oldest item that may be read again. The node saves the last state before that item, and the
    number of items that it has taken since. The node also resets the source.

    node: name of the node, for errors.
    """

    def __init__(self, source: BaseNode[T], node: str, distance: int) -> None:
        self._source = source
        self._node = node
        self._distance = distance
        self._states: deque[tuple[int, Any]] = deque()  # number of the next item, and the state
        self._oldest: int | None = None  # the oldest item that may be read again
        self.position = 0
        """The number of the next item."""
        self._source_position = 0  # number of the source's next item, below `position` at a restore
        self._has_raised = False  # whether the source has raised, and so may have lost an item

    def begin(self) -> None:
        """Number the items of an epoch that the source has just begun."""
        self.restore(snapshot(self._source), 0, 0)

    def restore(self, state: Any, first: int, position: int) -> None:
        """Go to item `position`. The source was reset to `state`, which is before item `first`.

        `take` or `read_again` reads the items from `first` to `position`.
        """
        if not 0 <= first <= position:
            raise self._damaged()
        self._states = deque([(first, state)])
        self._source_position = first
        self.position = position

    def take(self, count: int) -> Chunk[T]:
        """Return the next 1 to `count` items, and their keys."""
        self.catch_up()
        items, keys = self._next(count)
        self.position = self._source_position
        return items, keys

    def keep_from(self, first: int | None, distance: int) -> None:
        """Keep states from which item `first` and all later items can be read; `None`: no item."""
        self._oldest = first
        self._distance = distance

    @property
    def can_read_again(self) -> bool:
        """Whether items may be read again."""
        return self._oldest is not None

    def state_at(self, number: int) -> tuple[int, Any]:
        """Return the number of an item and the state of the source before it.

        From that state, item `number` and all items to keep can be read.
        """
        return self._state_before(self._oldest_needed(number))

    def forget(self, number: int) -> None:
        """Drop the states that are not needed to read `number` and all items to keep."""
        oldest = self._oldest_needed(number)
        while len(self._states) > 1 and self._states[1][0] <= oldest:
            self._states.popleft()

    def note_state(self) -> bool:
        """Replace all states by the present state of the source, unless an earlier item is needed.

        Returns whether the states were replaced.
        """
        needs_earlier = self._oldest is not None and self._oldest < self.position
        if needs_earlier or self._has_raised:
            return False
        self._states = deque([(self.position, snapshot(self._source))])
        return True

    def catch_up(self) -> None:
        """Read the source up to the position."""
        if self._source_position < self.position:
            self.read_again(())

    def read_again(self, numbers: Iterable[int]) -> dict[int, tuple[T, ItemKey | None]]:
        """Return earlier items and their keys, by their numbers.

        Raises:
            StateError: the source ends before an item, or there is no state to read it from.
        """
        wanted = {*numbers}
        items_again: dict[int, tuple[T, ItemKey | None]] = {}
        oldest = min(wanted, default=self._source_position)
        if oldest < self._states[0][0] or max(wanted, default=-1) >= self.position:
            raise self._damaged()
        if oldest < self._source_position:
            self._source_position, state = self._state_before(oldest)
            self._source.reset(copy_state(state))
        count = self.position - self._source_position
        with Bar(None, "items read again to restore a state", count) as bar:
            while (first := self._source_position) < self.position:
                try:
                    items, keys = self._next(self.position - first)
                except StopIteration:
                    raise StateError(
                        f"{self._node} cannot resume from its state: the source ended before "
                        f"sample {first} of the epoch, which it had yielded when the state was "
                        "saved. Resume over the same data."
                    ) from None
                bar.update(len(items))
                for number in wanted.intersection(range(first, self._source_position)):
                    items_again[number] = items[number - first], keys[number - first]
        return items_again

    def make_again(self, items: Sequence[ItemKey]) -> ItemsAgain:
        """Read items again at once. Their keys are their numbers."""
        by_number = self.read_again(item.key for item in items)
        return _ReadAgain([by_number[item.key] for item in items])

    def expect_end(self) -> None:
        """Call the source once after its last item, so that the source is at its end."""
        try:
            self.catch_up()
            self._next(1)
        except StopIteration:
            return
        raise StateError(
            f"{self._node} cannot resume from its state: the source had ended after "
            f"{self.position} samples when the state was saved, but has more now. Resume over the "
            "same data."
        )

    def _next(self, count: int) -> Chunk[T]:
        """Take the next items of the source; first keep a state of the source if one is due."""
        if self._source_position >= self._states[-1][0] + self._distance:
            self._states.append((self._source_position, snapshot(self._source)))
        until_due = self._states[-1][0] + self._distance - self._source_position
        self._has_raised = True
        try:
            items, keys = take(self._source, min(count, until_due))
        except StopIteration:
            self._has_raised = False
            raise
        self._has_raised = False
        self._source_position += len(items)
        return items, keys

    def _oldest_needed(self, number: int) -> int:
        return number if self._oldest is None else min(number, self._oldest)

    def _state_before(self, number: int) -> tuple[int, Any]:
        """Return the last state at or before an item; the first state if there is none."""
        before = [(first, state) for first, state in self._states if first <= number]
        return before[-1] if before else self._states[0]

    def _damaged(self) -> StateError:
        return StateError(
            f"the state of {self._node} is damaged: its counts of items contradict each other. Use "
            "an earlier checkpoint."
        )


class _ReadAgain(ItemsAgain):
    are_made = True

    def __init__(self, items: Sequence[tuple[Any, ItemKey | None]]) -> None:
        self._items = [item for item, _ in items]
        self._keys = [key for _, key in items]

    def take(self, indices: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        return [(self._items, index) for index in indices]

    def key_of(self, index: int) -> ItemKey | None:
        return self._keys[index]
