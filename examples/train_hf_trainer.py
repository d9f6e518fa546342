"""Train a tiny language model with `ODBTrainer`; kill it with SIGKILL, and resume it exactly.

    python examples/train_hf_trainer.py             # one epoch, a few minutes on 2 cores
    python examples/train_hf_trainer.py --steps 12  # a quick look

The documents are tokenized in the workers, so no length is known beforehand. The run is repeated in
a process that kills itself in mid-epoch, and goes on from the `Trainer`'s own checkpoint in
another. Every group and every loss must be that of the uninterrupted run, to the last bit. The
metrics of the batches, `odb/*`, are in `runs/train_hf_trainer/checkpoints/runs` for TensorBoard.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from odb_nodes.integrations.huggingface import ODBConfig, ODBTrainer
from run_log import RunLog, Step
from tiny_lm import build_model
from trainer_runs import Job, main

SEED = 0


class LoggedTrainer(ODBTrainer):
    """Keeps ids, shapes and losses of its batches since `forget`."""

    def forget(self) -> None:
        """Begin anew."""
        self.ids: list[int] = []
        self.batches: list[tuple[int, int, int]] = []
        self.loss = 0.0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Take the ids, which the model does not know, out of the batch."""
        ids = inputs.pop("id").tolist()
        if model.training:
            self.ids += ids
            tokens = int(inputs["attention_mask"].sum())
            self.batches.append((*inputs["input_ids"].shape, tokens))
        return super().compute_loss(model, inputs, *args, **options)

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Add up the loss of the optimizer step."""
        loss: torch.Tensor = super().training_step(*args, **options)
        self.loss += loss.item()
        return loss


class Logger(TrainerCallback):
    """Writes the log of a run; ends the process at a step."""

    def __init__(self, trainer: LoggedTrainer, log: RunLog, kill_at: int | None) -> None:
        self._trainer, self._log, self._kill_at = trainer, log, kill_at
        self._start_s = time.perf_counter()
        trainer.forget()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the step, then perhaps die."""
        seen, seconds = self._trainer, time.perf_counter() - self._start_s
        self._log.add_step(
            Step(ids=seen.ids, batches=seen.batches, loss=seen.loss, seconds=seconds)
        )
        seen.forget()
        if state.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    job: Job,
    phase: str,
    *,
    save_every: int = 0,
    kill_at: int | None = None,
    resume: int | None = None,
) -> None:
    """Train; save checkpoints, die after a step, or go on from the checkpoint of one."""
    torch.set_num_threads(1)
    output = job.output / "checkpoints"
    args = TrainingArguments(
        output_dir=str(output),
        max_steps=job.steps or -1,
        num_train_epochs=1,
        learning_rate=3e-3,
        warmup_steps=4,
        gradient_accumulation_steps=job.accumulate,
        dataloader_num_workers=job.workers,
        remove_unused_columns=False,
        logging_steps=10,
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or 1,
        report_to=["tensorboard"],
        seed=SEED,
        use_cpu=True,
    )
    trainer = LoggedTrainer(
        build_model(seed=SEED, device="cpu"),
        args,
        train_dataset=job.corpus.train,
        odb=ODBConfig(
            token_budget=job.token_budget, window=job.window, process_fn=job.corpus.encode
        ),
    )
    trainer.add_callback(Logger(trainer, RunLog(job.output, phase), kill_at))
    trainer.train(resume_from_checkpoint=f"{output}/checkpoint-{resume}" if resume else None)


if __name__ == "__main__":
    main(train, "train_hf_trainer", __doc__)
