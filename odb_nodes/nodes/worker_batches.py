"""Has batches made by the worker processes that hold the data of their samples."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future, wait
from itertools import count
from typing import Any

from odb_nodes._core.user_warning import warn_user
from odb_nodes.collate.protocol import Collate, takes_step
from odb_nodes.errors import WorkerError
from odb_nodes.nodes.seeded_collate import WorkerCollate
from odb_nodes.processing import ParallelProcessor
from odb_nodes.processing.chunk_runner import ChunkRunner
from odb_nodes.processing.columns import DataColumns
from odb_nodes.processing.transport import split_parts, unpack
from odb_nodes.processing.worker import WorkerCrash
from odb_nodes.sample import StoredData
from odb_nodes.sample_block import SampleBlock
from odb_nodes.step_info import StepInfo

_LARGE_BYTES = 1 << 20  # of a sample: from here on it does not go to the trainer

Batch = MutableMapping[str, Any]


class WorkerBatches:
    """Has batches made by the workers of processors, in turn: `always`, or of large samples."""

    def __init__(
        self, processors: Sequence[ParallelProcessor[Any]], collate: Collate, *, always: bool
    ) -> None:
        maker = WorkerCollate(collate)
        self._always = always
        self._runners = [one.runner for one in processors]
        for runner in self._runners:
            runner.keep_data_for(maker, 0 if always else _LARGE_BYTES)
        self._limit_s = max(one.options.timeout_s for one in self._runners)
        self._takes_info = takes_step(collate)
        self._turn = count()
        self._works = True
        self._told: set[str] = set()  # what was warned of

    def order(
        self, group: SampleBlock, key: int, info: StepInfo
    ) -> Callable[[Callable[[], Batch]], Batch] | None:
        """Order a batch, under the random numbers of a key; `None` where no worker can make it.

        Returns:
            What waits for the batch. It takes a function that makes the batch here, which it calls
            where the workers have failed.
        """
        if not self._works:
            return None
        if not self._always and all(isinstance(one, DataColumns) for one in group.sources.values()):
            return None
        data = group.data()
        if not (self._always or any(isinstance(one, StoredData) for one in data)):
            return None
        runner = self._runners[next(self._turn) % len(self._runners)]
        try:
            made = runner.make_batch(data, key, info if self._takes_info else None)
        except Exception:  # of pickling a sample: the trainer has it
            return None
        return None if made is None else lambda make_here: self._take(made, runner, make_here)

    def _take(
        self, made: Future[Any], runner: ChunkRunner, make_here: Callable[[], Batch]
    ) -> Batch:
        wait([made], self._limit_s)
        if not made.done():
            raise WorkerError(
                f"no batch within {self._limit_s} s (`timeout_s`): `collate_fn`, or the processing "
                "of a sample, hangs in a worker, or needs a longer limit. "
                "Nothing is lost: load the last state, or iterate again, to go on."
            )
        error = made.exception()
        if isinstance(error, WorkerCrash):  # It might end the trainer as well.
            raise WorkerError(
                f"{error} `collate_fn`, or the processing of a sample, has ended it, and would end "
                "the trainer, which makes no such batch itself. Mend it, then load the last state, "
                "or iterate again, to go on."
            ) from error
        if error is not None:  # The worker is gone. The samples are not.
            batch = make_here()
            if runner.is_started:  # else all were stopped, and something else says why
                self._warn_of(str(error))
            return batch
        result = made.result()
        if result.content is None:
            batch = make_here()  # which raises the same error, but where only a worker cannot do it
            self._give_up(result.error)
            return batch
        return unpack(split_parts(result.content))  # type: ignore[no-any-return]

    def _warn_of(self, death: str) -> None:
        """Warn of the death of a worker, which may have owed several batches, once."""
        if death not in self._told:
            self._told.add(death)
            warn_user(f"{death} The trainer's process makes them.")

    def _give_up(self, error: str) -> None:
        if self._works:
            self._works = False
            warn_user(
                f"a worker could not make a batch ({error}), but the trainer's process could, and "
                "makes all from now on. Let `collate_fn` return tensors and plain data, and use "
                'neither a device nor `get_worker_info` of torch; or pass `collate_in="main"`.'
            )
