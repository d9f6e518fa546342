"""Train a tiny language model with Lightning; kill it with SIGKILL, resume it from `ckpt_path`.

    python examples/train_lightning.py             # one epoch, a few minutes on 2 cores
    python examples/train_lightning.py --steps 12  # a quick look

The run is repeated in a process that kills itself in mid-epoch, and goes on from the checkpoint of
Lightning's own `ModelCheckpoint` in another. Every group and every loss must be that of the
uninterrupted run, to the last bit. The metrics, `odb/*`, are in `runs/train_lightning/logs`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from odb_nodes.integrations.lightning import ODBCallback, ODBDataModule
from run_log import RunLog, Step
from tiny_lm import build_model
from trainer_runs import Job, main


class LanguageModel(LightningModule):
    """As Lightning wants it: nothing in it knows of dynamic batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(seed=0, device="cpu")

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the mean loss over the supervised tokens of the batch."""
        inputs = {key: value for key, value in batch.items() if key != "id"}
        loss: torch.Tensor = self.model(**inputs).loss
        self.log("loss", loss, prog_bar=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95))


class Notes(Callback):
    """Writes the log of a run; kills the process after a step."""

    def __init__(self, odb: ODBCallback, log: RunLog, kill_at: int | None) -> None:
        self._odb, self._log, self._kill_at = odb, log, kill_at
        self._start_s = time.perf_counter()
        self._step = Step(ids=[], batches=[], loss=0.0, seconds=0.0)

    def on_train_batch_end(
        self, trainer: Trainer, _: Any, outputs: Any, batch: Any, *__: Any
    ) -> None:
        """Log the optimizer step that has ended, then perhaps die."""
        info, before = self._odb.step_info, self._step
        shape = (*batch["input_ids"].shape, int(batch["attention_mask"].sum()))
        share = info.local_targets / info.optimizer_targets
        loss = (
            outputs["loss"].item() * trainer.accumulate_grad_batches
        )  # which Lightning divides by
        self._step = Step(
            ids=[*before.ids, *batch["id"].tolist()],
            batches=[*before.batches, shape],
            loss=before.loss + loss * share,
            seconds=time.perf_counter() - self._start_s,
        )
        if not info.ends_optimizer_step:
            return
        self._log.add_step(self._step)
        self._step = Step(ids=[], batches=[], loss=0.0, seconds=0.0)
        if trainer.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    job: Job,
    phase: str,
    *,
    save_every: int = 0,
    kill_at: int | None = None,
    resume: int | None = None,
) -> None:
    """Train; save checkpoints, die after a step, or go on from the last checkpoint."""
    torch.set_num_threads(1)  # fixed: the order of additions decides the last bits of a loss
    odb = ODBCallback()
    saver = ModelCheckpoint(
        job.output / phase, every_n_train_steps=save_every or None, save_last=True
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        max_steps=job.steps or -1,
        accumulate_grad_batches=job.accumulate,
        log_every_n_steps=5,
        logger=TensorBoardLogger(job.output, name="logs", version=phase),
        callbacks=[odb, Notes(odb, RunLog(job.output, phase), kill_at), saver],
        enable_model_summary=False,
    )
    data = ODBDataModule(
        job.corpus.train,
        token_budget=job.token_budget,
        process_fn=job.corpus.encode,
        window=job.window,
        num_workers=job.workers,
    )
    checkpoint = job.output / "killed" / "last.ckpt" if resume else None
    trainer.fit(LanguageModel(), datamodule=data, ckpt_path=checkpoint)


if __name__ == "__main__":
    main(train, "train_lightning", __doc__)
