"""What a `Trainer` must be told beside its own arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from odb_nodes._core.checks import check_bool, check_count
from odb_nodes.collate.protocol import Collate
from odb_nodes.integrations.learning_rate import LrScaling
from odb_nodes.planning import TokenBudget
from odb_nodes.processing import WorkerOptions
from odb_nodes.sample import Observe


@dataclass(frozen=True, kw_only=True)
class ODBConfig:
    """Dynamic batches of a `Trainer`. Dataset, collator, seed and workers come from the `Trainer`.

    Args:
        token_budget: padded tokens of a batch on one rank, or a `TokenBudget`. Takes the place of
            `per_device_train_batch_size`, which is not used.
        window: samples waiting in the pool to be grouped.
        collate_fn: for training, in place of the trainer's `data_collator`, which evaluation uses.
        process_fn, observe, state, workers, prefetch, round_size, timeout_s: see `ODBDataLoader`.
        uneven: `"fill"` or `"stop"`; see `RankAligner`. A `Trainer` has no `Join`.
        shift_labels: the model predicts `labels[..., 1:]`, so the first one is no target. Default:
            what the loss of the model does; True where nothing is known of it.
        steps_per_epoch: optimizer steps of an epoch, about. With `num_train_epochs` the learning
            rate, the progress bar and the arguments that are shares of the whole need it. Default:
            estimated from the lengths of `estimate_samples` samples.
        estimate_samples: how many samples the estimate looks at.
        schedule: what the learning-rate schedule follows: `"steps"`, or `"samples"`, so that it
            ends with the last sample of the last epoch whatever the estimate was.
        lr_scaling: of the learning rate by the samples of a step. Default: none.
        log_metrics: log `odb/*` beside the loss.

    Raises:
        TypeError, ValueError: a field is not what is said above.
    """

    token_budget: int | TokenBudget
    window: int = 1024
    collate_fn: Collate | None = None
    process_fn: Callable[[Any], Any] | None = None
    observe: Observe | None = None
    uneven: Literal["fill", "stop"] = "fill"
    state: Literal["replay", "payload"] = "replay"
    workers: WorkerOptions | None = None
    prefetch: int = 4
    round_size: int = 32
    timeout_s: float = 1800.0
    shift_labels: bool | None = None
    steps_per_epoch: int | None = None
    estimate_samples: int = 512
    schedule: Literal["steps", "samples"] = "steps"
    lr_scaling: LrScaling | None = None
    log_metrics: bool = True

    def __post_init__(self) -> None:
        TokenBudget.of(self.token_budget, "token_budget")
        check_count("window", self.window)
        check_count("estimate_samples", self.estimate_samples)
        check_bool("log_metrics", self.log_metrics)
        if self.steps_per_epoch is not None:
            check_count("steps_per_epoch", self.steps_per_epoch)
        if self.uneven not in ("fill", "stop"):
            raise ValueError(
                f'`uneven` must be "fill" or "stop" under a `Trainer`, but is {self.uneven!r} '
                'instead: "join" needs a loop of your own.'
            )
        if self.schedule not in ("steps", "samples"):
            raise ValueError(
                f'`schedule` must be "steps" or "samples", but is {self.schedule!r} instead.'
            )
        if self.lr_scaling is not None and not isinstance(self.lr_scaling, LrScaling):
            raise TypeError(
                f"`lr_scaling` must be `LrScaling` or None, but is {self.lr_scaling!r} instead."
            )
