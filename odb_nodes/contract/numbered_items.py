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

    There is a state every `distance` items. Those are forgotten that are needed neither for the
    next items nor for those that `keep` names. A node that numbers the items of its source saves
    the last state that does for both, and how many items it has taken since.

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
        self._at = 0  # of the item that the source stands before: after a restore, an earlier one
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
        self._oldest, self._at, self.position = None, first, position
        self._is_lost = False

    def take(self, count: int) -> Chunk[T]:
        """Return some of the next items, 1 to `count`, and their keys."""
        self.catch_up()
        items, keys = self._next(count)
        self.position = self._at
        return items, keys

    def keep(self, first: int | None, distance: int) -> None:
        """Be able to read item `first` again, and all after it; `None`: those to come alone."""
        self._oldest, self._distance = first, distance

    @property
    def keeps(self) -> bool:
        """Whether items may be read again."""
        return self._oldest is not None

    def state_at(self, number: int) -> tuple[int, Any]:
        """Return the last state from which item `number` can be read, and those that are kept.

        The item that the state stands before comes first. Earlier states are forgotten.
        """
        oldest = number if self._oldest is None else min(number, self._oldest)
        while len(self._states) > 1 and self._states[1][0] <= oldest:
            self._states.popleft()
        return self._states[0]

    def note_state(self) -> None:
        """Keep the state that the source has now, and no other, if that does for what is kept."""
        is_needed = self._oldest is not None and self._oldest < self.position
        if not (is_needed or self._is_lost or self._at < self.position):
            self._states = deque([(self.position, snapshot(self._source))])

    def catch_up(self) -> None:
        """Bring the source to the position."""
        if self._at < self.position:
            self.read_again(())

    def read_again(self, numbers: Iterable[int]) -> dict[int, tuple[T, ItemKey | None]]:
        """Return items that were taken before, and their keys, by their numbers.

        Raises:
            StateError: the source ends before one of them, or there is no state to read it from.
        """
        wanted, found = {*numbers}, dict[int, tuple[T, ItemKey | None]]()
        oldest = min(wanted, default=self._at)
        if oldest < self._states[0][0] or max(wanted, default=-1) >= self.position:
            raise self._damaged()
        if oldest < self._at:
            before = [one for one in self._states if one[0] <= oldest]
            self._at, state = before[-1]
            self._source.reset(copy_state(state))
        with Bar(None, "items read again to restore a state", self.position - self._at) as bar:
            while (first := self._at) < self.position:
                try:
                    items, keys = self._next(self.position - first)
                except StopIteration:
                    raise StateError(
                        f"{self._node} cannot go on from its state: the source ended before sample "
                        f"{first} of the epoch, which it had yielded when the state was saved. "
                        "Resume over the data that the state was saved on."
                    ) from None
                bar.update(len(items))
                for number in wanted.intersection(range(first, self._at)):
                    found[number] = items[number - first], keys[number - first]
        return found

    def make_again(self, items: Sequence[ItemKey]) -> ItemsAgain:
        """Return items whose keys are their numbers, which are read again at once."""
        found = self.read_again(item.key for item in items)
        return _ReadAgain([found[item.key][0] for item in items])

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
        if self._at >= self._states[-1][0] + self._distance:
            self._states.append((self._at, snapshot(self._source)))
        until_due = self._states[-1][0] + self._distance - self._at
        self._is_lost = True
        try:
            items, keys = take(self._source, min(count, until_due))
        except StopIteration:
            self._is_lost = False
            raise
        self._is_lost = False
        self._at += len(items)
        return items, keys

    def _damaged(self) -> StateError:
        return StateError(
            f"the state of {self._node} is damaged: it says of items that it has taken what cannot "
            "be. Use an earlier checkpoint."
        )


class _ReadAgain(ItemsAgain):
    """Items that were read again, in order."""

    are_made = True

    def __init__(self, found: Sequence[Any]) -> None:
        self._found = found

    def take(self, rows: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        """Return for each row all items, and the place of the row's item there."""
        return [(self._found, row) for row in rows]
