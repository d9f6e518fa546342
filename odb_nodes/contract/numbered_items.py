"""The items of a source by their numbers in the epoch: how to go back to one, without its key."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes._core.progress import Bar
from odb_nodes.contract.again import ItemsAgain
from odb_nodes.contract.node import Chunk, snapshot, take
from odb_nodes.contract.state import copy_state
from odb_nodes.errors import StateError
from odb_nodes.sample import ItemKey

T = TypeVar("T")


class NumberedItems(Generic[T]):
    """Numbers the items that are taken from a source in an epoch, and keeps states of the source.

    There is a state every `distance` items. `forget` lets go of those that are needed neither for
    the items that are not out nor for those that `keep_from` names. A node that numbers the items
    of its source saves the last state that does for both, and how many items it has taken since.

    Args:
        source: the source, which its node resets.
        node: name of the node, for errors.
        distance: items between two states.
    """

    def __init__(self, source: BaseNode[T], node: str, distance: int) -> None:
        self._source, self._node, self._distance = source, node, distance
        self._states: deque[tuple[int, Any]] = deque()  # before an item: its number, and the state
        self._oldest: int | None = None  # the oldest item that may be read again
        self.position = 0
        """The number of the next item."""
        # The number of the item that the source stands before: after a restore, an earlier one.
        self._source_position = 0
        self._is_lost = False  # whether the source has raised, and may stand after a lost item

    def begin(self) -> None:
        """Number the items of an epoch that the source has just begun."""
        self.restore(snapshot(self._source), 0, 0)

    def restore(self, state: Any, first: int, position: int) -> None:
        """Go to item `position`, of a source that was reset to its state before item `first`.

        The items between are read when the next one is taken, or before, by `read_again`.
        """
        if not 0 <= first <= position:
            raise self._damaged()
        self._states = deque([(first, state)])
        self._source_position, self.position = first, position

    def take(self, count: int) -> Chunk[T]:
        """Return some of the next items, 1 to `count`, and their keys."""
        self.catch_up()
        items, keys = self._next(count)
        self.position = self._source_position
        return items, keys

    def keep_from(self, first: int | None, distance: int) -> None:
        """Be able to read item `first` again, and all after it; `None`: those to come alone."""
        self._oldest, self._distance = first, distance

    @property
    def can_read_again(self) -> bool:
        """Whether items may be read again."""
        return self._oldest is not None

    def state_at(self, number: int) -> tuple[int, Any]:
        """Return the last state from which item `number` can be read, and those that are kept.

        The item that the state stands before comes first.
        """
        return self._state_before(self._oldest_needed(number))

    def forget(self, number: int) -> None:
        """Let go of states that neither item `number`, those after it nor kept ones need."""
        oldest = self._oldest_needed(number)
        while len(self._states) > 1 and self._states[1][0] <= oldest:
            self._states.popleft()

    def note_state(self) -> bool:
        """Keep the state that the source has now, and no other, if that does for what is kept.

        Returns whether it does.
        """
        is_needed = self._oldest is not None and self._oldest < self.position
        if is_needed or self._is_lost:
            return False
        self._states = deque([(self.position, snapshot(self._source))])
        return True

    def catch_up(self) -> None:
        """Bring the source to the position."""
        if self._source_position < self.position:
            self.read_again(())

    def read_again(self, numbers: Iterable[int]) -> dict[int, tuple[T, ItemKey | None]]:
        """Return items that were taken before, and their keys, by their numbers.

        Raises:
            StateError: the source ends before one of them, or there is no state to read it from.
        """
        wanted, items_again = {*numbers}, dict[int, tuple[T, ItemKey | None]]()
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
                        f"{self._node} cannot go on from its state: the source ended before sample "
                        f"{first} of the epoch, which it had yielded when the state was saved. "
                        "Resume over the data that the state was saved on."
                    ) from None
                bar.update(len(items))
                for number in wanted.intersection(range(first, self._source_position)):
                    items_again[number] = items[number - first], keys[number - first]
        return items_again

    def make_again(self, items: Sequence[ItemKey]) -> ItemsAgain:
        """Return items whose keys are their numbers, which are read again at once."""
        by_number = self.read_again(item.key for item in items)
        return _ReadAgain([by_number[item.key] for item in items])

    def expect_end(self) -> None:
        """Bring the source to where it had ended: one call after its last item."""
        try:
            self.catch_up()
            self._next(1)
        except StopIteration:
            return
        raise StateError(
            f"{self._node} cannot go on from its state: the source had ended after "
            f"{self.position} samples when the state was saved, but has more now. Resume over the "
            "data that the state was saved on."
        )

    def _next(self, count: int) -> Chunk[T]:
        """Take items from where the source stands; keep a state before them if one is due."""
        if self._source_position >= self._states[-1][0] + self._distance:
            self._states.append((self._source_position, snapshot(self._source)))
        until_due = self._states[-1][0] + self._distance - self._source_position
        self._is_lost = True
        try:
            items, keys = take(self._source, min(count, until_due))
        except StopIteration:
            self._is_lost = False
            raise
        self._is_lost = False
        self._source_position += len(items)
        return items, keys

    def _oldest_needed(self, number: int) -> int:
        return number if self._oldest is None else min(number, self._oldest)

    def _state_before(self, number: int) -> tuple[int, Any]:
        """Return the last state at or before an item; the first of all where there is none."""
        before = [(first, state) for first, state in self._states if first <= number]
        return before[-1] if before else self._states[0]

    def _damaged(self) -> StateError:
        return StateError(
            f"the state of {self._node} is damaged: it says of items that it has taken what cannot "
            "be. Use an earlier checkpoint."
        )


class _ReadAgain(ItemsAgain):
    """Items that were read again, in order."""

    are_made = True

    def __init__(self, items: Sequence[tuple[Any, ItemKey | None]]) -> None:
        self._items, self._keys = [item for item, _ in items], [key for _, key in items]

    def take(self, rows: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        """Return for each row all items, and the place of the row's item there."""
        return [(self._items, row) for row in rows]

    def key_of(self, row: int) -> ItemKey | None:
        """Return the key that the source has told of an item."""
        return self._keys[row]
