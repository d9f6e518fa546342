"""The batches of a training run, which Lightning reads one ahead of the one it trains on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from odb_nodes.integrations.resuming import begin_or_resume, changed_arguments_remedy
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.monitor.metrics import timed
from odb_nodes.step_info import StepInfo, pop_step_info

CHANGED = changed_arguments_remedy(
    names="`accumulate` is `accumulate_grad_batches`, the others are those of the `ODBDataModule` "
    "or of your `ODBDataLoader`",
    load="load_from_checkpoint",
    leave_out="ckpt_path",
    smaller="no `change_budget`",
)


class Fetched(NamedTuple):
    """A batch that Lightning has read, and may not have trained on yet.

    Attributes:
        batch: the batch as it was collated, before it was moved to a device.
        info: its `StepInfo`, taken out since Lightning cannot move a frozen dataclass to a device.
        state: state of the loader after this batch.
        wait_s: seconds that Lightning waited for it.
    """

    batch: Any
    info: StepInfo
    state: dict[str, Any]
    wait_s: float


class End(NamedTuple):
    """The end of an epoch, as the loader has seen it.

    Attributes:
        last: the last batch of the epoch, or None where a resumed epoch had none left.
        state: state of the loader after the end.
    """

    last: Fetched | None
    state: dict[str, Any]


class TrainBatches:
    """Yields the batches of one epoch per `iter()`, and keeps the info and the state of each.

    It has neither `len()` nor `state_dict`: Lightning would take the length for exact, and save the
    state after a batch that it has not trained on.
    """

    def __init__(self, loader: ODBDataLoader) -> None:
        self.loader = loader
        self.start_state: dict[str, Any] | None = None
        """State of the loader before the first batch of the most recent `iter()`."""
        self.end: End | None = None
        """The end of the epoch that has ended most recently."""
        self._waiting: deque[Fetched] = deque()
        self._has_taken = False  # a batch of the most recent `iter()`

    @property
    def has_begun(self) -> bool:
        """Whether a batch was asked for."""
        return self.start_state is not None

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or continue from a loaded state, when the first batch is asked for.

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
        for batch, wait_s in timed(batches):
            last = Fetched(batch, pop_step_info(batch), self.loader.state_dict(), wait_s)
            self._waiting.append(last)
            yield batch
        self.end = End(last, self.loader.state_dict())

    def take(self) -> Fetched:
        """Return the oldest batch that was not taken yet."""
        if not self._waiting:
            raise RuntimeError(
                "Lightning trains on a batch that was not read from `ODBCallback.batches`. Return "
                "that object itself from `train_dataloader`, not inside of another loader, and let "
                "`training_step` take a batch, not a `dataloader_iter`."
            )
        self._has_taken = True
        return self._waiting.popleft()
