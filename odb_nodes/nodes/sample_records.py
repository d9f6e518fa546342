"""What a state holds of samples that a restore makes again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from odb_nodes._core.progress import Bar
from odb_nodes._core.user_warning import warn_user
from odb_nodes.contract import Count, RowsOf
from odb_nodes.contract.config import mismatch_is_allowed
from odb_nodes.contract.later import Later
from odb_nodes.contract.recall import recall, recalls
from odb_nodes.errors import SampleError, StateError
from odb_nodes.processing.observation import digest_of
from odb_nodes.sample import ItemKey, Sample, Skipped, name_of

logger = logging.getLogger("odb_nodes")

RecordsState = tuple[
    Annotated[bytes | None, RowsOf(8)],
    Annotated[bytes | None, RowsOf(8)],
    list[tuple[str, Count]],
    Annotated[bytes | None, RowsOf(2)],
    Annotated[bytes | None, RowsOf(1)],
]
"""`SampleRecords` as the field of a state: tokens and digests; keys; source and world size of each
origin; the number of its origin for each sample, where there are several; repeats, where some are
not 0, in the fewest bytes. 16 bytes a sample, or 8 without keys; 2 more in a mixture, and 1, 2, 4
or 8 for repeats."""


NO_RECORDS: RecordsState = (None, None, [], None, None)

T = TypeVar("T")


def with_progress(samples: Iterable[T], total: int) -> Iterator[T]:
    """Yield what is made again for a restore, and show how far it is."""
    if total:
        logger.info("making %d samples again to restore a state", total)
        yield from Bar(samples, "samples made again to restore a state", total)


class SampleRecords:
    """Length and digest of samples, and the items that they were made of.

    Args:
        costs: tokens and digest of each sample, (n, 2) uint32.
        keys: key of the item of each, (n,) int64; `None` where the items are not known.
        repeats: its `ItemKey.repeat`, (n,) int64.
        numbers: the number of its origin, (n,) uint16.
        origins: source and world size of the items.
    """

    def __init__(
        self,
        costs: npt.NDArray[np.uint32],
        keys: npt.NDArray[np.int64] | None,
        repeats: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.uint16],
        origins: list[tuple[str, int]],
    ) -> None:
        self._costs, self._keys, self._repeats, self._numbers = costs, keys, repeats, numbers
        self._origins = origins
        self._warned = False

    @classmethod
    def of(cls, samples: Collection[Sample], *, with_items: bool) -> SampleRecords:
        """Return the records of samples.

        Args:
            samples: the samples.
            with_items: whether they know their items.

        Raises:
            SampleError: a sample has no item, though it must.
        """
        return cls.later(samples, with_items=with_items).value()

    @classmethod
    def later(cls, samples: Collection[Sample], *, with_items: bool) -> Later[SampleRecords]:
        """Return the same, made when it is asked for; the samples are not needed any more."""
        tokens = [sample.tokens for sample in samples]
        items = [sample.item for sample in samples]
        digests = [sample.digest for sample in samples]
        if None in digests:
            digests = [*map(digest_of, samples)]
        if with_items and None in items:
            raise SampleError(
                "the source can read items by their keys, but `item_key()` returned None for one "
                "that it yielded. Return its `ItemKey`, or define no `read`."
            )
        return Later(partial(cls._of_columns, tokens, digests, items if with_items else None))

    @classmethod
    def _of_columns(
        cls, tokens: Sequence[int], digests: Sequence[Any], items: Sequence[Any] | None
    ) -> SampleRecords:
        known = [ItemKey("", 0, 0)] * len(tokens) if items is None else items
        sources, keys, sizes, repeats = [*zip(*known, strict=True)] or [()] * 4
        pairs = [*zip(sources, sizes, strict=True)]
        origins = sorted({*pairs})
        numbers = map(origins.index, pairs) if len(origins) > 1 else [0] * len(pairs)
        return cls(
            np.array((tokens, digests), "<u4").T,
            None if items is None else np.array(keys, "<i8"),
            np.array(repeats, "<i8"),
            np.array([*numbers], "<u2"),
            origins,
        )

    def __len__(self) -> int:
        return len(self._costs)

    def __getitem__(self, which: slice | npt.NDArray[Any]) -> SampleRecords:
        keys = None if self._keys is None else self._keys[which]
        rest = self._repeats[which], self._numbers[which], self._origins
        return SampleRecords(self._costs[which], keys, *rest)

    def to_state(self) -> RecordsState:
        """Return the records as plain data."""
        # Not b"": `torch.load(weights_only=True)` refuses empty bytes.
        costs = self._costs.tobytes() or None
        if self._keys is None or not len(self):
            return costs, None, [], None, None
        keys = self._keys.tobytes()
        narrow = np.min_scalar_type(self._repeats.max())
        repeats = self._repeats.astype(narrow).tobytes() if self._repeats.any() else None
        if len(self._origins) == 1:
            return costs, keys, [*self._origins], None, repeats
        used = sorted({*map(self._origins.__getitem__, np.unique(self._numbers).tolist())})
        renumbered = [used.index(one) if one in used else 0 for one in self._origins]
        numbers = np.array(renumbered, "<u2")[self._numbers]
        return costs, keys, used, numbers.tobytes() if len(used) > 1 else None, repeats

    @classmethod
    def from_state(cls, state: RecordsState) -> SampleRecords:
        """Return what `to_state` was called on.

        Raises:
            ValueError: the parts do not go together.
        """
        costs, origins = np.frombuffer(state[0] or b"", "<u4").reshape(-1, 2), state[2]
        if (costs[:, 0] == 0).any():
            raise ValueError("a sample has no tokens.")
        n = len(costs)
        keys = np.frombuffer(state[1] or b"", "<i8")
        width = len(state[4] or b"") // n if n else 0
        narrow = f"<u{width}" if width in (1, 2, 4) else "<i8"
        repeats = np.frombuffer(state[4] or bytes(8 * n), narrow).astype("<i8")
        numbers = np.frombuffer(state[3] or bytes(2 * n), "<u2")
        if not len(repeats) == len(numbers) == n or len(keys) != n * bool(origins):
            raise ValueError("samples and their keys are not of one number.")
        if (keys < 0).any() or (repeats < 0).any() or (numbers >= max(1, len(origins))).any():
            raise ValueError("keys of samples are not valid.")
        return cls(costs, keys if origins else None, repeats, numbers, origins)

    @classmethod
    def joined(cls, parts: Sequence[SampleRecords]) -> SampleRecords:
        """Return the records of all parts, in their order."""
        parts = [part for part in parts if len(part)]
        if not parts:
            return cls.of([], with_items=True)
        origins = sorted({origin for part in parts for origin in part._origins})
        numbers = [
            part._numbers
            if part._origins == origins
            else np.array([*map(origins.index, part._origins)], "<u2")[part._numbers]
            for part in parts
        ]
        keys = [part._keys for part in parts if part._keys is not None]
        return cls(
            np.concatenate([part._costs for part in parts]),
            np.concatenate(keys) if len(keys) == len(parts) else None,
            np.concatenate([part._repeats for part in parts]),
            np.concatenate(numbers),
            origins,
        )

    def among(self, world_size: int) -> SampleRecords:
        """Return the same records, of items whose numbers so many ranks share."""
        origins = [(source, world_size) for source, _ in self._origins]
        return SampleRecords(self._costs, self._keys, self._repeats, self._numbers, origins)

    @property
    def has_items(self) -> bool:
        """Whether the items of the samples are known."""
        return self._keys is not None

    @property
    def origins(self) -> list[tuple[str, int]]:
        """Source and world size of the items. Shared: not to be changed."""
        return self._origins

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Length of each sample, (n,)."""
        return self._costs[:, 0].astype(np.int64)

    def items(self) -> list[ItemKey] | None:
        """Return the items of the samples; `None` where they are not known."""
        if self._keys is None:
            return None
        columns = (self._keys.tolist(), self._numbers.tolist(), self._repeats.tolist())
        of = self._origins
        return [ItemKey(of[at][0], key, of[at][1], n) for key, at, n in zip(*columns, strict=True)]

    def recall(self, source: BaseNode[Any], node: str) -> list[Sample]:
        """Make the samples again.

        Args:
            source: the node that yielded them.
            node: name of the node that restores itself, for errors.

        Raises:
            StateError: one of them is not what it was, or the source cannot make them.
        """
        if not recalls(source):
            raise StateError(
                f"{node} cannot restore its pool: the state has keys of its samples, but the "
                "source cannot read items by their keys any more. Build the graph as it was."
            )
        again = with_progress(recall(source, self.items() or []), len(self))
        return [self.checked(index, sample, node) for index, sample in enumerate(again)]

    def checked(
        self, index: int, sample: Sample | Skipped, node: str, name: str = "a sample"
    ) -> Sample:
        """Return a sample, once it is known to be what it was.

        Raises:
            StateError: it is not; names it.
        """
        if isinstance(sample, Skipped):
            raise StateError(
                f"{node} cannot be restored: {name}{name_of(sample)} was good when saved, but is "
                f"skipped now {sample.why} Mend the data, or use an earlier checkpoint."
            )
        tokens, digest = self._costs[index].tolist()
        now = digest_of(sample)
        if digest == now:
            return sample
        what = "has other content"
        if tokens != sample.tokens:
            what = f"had {tokens} tokens when saved, but has {sample.tokens}"
        found = f"{name}{name_of(sample)} {what} now"
        order = "The order of the source is not seeded (seed it: no state helps against that), "
        causes = (
            f"{'Either ' if self._keys is not None else order}processing is not deterministic "
            "(`ParallelProcessor(seed=...)` seeds the global generators; for others there is "
            '`state="payload"`), or the data changed.'
        )
        if not mismatch_is_allowed():
            raise StateError(
                f"{node} cannot be restored: {found}. {causes} If the change is meant, load with "
                "`strict=False`; within a round of steps, which is planned by its samples, that "
                "does not help, but a state that was saved after the last step of an epoch does."
            )
        if not self._warned:
            warn_user(f"{found}. {causes} Further ones are not named.")
        self._warned = True
        return sample
