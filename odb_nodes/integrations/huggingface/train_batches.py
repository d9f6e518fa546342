"""The batches of a whole training run, as the `Trainer` iterates them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from odb_nodes.integrations.resuming import begin_or_resume
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.step_info import STEP_INFO_KEY

CHANGED = (
    "Under a `Trainer` there is no `strict=False`: resume with the arguments and data that the run "
    "was saved with (`accumulate` is `gradient_accumulation_steps`, `seed` is `data_seed` or else "
    "`seed`, the others are of the `ODBConfig`), or begin a run with its weights: load them with "
    "`from_pretrained`, and leave out `resume_from_checkpoint`."
)


class TrainBatches:
    """Yields the batches of an epoch per `iter()`, and knows how far the run is.

    Epochs are counted here, not by the `Trainer`, whose own count assumes that all have the same
    number of steps. For the same reason there is no `set_epoch`, and a length is an error. An
    `iter()` goes on with an epoch that has not ended.

    Args:
        loader: of this rank.
        samples_per_epoch: of all ranks, where known.
        epochs: after which the run ends; may be a fraction. `None` for no end.
    """

    EPOCH_KEY = "epoch"
    SAMPLES_KEY = "samples"
    LOADER_KEY = "loader"

    def __init__(
        self, loader: ODBDataLoader, samples_per_epoch: int | None, epochs: float | None
    ) -> None:
        self.loader = loader
        self.epoch = 0
        self.samples = 0  # of all ranks, in this epoch
        self.steps = 0  # micro-steps of this epoch, once one was taken
        self.samples_seen = 0  # the same, by this process
        self.samples_per_epoch = samples_per_epoch
        self._epochs = epochs
        self._it: Iterator[Any] | None = None

    @property
    def dataset(self) -> Any:
        """What the samples come from."""
        return self.loader.dataset

    @property
    def progress(self) -> float:
        """Epochs done, with the share of this one. Without a length, full epochs only."""
        if self.samples_per_epoch is None:
            return float(self.epoch)
        return self.epoch + self.samples / self.samples_per_epoch

    @property
    def is_done(self) -> bool:
        """Whether the run has had all its epochs."""
        return self._epochs is not None and self.progress >= self._epochs

    @property
    def share_done(self) -> float:
        """Of all epochs, 0.0 to 1.0; 0.0 where there is no end."""
        return 0.0 if self._epochs is None else min(1.0, self.progress / self._epochs)

    def __len__(self) -> int:
        """Raise, as that of the `ODBDataLoader` does."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Go on with the epoch, or begin the next one."""
        is_empty = True
        while is_empty and not self.is_done:
            if self._it is None:
                self._it = begin_or_resume(self.loader, CHANGED)
            for batch in self._it:
                is_empty = False
                info = batch[STEP_INFO_KEY]
                samples, self.steps = info.all_samples_this_step, info.step + 1
                self.samples += samples
                self.samples_seen += samples
                yield batch
            # Empty: a checkpoint from after the last step. The `Trainer` would end there.
            self._begin_epoch(self.epoch + 1)

    def abandon_epoch(self) -> None:
        """Make the next `iter()` begin an epoch, where this one has not ended."""
        if self._it is not None:
            self._begin_epoch(self.epoch + 1)
            self.loader.set_epoch(self.epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.samples, self.steps, self._it = epoch, 0, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands."""
        return {
            self.LOADER_KEY: self.loader.state_dict(),
            self.EPOCH_KEY: self.epoch,
            self.SAMPLES_KEY: self.samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next `iter()` go on from a state."""
        self.loader.load_state_dict(state[self.LOADER_KEY])
        self.epoch, self.samples = state[self.EPOCH_KEY], state[self.SAMPLES_KEY]
        self._it = None
