"""The batches of a training run as Lightning iterates them: one ahead of what it trains on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from odb_nodes.integrations.resuming import begin_or_resume
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.step_info import StepInfo, pop_step_info

__all__ = ["Fetched", "TrainBatches"]

CHANGED = (
    "Under a `Trainer` there is no `strict=False`: resume with the arguments and data that the run "
    "was saved with (`accumulate` is `accumulate_grad_batches`, the others are of the "
    "`ODBDataModule` or your `ODBDataLoader`), or begin a run with its weights: load them with "
    "`load_from_checkpoint`, and leave out `ckpt_path`."
)


class Fetched(NamedTuple):
    """A batch that Lightning has, and may not have trained on yet.

    Attributes:
        batch: as it was collated, before it moved to a device.
        info: of its step, which Lightning would not move to a device: it is frozen.
        state: of the loader, after this batch.
        wait_s: seconds that Lightning waited for it.
    """

    batch: Any
    info: StepInfo
    state: dict[str, Any]
    wait_s: float


class End(NamedTuple):
    """The end of an epoch, as the loader has seen it.

    Attributes:
        last: its last batch, or `None` where a resumed epoch had none left.
        state: of the loader, after the end.
    """

    last: Fetched | None
    state: dict[str, Any]


class TrainBatches:
    """Yields the batches of an epoch per `iter()`, and remembers what belongs to each.

    It has neither a length nor a state of its own: Lightning would believe in the one, and save the
    other after a batch that it has not trained on.

    Args:
        loader: of this rank.
    """

    def __init__(self, loader: ODBDataLoader) -> None:
        self.loader = loader
        self.start_state: dict[str, Any] | None = None
        """Of the loader, before the first batch of the most recent `iter()`."""
        self.end: End | None = None
        """Of the epoch that has ended most recently."""
        self._waiting: deque[Fetched] = deque()
        self._has_taken = False  # a batch of the most recent `iter()`

    @property
    def has_begun(self) -> bool:
        """Whether a batch was asked for."""
        return self.start_state is not None

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on from a loaded state, once the first batch is asked for.

        An epoch of which no batch was taken begins again: in a second `fit`, Lightning iterates
        twice before it trains.
        """
        if self.start_state is not None and self._waiting and not self._has_taken:
            self.loader.load_state_dict(self.start_state)
        self._waiting.clear()
        self._has_taken = False
        batches = begin_or_resume(self.loader, CHANGED)
        self.start_state = self.loader.state_dict()
        last = None
        while True:
            start_s = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            info = pop_step_info(batch)
            wait_s = time.perf_counter() - start_s
            last = Fetched(batch, info, self.loader.state_dict(), wait_s)
            self._waiting.append(last)
            yield batch
        self.end = End(last, self.loader.state_dict())

    def take(self) -> Fetched:
        """Return the oldest batch that was not taken yet.

        Raises:
            RuntimeError: there is none: something else than Lightning's own loop reads batches.
        """
        if not self._waiting:
            raise RuntimeError(
                "Lightning trains on a batch that was not read from `ODBCallback.batches`. Pass "
                "what that returns as it is, not within other loaders, and let `training_step` "
                "take a batch, not a `dataloader_iter`."
            )
        self._has_taken = True
        return self._waiting.popleft()
