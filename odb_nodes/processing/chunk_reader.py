"""Reads items for chunks, and notes where in them the source could be taken up again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract import snapshot
from odb_nodes.contract.node import ItemLocation, call_member, checked_key, take
from odb_nodes.errors import StateError
from odb_nodes.sample import ItemKey
from odb_nodes.sample_block import ItemKeys

__all__ = ["ChunkReader", "ReadItems"]


@dataclass
class ReadItems:
    """The items of a chunk, and how they were read.

    Attributes:
        items: the items.
        keys: their keys; filled in when all are read.
        locations: where each was read, where the source knows that.
        steps: raw items from each on to the next one.
        states: numbers of items, and the states of the source before them.
        positions: of the items in the epoch; filled in when all are read.
        error: what the source raised after them.
    """

    items: list[Any] = field(default_factory=list)
    keys: ItemKeys = field(default_factory=lambda: ItemKeys.of([]))
    locations: list[ItemLocation | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    states: list[tuple[int, Any]] = field(default_factory=list)
    positions: Sequence[int] = ()
    error: Exception | None = None


class ChunkReader:
    """Reads the items of an epoch, or of the rest of one."""

    def __init__(self, source: BaseNode[Any], distance: int, name: str) -> None:
        self._source, self._distance, self._name = source, distance, name
        self._since_state = 0  # items read since the last state
        self._gaps: deque[int] = deque()  # raw items to leave out after each of the next ones
        self._position = 0  # raw items read in this epoch
        self.has_ended = False
        """Whether the source has no more items, or has failed."""

    def stand_at(self, position: int, taken: int) -> None:
        """Go past the items that are out, `taken` after the state that the source was reset to."""
        self._position = position
        self._skip(taken, taken)

    def select(self, wanted: Sequence[bool]) -> int:
        """Read of the next `len(wanted)` items only those that are wanted."""
        places = [place for place, is_wanted in enumerate(wanted) if is_wanted]
        first, *later = *places, len(wanted)
        self._skip(first, first)
        self._position += first
        self._gaps.extend(after - place - 1 for place, after in zip(places, later, strict=True))
        return first

    def read(self, count: int) -> ReadItems:
        """Return the next items, fewer at the end of the source; its error comes after them."""
        read, keys_read = ReadItems(), list[Sequence[ItemKey | None]]()
        try:
            while (left := count - len(read.items)) > 0:
                if self._since_state in (0, self._distance):
                    read.states.append((len(read.items), snapshot(self._source)))
                    self._since_state = 0
                left = min(left, self._distance - self._since_state)
                some, keys = take(self._source, 1 if self._gaps else left)
                self._since_state += len(some)
                if not isinstance(keys, ItemKeys):
                    keys = [checked_key(self._source, key) for key in keys]
                keys_read.append(keys)
                locations = [None] * len(some)
                if len(some) == 1:
                    locations = [call_member(self._source, "item_location")]
                read.locations += locations
                read.items += some
                read.steps += [1] * len(some)
                if self._gaps and (gap := self._gaps.popleft()):
                    read.steps[-1] += gap
                    self._skip(gap, sum(read.steps))
        except StopIteration:
            self.has_ended = True
        except Exception as error:
            self.has_ended, read.error = True, error
        read.keys = ItemKeys.joined(keys_read)
        positions = [*accumulate(read.steps, initial=self._position)]
        read.positions, self._position = positions[: len(read.items)], positions[-1]
        return read

    def _skip(self, count: int, behind: int) -> None:
        """Read items and leave them out: the last of them is `behind` items after a state's."""
        for left in range(count, 0, -1):
            try:
                next(self._source)
            except StopIteration:
                raise StateError(
                    f"the state of {self._name} stands {behind} items after its source's, "
                    f"which ended after {behind - left}. Resume over the data it was saved on."
                ) from None
