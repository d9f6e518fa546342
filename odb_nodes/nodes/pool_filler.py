"""Pulls samples of a source into a pool, until it is full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchdata.nodes import BaseNode

from odb_nodes._core.progress import SlowProgress
from odb_nodes.contract.node import take
from odb_nodes.errors import SampleError
from odb_nodes.nodes.exclusions import ExclusionCounter
from odb_nodes.nodes.pool_window import PoolWindow
from odb_nodes.nodes.snapshots import Snapshots
from odb_nodes.planning import RollingPool
from odb_nodes.planning.diversity import check_has_task
from odb_nodes.sample import Sample, Skipped


class PoolFiller:
    """Fills the pool of a bucketer.

    Args:
        source: the node that yields the samples.
        pool: the pool.
        window: how many samples wait; it is told the lengths of those that come.
        snapshots: keeps states of the source on the way.
        exclusions: tells which samples go into the pool.
        has_tasks: whether groups depend on the tasks of samples.
        node: name of the node whose pool it is, for errors.
    """

    def __init__(
        self,
        source: BaseNode[Sample | Skipped],
        pool: RollingPool[Sample],
        window: PoolWindow,
        snapshots: Snapshots,
        exclusions: ExclusionCounter,
        *,
        has_tasks: bool,
        node: str,
    ) -> None:
        self._source, self._pool, self._window = source, pool, window
        self._snapshots, self._exclusions = snapshots, exclusions
        self._has_tasks, self._node = has_tasks, node
        self._task_numbers: dict[str, int] = {}  # which task has which decides nothing

    def fill(self, progress: SlowProgress | None) -> bool:
        """Pull until the pool is full, or as full as the age of its oldest sample allows.

        Returns:
            Whether the source has ended.

        Raises:
            SampleError: the source yields something else, or a sample is too large under
                `oversize="error"`. Those before it are in the pool.
        """
        while (room := self._pool.room()) > 0:
            ordinals: list[int] = []
            samples: list[Sample] = []
            try:
                while room > 0:
                    pulled = self._pull(room)
                    room -= len(pulled)
                    self._admit(pulled, ordinals, samples)
                    if progress is not None:
                        progress.update(self._pool.pulled)
            except StopIteration:
                return True
            finally:
                self.add(ordinals, samples)
                self._window.note(samples)
        return False

    def add(self, ordinals: list[int], samples: list[Sample]) -> None:
        """Put samples into the pool."""
        tokens = [sample.tokens for sample in samples]
        tasks, known = list[int](), self._task_numbers
        if self._has_tasks:
            tasks = [known.setdefault(sample.task_name, len(known)) for sample in samples]
        self._pool.add(samples, tokens, [sample.patches for sample in samples], ordinals, tasks)

    def _admit(
        self, pulled: list[Sample | Skipped], ordinals: list[int], samples: list[Sample]
    ) -> None:
        """Count what was pulled, and note what goes into the pool."""
        pool, exclusions = self._pool, self._exclusions
        if not self._has_tasks and exclusions.admits_all(pulled):
            ordinals += range(pool.pulled, pool.pulled + len(pulled))
            samples += pulled
            pool.pulled += len(pulled)
            return
        for sample in self._checked(pulled):
            if exclusions.admit(sample, pool.pulled):
                ordinals.append(pool.pulled)
                samples.append(sample)
            pool.pulled += 1

    def _pull(self, most: int) -> list[Sample | Skipped]:
        until_due = self._snapshots.take_if_due(self._pool.pulled)
        return take(self._source, min(most, until_due))[0]

    def _checked(self, samples: Iterable[Sample | Skipped]) -> Iterator[Sample | Skipped]:
        for sample in samples:
            if not isinstance(sample, (Sample, Skipped)):
                raise SampleError(
                    f"`source` of {self._node} must yield `Sample`, but yielded "
                    f"`{type(sample).__name__}` instead. Put a `LengthObserver` before it."
                )
            if self._has_tasks:
                check_has_task(sample)
            yield sample
