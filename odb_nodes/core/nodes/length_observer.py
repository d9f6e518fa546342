"""Node: observes the length of each processed sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import check_callable
from odb_nodes._support.hashing import stable_name
from odb_nodes.core.contract import NodeState, SourceState, StatefulNode
from odb_nodes.core.contract.again import ItemsAgain, make_again
from odb_nodes.core.contract.graph import length_of
from odb_nodes.core.contract.node import call_member, can_restore, check_node, checked_key
from odb_nodes.core.processing.observation import observe_sample, with_item_key
from odb_nodes.core.sample import ItemKey, Observe, Sample, Skipped
from odb_nodes.errors import SampleError


@dataclass(kw_only=True)
class ObserverState(NodeState):
    """The state of a `LengthObserver`."""

    source: SourceState
    position: int = 0  # number of the next sample in the epoch, for errors


class LengthObserver(StatefulNode[Sample | Skipped, ObserverState]):
    """Yields a `Sample` for each item: the item with its tokens, targets and patches.

    A `Skipped` passes through, and the `WindowBucketer` counts it.

    State: the state of the source, and the position, for errors.

    Args:
        source: node that yields processed samples.
        observe: item -> tokens or `Observation`. Default: by `input_ids`, `labels` and image
            fields, see `observe_sample`.
    """

    STATE = ObserverState

    def __init__(self, source: BaseNode[Any], observe: Observe | None = None) -> None:
        super().__init__()
        check_node("source", source)
        check_callable("observe", observe)
        self.source = source
        self._observe = observe
        self._name = None if observe is None else stable_name(observe)
        self.position = 0

    def __len__(self) -> int:
        """Return how many samples an epoch has."""
        return length_of(self.source)

    def next(self) -> Sample | Skipped:
        """Return the next sample.

        Raises:
            SampleError: the sample has no valid length. The error is raised again until the next
                reset, so the sample is not lost.
        """
        data = next(self.source)
        item = checked_key(self.source, call_member(self.source, "item_key"))
        sample = self._observed(data, item, f"sample {self.position} of the epoch")
        self.position += 1
        return sample

    @property
    def can_restore(self) -> bool:
        """Whether the source can make its items again."""
        return can_restore(self.source)

    def keep_items(self, first: int, distance: int) -> bool:
        """Have the source keep items: see `ParallelProcessor.keep_items`."""
        return bool(call_member(self.source, "keep_items", first, distance))

    def make_again(self, items: Sequence[ItemKey]) -> ItemsAgain:
        """Return samples of this epoch that are made again when `take` is called."""
        return _ObservedAgain(make_again(self.source, items), self._observed)

    def _observed(self, data: Any, item: ItemKey | None, where: str) -> Sample | Skipped:
        try:
            sample = observe_sample(data, self._observe)
        except Exception as error:
            cause = error if isinstance(error, SampleError) else f"`observe` raised {error!r}"
            raise SampleError(f"{where}: {cause}") from error
        return with_item_key(sample, item)  # type: ignore[no-any-return]

    def fingerprint(self) -> dict[str, Any]:
        """Return the configuration that decides the output."""
        return {"observe": self._name}


class _ObservedAgain(ItemsAgain):
    def __init__(
        self,
        items_again: ItemsAgain,
        observed: Callable[[Any, ItemKey | None, str], Sample | Skipped],
    ) -> None:
        self._items_again = items_again
        self._observed = observed

    def want(self, indices: Sequence[int]) -> None:
        self._items_again.want(indices)

    def take(self, indices: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        items_again = self._items_again.take(indices)
        samples = [
            self._observed(
                items[position], self.key_of(index), f"{self.name_of(index)}, made again"
            )
            for index, (items, position) in zip(indices, items_again, strict=True)
        ]
        return [(samples, position) for position in range(len(indices))]

    def key_of(self, index: int) -> ItemKey | None:
        return self._items_again.key_of(index)

    def name_of(self, index: int) -> str:
        return self._items_again.name_of(index)
