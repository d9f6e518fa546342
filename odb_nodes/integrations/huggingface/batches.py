"""The batches of a training run, as the `Trainer` iterates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._compat import transformers as compat
from odb_nodes.integrations.huggingface.columns import loader_budget, training_collate
from odb_nodes.integrations.huggingface.lengths import observe_of
from odb_nodes.integrations.resuming import begin_or_resume, changed_arguments_remedy
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.options import LoaderOptions
from odb_nodes.step_info import STEP_INFO_KEY

CHANGED = changed_arguments_remedy(
    names="`accumulate` is `gradient_accumulation_steps`, `seed` is `data_seed` or else `seed`, "
    "the others are those of the `ODBConfig`",
    load="from_pretrained",
    leave_out="resume_from_checkpoint",
    smaller="`change_budget` is a field of the `ODBConfig`",
)


class TrainBatches:
    """Yields the batches of one epoch per `iter()`, and knows how far the run is.

    Epochs are counted here, not by the `Trainer`, whose own count assumes that all have the same
    number of steps. For the same reason there is no `set_epoch`, and `len()` is an error. An
    `iter()` continues an epoch that has not ended.
    """

    def __init__(
        self, loader: ODBDataLoader, samples_per_epoch: int | None, epochs: float | None
    ) -> None:
        self.loader = loader
        self.epoch = 0
        self.samples = 0  # of all ranks, in this epoch
        self.steps = 0  # micro-steps that this process has yielded of this epoch
        self.samples_seen = 0  # of all ranks, in all epochs of this process
        self.samples_per_epoch = samples_per_epoch
        self._epochs = epochs
        self._it: Iterator[Any] | None = None

    @property
    def dataset(self) -> Any:
        """The dataset of the loader."""
        return self.loader.dataset

    @property
    def progress(self) -> float:
        """Epochs done, with the share of this one; whole epochs only where it has no length."""
        if self.samples_per_epoch is None:
            return float(self.epoch)
        return self.epoch + self.samples / self.samples_per_epoch

    @property
    def is_done(self) -> bool:
        """Whether the run has had all its epochs."""
        return self._epochs is not None and self.progress >= self._epochs

    @property
    def share_done(self) -> float:
        """Share of the run that is done, 0.0 to 1.0; always 0.0 where the run has no end."""
        return 0.0 if self._epochs is None else min(1.0, self.progress / self._epochs)

    def __len__(self) -> int:
        """Raise the `TypeError` of `ODBDataLoader.__len__`."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Continue the epoch, or begin the next one."""
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
            # An epoch is empty where the checkpoint was written after its last step. The `Trainer`
            # would end the run at an empty epoch: go on with the next one.
            self._begin_epoch(self.epoch + 1)

    def abandon_epoch(self) -> None:
        """Make the next `iter()` begin an epoch, where this one has not ended."""
        if self._it is not None:
            self._begin_epoch(self.epoch + 1)
            self.loader.set_epoch(self.epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.samples, self.steps, self._it = epoch, 0, 0, None

    def go_to(
        self, epoch: int, samples: int, loader: dict[str, Any], *, change_budget: bool
    ) -> None:
        """Make the next `iter()` continue from a position."""
        self.loader.load_state_dict(loader, change_budget=change_budget)
        self._begin_epoch(epoch)
        self.samples = samples


def make_batches(trainer: Any) -> TrainBatches:
    """Return the batches of a run, from its beginning."""
    args, dataset = trainer.args, given_dataset(trainer)
    if trainer.odb_budget is None:
        raise ValueError(
            '`token_budget` is "auto", and no budget is found yet: `train` finds it. Call this '
            "during `train`, or give a number of tokens."
        )
    loader = ODBDataLoader(dataset, **vars(loader_options(trainer)))
    loader.trust_labels()
    # The length of a dict is its number of datasets; that of a node is of one rank.
    is_counted = isinstance(dataset, Sized) and not isinstance(dataset, (Mapping, BaseNode))
    samples = len(dataset) if is_counted else None
    return TrainBatches(loader, samples, args.num_train_epochs if args.max_steps <= 0 else None)


def given_dataset(trainer: Any) -> Any:
    """Return the dataset to train on."""
    if trainer.train_dataset is None:
        raise ValueError("`train_dataset` must be given to train, but is None.")
    return trainer.train_dataset


def loader_options(trainer: Any) -> LoaderOptions:
    """Return the options of the loader: the config's, and what the `Trainer` decides."""
    config, args = trainer.odb, trainer.args
    options: LoaderOptions = config.loader_options(
        token_budget=loader_budget(trainer),
        collate_fn=training_collate(trainer),
        observe=observe_of(trainer),
        shuffle=None if compat.sampling_strategy(args) == "random" else False,
        seed=int(args.seed if args.data_seed is None else args.data_seed),
        num_workers=args.dataloader_num_workers if config.workers is None else 0,
        pin_memory=args.dataloader_pin_memory,
        accumulate=args.gradient_accumulation_steps,
    )
    return options
