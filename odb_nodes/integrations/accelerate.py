"""Dynamic batches in a training loop of Accelerate.

    loader = configure_accelerator(accelerator, ODBDataLoader(dataset, token_budget=16384))
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        info = pop_step_info(batch)
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss * info.loss_scale)
            optimizer.step()
            optimizer.zero_grad()

The optimizer also steps at the end of an epoch, which may have fewer micro-steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from odb_nodes._compat import accelerate as compat
from odb_nodes._support.checks import check_type, import_extra
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.step_info import STEP_INFO_KEY, StepInfo, pop_step_info
from odb_nodes.errors import StateError
from odb_nodes.integrations.recording import StepRecorder
from odb_nodes.integrations.resuming import begin_or_resume, load_saved_states
from odb_nodes.training.checkpoints.rank_states import load_rank_state, save_rank_state
from odb_nodes.training.checkpoints.resharding import reshard
from odb_nodes.training.monitor import Monitor, timed

import_extra("accelerate", "accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from accelerate.utils import send_to_device  # noqa: E402

__all__ = ["AcceleratedLoader", "configure_accelerator"]

MONITOR = "odb_nodes-monitor"  # folder in a checkpoint
NOT_SAVED = (
    "it was saved before `configure_accelerator` was called, or without it. To begin a run with "
    "the weights of that checkpoint, call `load_state` before `configure_accelerator`."
)
CHANGED = (
    "The arguments belong to the `ODBDataLoader`. If the change is intended, call after "
    "`accelerator.load_state(folder)`: `loader.loader.load_state_dict(load_rank_state(folder), "
    "strict=False)`; for a smaller budget alone, with `change_budget=True`."
)

_configured: WeakSet[Accelerator] = WeakSet()  # accelerators that have a loader


class AcceleratedLoader(compat.loader_base()):  # type: ignore[misc]
    """Yields the batches of a loader on the accelerator's device; made by `configure_accelerator`.

    `accelerator.accumulate` steps the optimizer where the loader ends an optimizer step, also at
    the end of an epoch. `StepInfo.loss_scale` undoes the division in `accelerator.backward`.
    `accelerator.prepare` returns this loader unchanged.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        loader: ODBDataLoader,
        recorder: StepRecorder,
        monitor: Monitor | None,
    ) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self._accelerator = accelerator
        self._last: StepInfo | None = None  # the last batch's
        self._recorder = recorder
        self._monitor = monitor  # not the recorder's: the training loop calls its `step`
        if monitor is not None:
            monitor.attach(loader)
        self._unrecorded: StepInfo | None = None  # the last batch's, until it is recorded
        self._handles = (
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        )

    @property
    def dataset(self) -> Any:
        """The dataset of the `ODBDataLoader`."""
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        """Begin with `epoch` next, from 0; a loaded state within that epoch continues there."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or continue from a loaded state."""
        self._record()  # The loop may have left the last epoch early.
        batches = begin_or_resume(self.loader, CHANGED)
        self._last = None
        compat.drop_partial_step(self._accelerator)
        self.begin()
        if self._monitor is not None:
            self._monitor.start_clock()
        try:
            for batch, wait_s in timed(batches):
                yield self._prepared(batch, wait_s)
                self._record()
            self._last = None
        finally:
            self.end()

    def _prepared(self, batch: Any, wait_s: float) -> Any:
        accelerator = self._accelerator
        info = pop_step_info(batch)
        self._recorder.meter.add(batch, info, wait_s)
        if self._monitor is not None:
            self._monitor.add_wait(wait_s)
        self._last = self._unrecorded = info
        steps = accelerator.gradient_accumulation_steps
        _check_accumulation(steps, self.loader)  # Users can set it at any time.
        # The accelerator counts to `steps`: tell it where fewer micro-steps end an optimizer step.
        self.end_of_dataloader = info.ends_optimizer_step and info.micro_steps < steps
        if accelerator.device_placement:
            batch = send_to_device(batch, accelerator.device)
        batch[STEP_INFO_KEY] = replace(info, loss_scale=info.loss_scale * steps)
        return batch

    def take_metrics(self) -> dict[str, float]:
        """Return `odb/*` of the steps since the last call; see `summarize`.

        All ranks call it at the same step. Log the result with `accelerator.log`. It is empty if
        this loader has yielded no batch since then, as when an `OomGuard` takes the batches.
        """
        return self._recorder.take_metrics(self._accelerator.gather, self._accelerator.device)

    def close(self) -> None:
        """Stop workers and threads, and unregister from the accelerator's checkpoints. Idempotent.

        All ranks must call it, so that the monitor can write the last record.
        """
        if self._monitor is not None:
            self._monitor.close()
        for handle in self._handles:
            handle.remove()
        self._record()
        self._recorder.close()
        _configured.discard(self._accelerator)
        self.loader.close()

    def __enter__(self) -> AcceleratedLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._unrecorded = None  # A step that failed is not done.
            if self._monitor is not None:
                self._monitor.close(write=False)
            self._recorder.close(ended=False)
        self.close()

    def _save(self, _models: Any, _weights: Any, output_dir: str) -> None:
        last = self._last
        if last is not None and not last.ends_optimizer_step:
            raise StateError(
                f"`save_state` must be called between optimizer steps, but step {last.step} is "
                f"micro-step {last.micro_step + 1} of {last.micro_steps}, and a checkpoint holds "
                "no gradients. Save where `accelerator.sync_gradients` is True, after the "
                "optimizer step."
            )
        self._record()
        self._recorder.save()
        save_rank_state(self.loader.state_dict(), output_dir)
        if self._monitor is not None:
            if last is not None and self._monitor.last_step != (last.epoch, last.step):
                raise StateError(
                    f"`monitor.step` must be called for step {last.step} of epoch {last.epoch} "
                    "before `save_state`, which would lose it otherwise. Call it right after the "
                    "optimizer step."
                )
            save_rank_state(self._monitor.state_dict(), Path(output_dir) / MONITOR)

    def _load(self, _models: Any, input_dir: str) -> None:
        rank, world_size = self._accelerator.process_index, self._accelerator.num_processes
        states, is_own = load_saved_states(input_dir, rank, world_size, NOT_SAVED)
        self.loader.load_state_dict(states[0] if is_own else reshard(states, world_size)[rank])
        self._last = self._unrecorded = None
        self._recorder.begin_attempt()
        saved = Path(input_dir) / MONITOR
        if self._monitor is not None and saved.is_dir() and is_own:
            self._monitor.load_state_dict(load_rank_state(saved))
        elif self._monitor is not None:
            self._monitor.reset(-(-self.loader.step // self.loader.accumulate))

    def _record(self) -> None:
        """Write the step of the last batch into the ledger: the loop has finished it."""
        info, self._unrecorded = self._unrecorded, None
        if info is not None:
            self._recorder.record([({}, info, 0.0)], meter=False)


def configure_accelerator(
    accelerator: Accelerator,
    loader: ODBDataLoader,
    ledger: str | os.PathLike[str] | None = None,
    monitor: Monitor | None = None,
) -> AcceleratedLoader:
    """Return a loader for the training loop, and include its state in the checkpoints.

    `accelerator.save_state` and `load_state` then save and load the loader, one file per rank. An
    accelerator can have one configured loader at a time.

    Args:
        accelerator: the accelerator of the training loop.
        loader: an `ODBDataLoader` that every rank has made after the accelerator, with
            `accumulate` equal to the accelerator's `gradient_accumulation_steps`.
        ledger: the folder of a `Ledger` of the trained samples. A step is recorded when the loop
            takes the next batch, saves a checkpoint, or closes the loader. Default: no ledger.
        monitor: a `Monitor` of the run, which the checkpoints resume and the loader closes, and
            which also gets the waiting times. Call its `step` for each batch, before `save_state`.
            Default: no monitor.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """
    check_type("loader", loader, ODBDataLoader, "See `ODBDataLoader.from_dataloader`.")
    check_type("monitor", monitor, Monitor | None)
    _check_accumulation(accelerator.gradient_accumulation_steps, loader)
    if not compat.backward_divides(accelerator):
        raise ValueError(
            "`accelerator` must not use Megatron-LM, which makes its own batches and does not "
            "call `backward`."
        )
    if not compat.steps_at_epoch_end(accelerator):
        raise ValueError(
            "`sync_with_dataloader` must be True, but is False: the last optimizer step of an "
            "epoch, which may be shorter, would be merged with the first of the next epoch."
        )
    if accelerator in _configured:
        raise ValueError(
            "`accelerator` must have one configured loader, but has one already, whose state "
            "would be missing in its checkpoints. Close that one first."
        )
    rank, world_size = accelerator.process_index, accelerator.num_processes
    recorder = StepRecorder(ledger, rank=rank, world_size=world_size)
    _configured.add(accelerator)
    return AcceleratedLoader(accelerator, loader, recorder, monitor)


def _check_accumulation(steps: int, loader: ODBDataLoader) -> None:
    if loader.accumulate != steps:
        raise ValueError(
            f"`accumulate` of the loader must be the `gradient_accumulation_steps` ({steps}) of "
            f"the accelerator, but is {loader.accumulate} instead."
        )
