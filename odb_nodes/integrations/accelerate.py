"""Dynamic batches in a training loop of Accelerate.

    loader = configure_accelerator(accelerator, ODBDataLoader(dataset, token_budget=16384))
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        info = pop_step_info(batch)
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss * info.loss_scale)
            optimizer.step()
            optimizer.zero_grad()

The last optimizer step of an epoch, which may be shorter, is taken too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from odb_nodes._core.extras import import_extra
from odb_nodes.errors import StateError
from odb_nodes.integrations.metrics import StepMeter, summarize
from odb_nodes.integrations.resuming import begin_or_resume, load_saved_state
from odb_nodes.loader.checkpoint import save_rank_state
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo, pop_step_info

import_extra("accelerate", "accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.data_loader import DataLoaderStateMixin  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from accelerate.utils import DistributedType, send_to_device  # noqa: E402

__all__ = ["AcceleratedLoader", "configure_accelerator"]

NOT_SAVED = (
    "it was saved before `configure_accelerator` was called, or without it. To begin a run with "
    "its weights, call `load_state` before `configure_accelerator`."
)
CHANGED = (
    "The arguments are those of the `ODBDataLoader`. If the change is meant, then after "
    "`accelerator.load_state(folder)`: `loader.loader.load_state_dict(load_rank_state(folder), "
    "strict=False)`."
)

_configured: WeakSet[Accelerator] = WeakSet()  # those that have a loader


class AcceleratedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """The batches of a loader, on the accelerator's device; made by `configure_accelerator`.

    `accelerator.accumulate` steps where an optimizer step ends, the shorter last one of an epoch
    included. `StepInfo.loss_scale` is times what `accelerator.backward` divides a loss by.
    `accelerator.prepare` leaves it as it is.

    Args:
        accelerator: of the training loop.
        loader: of this rank, with the accelerator's `gradient_accumulation_steps`.
    """

    def __init__(self, accelerator: Accelerator, loader: ODBDataLoader) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self._accelerator = accelerator
        self._estimator = StepMeter()
        self._last: StepInfo | None = None  # of the batch that is out
        self._handles = (
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        )

    @property
    def dataset(self) -> Any:
        """What the samples come from."""
        return self.loader.dataset

    def __len__(self) -> int:
        """Raise, as that of the `ODBDataLoader` does."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one that begins; a loaded state within an epoch wins."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on from a loaded state."""
        it, self._last = begin_or_resume(self.loader, CHANGED), None
        accelerator = self._accelerator
        # Where the last epoch was left within an optimizer step.
        accelerator.step -= accelerator.step % accelerator.gradient_accumulation_steps
        self.begin()
        try:
            while True:
                start_s = time.perf_counter()
                batch = next(it, None)
                if batch is None:
                    self._last = None
                    return
                yield self._prepared(batch, time.perf_counter() - start_s)
        finally:
            self.end()

    def _prepared(self, batch: Any, wait_s: float) -> Any:
        accelerator = self._accelerator
        info = pop_step_info(batch)
        self._estimator.add(batch, info, wait_s)
        self._last = info
        steps = accelerator.gradient_accumulation_steps
        _check_accumulation(steps, self.loader)  # which can be set at any time
        # The accelerator counts to `steps`; this is how it learns that fewer are left.
        self.end_of_dataloader = info.ends_optimizer_step and info.micro_steps < steps
        if accelerator.device_placement:
            batch = send_to_device(batch, accelerator.device)
        batch[STEP_INFO_KEY] = replace(info, loss_scale=info.loss_scale * steps)
        return batch

    def take_metrics(self) -> dict[str, float]:
        """Return `odb/*` of the steps since the last call; see `summarize`.

        All ranks call it at the same step; log the result with `accelerator.log`.
        """
        rows, steps, seconds = self._estimator.take()
        gathered = self._accelerator.gather(rows.to(self._accelerator.device)[None])
        return summarize(gathered.cpu(), steps, seconds)

    def close(self) -> None:
        """Stop workers and threads, and leave the accelerator's checkpoints alone. Idempotent."""
        for handle in self._handles:
            handle.remove()
        _configured.discard(self._accelerator)
        self.loader.close()

    def __enter__(self) -> AcceleratedLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _save(self, _models: Any, _weights: Any, output_dir: str) -> None:
        last = self._last
        if last is not None and not last.ends_optimizer_step:
            raise StateError(
                f"`save_state` must be called between optimizer steps, but step {last.step} is "
                f"micro-step {last.micro_step + 1} of {last.micro_steps}: gradients are not in a "
                "checkpoint. Save where `accelerator.sync_gradients` is True, after the optimizer."
            )
        save_rank_state(self.loader.state_dict(), output_dir)

    def _load(self, _models: Any, input_dir: str) -> None:
        self.loader.load_state_dict(load_saved_state(input_dir, NOT_SAVED))
        self._last = None


def configure_accelerator(accelerator: Accelerator, loader: ODBDataLoader) -> AcceleratedLoader:
    """Return a loader whose batches and checkpoints are those of the accelerator.

    `accelerator.save_state` and `load_state` then include the loader, one file per rank. Only one
    loader of an accelerator can be configured.

    Args:
        accelerator: of the training loop.
        loader: made on every rank after the accelerator, with `accumulate` equal to the
            accelerator's `gradient_accumulation_steps`.

    Raises:
        TypeError, ValueError: an argument is not what is said above.
    """
    if not isinstance(loader, ODBDataLoader):
        raise TypeError(
            f"`loader` must be an `ODBDataLoader`, but is `{type(loader).__name__}` instead. "
            "See `ODBDataLoader.from_dataloader`."
        )
    _check_accumulation(accelerator.gradient_accumulation_steps, loader)
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise ValueError("Megatron-LM makes its own batches, and does not call `backward`.")
    if not accelerator.gradient_state.sync_with_dataloader:
        raise ValueError(
            "`sync_with_dataloader` must be True, but is False: the last optimizer step of an "
            "epoch, which may be shorter, would be merged with the next epoch's first."
        )
    if accelerator in _configured:
        raise ValueError(
            "`accelerator` must have one configured loader, but has one already, whose states "
            "would be lost in its checkpoints. Close that one first."
        )
    _configured.add(accelerator)
    return AcceleratedLoader(accelerator, loader)


def _check_accumulation(steps: int, loader: ODBDataLoader) -> None:
    if loader.accumulate != steps:
        raise ValueError(
            f"`accumulate` of the loader must be the `gradient_accumulation_steps` ({steps}) of "
            f"the accelerator, but is {loader.accumulate} instead."
        )
