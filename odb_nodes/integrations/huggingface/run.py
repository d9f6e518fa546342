"""What belongs to one call of `Trainer.train`: its batches, losses and metrics."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from accelerate.utils import send_to_device

from odb_nodes.integrations.huggingface.loss import (
    MicroStep,
    Normalizer,
    count_targets,
    find_normalizer,
    give_targets,
)
from odb_nodes.integrations.huggingface.train_batches import TrainBatches
from odb_nodes.integrations.metrics import StepMeter, summarize
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo, pop_step_info

Batch = dict[str, Any]

NO_BOUND = 2**40  # steps
MOST_OF_AN_EPOCH = 0.999  # what may be shown before its end is seen
ESTIMATE_SLACK = 0.05  # of the steps, where estimates are as far off as usual
MADE_OF = ("num_train_epochs", "gradient_accumulation_steps", "seed", "data_seed")


class Run:
    """Takes the batches of an optimizer step out of the loader and settles what each weighs.

    Args:
        trainer: whose run it is.
        batches: of the run.
        steps_per_epoch: optimizer steps, about; `None` where `max_steps` ends the run.
        columns: keys that a batch may have; `None` for all.
        shift: the first label of a row is no target.
    """

    BATCHES_KEY = "batches"
    STEPS_KEY = "steps_per_epoch"

    def __init__(
        self,
        trainer: Any,
        batches: TrainBatches,
        *,
        steps_per_epoch: int | None,
        columns: set[str] | None,
        shift: bool,
    ) -> None:
        self._trainer = trainer
        self.batches = batches
        self._steps_per_epoch = steps_per_epoch
        self._columns = columns
        self._shift = shift
        self._arguments = self._present_arguments()
        self.normalizer = Normalizer.UNKNOWN
        self.meter = StepMeter()
        self.waiting: deque[MicroStep] = deque()
        self.active: MicroStep | None = None
        self.optimizer_samples = 0
        self._is_warned = False
        self._tells_items = False

    @property
    def ends_by_epochs(self) -> bool:
        """Whether epochs end the run, and not `max_steps`."""
        return self._steps_per_epoch is not None

    @property
    def epoch(self) -> float:
        """Epochs done, with the share of this one: of its samples, or about that of its steps."""
        batches, steps = self.batches, self._steps_per_epoch
        progress: float = batches.progress
        if batches.samples_per_epoch is not None or steps is None:
            return progress
        share: float = batches.steps / (steps * self._trainer.args.gradient_accumulation_steps)
        return progress + min(share, MOST_OF_AN_EPOCH)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run: exact with `max_steps`, else about."""
        args = self._trainer.args
        if self._steps_per_epoch is None:
            return int(args.max_steps)
        steps: int = math.ceil(self._steps_per_epoch * args.num_train_epochs)
        return steps

    @property
    def most_steps(self) -> int:
        """What no run exceeds: an optimizer step has at least one sample."""
        if self._steps_per_epoch is None:
            return self.total_steps
        samples = self.batches.samples_per_epoch
        if samples is None:
            return NO_BOUND
        epochs: int = math.ceil(self._trainer.args.num_train_epochs)
        return max(self.total_steps, epochs * samples) + 1

    def check_estimate(self, steps: int, *, ends: bool) -> None:
        """Warn, once, where a learning rate that goes by steps does not end with the run.

        Args:
            steps: optimizer steps, with the one that begins.
            ends: there are no more.
        """
        total, slack = self.total_steps, 1 + ESTIMATE_SLACK * self.total_steps
        is_off = steps > total + slack or (ends and steps < total - slack)
        if self._trainer.odb.schedule == "samples" or not is_off or self._is_warned:
            return
        self._is_warned = True
        if self._trainer.args.process_index:
            return
        remedies = ['`schedule="samples"`'] * (self.batches.samples_per_epoch is not None)
        warnings.warn(
            f"the run {'ends after' if ends else 'goes on after'} {steps} optimizer steps, but its "
            f"learning-rate schedule was made for {total}, by `steps_per_epoch`, or by the "
            "estimate where that is not given. For the next run, give "
            f"{' or '.join([*remedies, 'another `steps_per_epoch`'])}.",
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands on this rank. Between optimizer steps only."""
        return {self.BATCHES_KEY: self.batches.state_dict(), self.STEPS_KEY: self._steps_per_epoch}

    def check_arguments(self) -> None:
        """Refuse a hyperparameter search over what the run was made of, before it set that.

        Raises:
            ValueError: names the argument.
        """
        for name, value in self._present_arguments().items():
            if value != self._arguments[name]:
                raise ValueError(
                    f"`{name}` must stay as it was when `train` was called "
                    f"({self._arguments[name]}), but is {value} now. A hyperparameter search "
                    "cannot have it in its space: make a trainer for each value."
                )

    def _present_arguments(self) -> dict[str, Any]:
        return {name: getattr(self._trainer.args, name) for name in MADE_OF}

    # --- an optimizer step --------------------------------------------------------------------

    def take(self, batches: Iterator[Any], count: int) -> tuple[list[Batch], torch.Tensor | None]:
        """Return the batches of an optimizer step, and what their loss is to be divided by.

        Args:
            batches: of the epoch.
            count: how many the `Trainer` wants; the last optimizer step of an epoch may have less,
                and is filled up, since the `Trainer` would not step there.
        """
        start_s = time.perf_counter()
        taken = list(islice(batches, count))
        if not taken:
            return [], None
        wait_s = (time.perf_counter() - start_s) / count
        if not all(STEP_INFO_KEY in batch for batch in taken):
            raise ValueError(
                f"`get_train_dataloader` of `{type(self._trainer).__name__}` must return what that "
                "of `ODBTrainerMixin` does, but returned other batches. Do not override it: give "
                "`train_dataset`, `data_collator` and `ODBConfig.process_fn`."
            )
        infos = [pop_step_info(batch) for batch in taken]
        self.optimizer_samples = infos[0].optimizer_samples
        kept = [self._without_columns(batch) for batch in taken]
        while len(kept) < count:
            kept.append(dict(kept[-1]))
            infos.append(_repeated(infos[-1]))
        if self._trainer.odb.log_metrics:
            for batch, info in zip(kept, infos, strict=True):
                self.meter.add(batch, info, wait_s)
        kept, items = self._weigh(kept, infos)
        self._tells_items = items is not None
        return kept, items

    @contextmanager
    def computing(self, num_items_in_batch: Any) -> Iterator[None]:
        """Make the next batch of an optimizer step the active one.

        Raises:
            ValueError: its loss would be normalised twice, or was not weighed.
        """
        if (num_items_in_batch is not None) != self._tells_items:
            raise ValueError(
                f"`num_items_in_batch` must be as `get_batch_samples` returned it, but is "
                f"{num_items_in_batch!r} now: the loss would be normalised "
                f"{'not at all' if self._tells_items else 'twice'}. A subclass overrides "
                "`get_batch_samples` or `training_step`: pass on what it returned."
            )
        self.active = micro_step = self.waiting.popleft()
        try:
            yield
        finally:
            self.active = None
        if not micro_step.is_scaled:
            raise ValueError(
                "`compute_loss` must call that of `ODBTrainerMixin`, which weighs the loss, but "
                f"`{type(self._trainer).__name__}` overrides it. Call `super().compute_loss`, or "
                "give dynamic batches to a `Trainer` that has it: `configure_trainer`."
            )

    def _without_columns(self, batch: Any) -> Batch:
        columns = self._columns
        return {key: batch[key] for key in batch if columns is None or key in columns}

    def _weigh(
        self, batches: list[Batch], infos: list[StepInfo]
    ) -> tuple[list[Batch], torch.Tensor | None]:
        """Note the factor of each batch, and return what the `Trainer` is to divide by."""
        counts = [count_targets(batch, shift=self._shift) for batch in batches]
        if None in counts:  # The model has its own idea of targets: those of the samples, here.
            self._note(infos, [info.loss_scale for info in infos], is_told=False)
            return batches, None
        known = [
            0 if info.is_filler else count or 0 for count, info in zip(counts, infos, strict=True)
        ]
        accelerator = self._trainer.accelerator
        ranks = accelerator.num_processes
        of_ranks = accelerator.gather(torch.tensor([known], device=self._trainer.args.device))
        total = of_ranks.sum()
        if self.normalizer is Normalizer.UNKNOWN:
            self._find_normalizer(batches, of_ranks)
        if self.normalizer is Normalizer.TRAINER:
            self._note(infos, [1.0] * len(infos), is_told=True)
            average = getattr(self._trainer.args, "average_tokens_across_devices", False)
            # Without it, the `Trainer` takes the mean over ranks of what each divides.
            return batches, total.clamp(min=1) / (1 if average else ranks)
        targets = max(1, int(total))
        self._note(infos, [ranks * count / targets for count in known], is_told=False)
        for batch, count in zip(batches, counts, strict=True):
            if not count:
                give_targets(batch)
        return batches, None

    def _note(self, infos: list[StepInfo], factors: list[float], *, is_told: bool) -> None:
        """Note the factor of each batch, times what the `Trainer` will divide its loss by.

        Args:
            infos: of the batches.
            factors: of theirs.
            is_told: the `Trainer` is told what to divide by.
        """
        trainer = self._trainer
        is_divided = not is_told and trainer.compute_loss_func is None
        if (said := getattr(trainer, "loss_is_scaled_for_ga", None)) is not None:
            is_divided = not said
        divisor = trainer.args.gradient_accumulation_steps if is_divided else 1
        self.waiting = deque(
            MicroStep(info=info, factor=0.0 if info.is_filler else factor * divisor)
            for info, factor in zip(infos, factors, strict=True)
        )

    # --- the normalisation of the loss --------------------------------------------------------

    def _find_normalizer(self, batches: list[Batch], of_ranks: torch.Tensor) -> None:
        """Settle, on all ranks alike, who normalises the loss.

        Args:
            batches: of an optimizer step.
            of_ranks: (R, S) int64, supervised tokens of each rank and micro-step.

        Raises:
            ValueError: the loss is neither a mean nor divided by `num_items_in_batch`.
        """
        trainer = self._trainer
        if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
            self.normalizer = Normalizer.OURS
            return
        # All ranks compute, and the same micro-step: sharded models wait for each other, and only
        # the batches of one step agree on whether they have images.
        with_targets = (of_ranks > 0).sum(dim=0).tolist()
        if not any(with_targets):
            return
        index = with_targets.index(max(with_targets))
        targets = int(of_ranks[trainer.accelerator.process_index, index])
        found = find_normalizer(
            self._loss, batches[index], targets=max(1, targets), shift=self._shift
        )
        if not targets:
            found = Normalizer.UNKNOWN
        said = torch.tensor([int(found)], device=trainer.args.device)
        self.normalizer = Normalizer(int(trainer.accelerator.gather(said).max()))
        if self.normalizer is Normalizer.NEITHER:
            name = "compute_loss_func" if trainer.compute_loss_func is not None else "model"
            raise ValueError(
                f"the loss of `{name}` must be a mean over targets, or their sum divided by "
                "`num_items_in_batch`, but is neither: told two and four times as many items, or "
                "given a sample twice, it does not become what those would. It is scaled twice, or "
                "not at all. Divide by `num_items_in_batch`, and by nothing else."
            )

    def _loss(self, batch: Mapping[str, Any], items: int) -> float:
        """Return the loss of a batch, and leave the generators alone."""
        trainer = self._trainer
        trainer.model_wrapped.eval()
        device = trainer.args.device
        inputs, told = send_to_device(dict(batch), device), torch.tensor(items, device=device)
        generators = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(generators):
            loss = trainer.compute_loss(trainer.model_wrapped, inputs, num_items_in_batch=told)
            return float(loss)

    # --- metrics ------------------------------------------------------------------------------

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call. All ranks call it together."""
        if not len(self.meter):
            return {}
        rows, steps, seconds = self.meter.take()
        gathered = self._trainer.accelerator.gather(rows.to(self._trainer.args.device)[None])
        return summarize(gathered.cpu(), steps, seconds)


def _repeated(info: StepInfo) -> StepInfo:
    """Return what is to be known of a batch that comes once more, after its optimizer step."""
    return replace(
        info, is_filler=True, local_samples=0, local_targets=0, micro_step=info.micro_step + 1
    )
