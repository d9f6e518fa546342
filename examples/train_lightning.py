"""Train a tiny language model with Lightning; kill it with SIGKILL, resume it from `ckpt_path`.

    python examples/train_lightning.py             # one epoch, a few minutes on 2 cores
    python examples/train_lightning.py --steps 12  # a quick look

The run is repeated in a process that kills itself in mid-epoch, and goes on from the checkpoint of
Lightning's own `ModelCheckpoint` in another. Every group and every loss must be that of the
uninterrupted run, to the last bit. The metrics, `odb/*`, are in `runs/train_lightning/logs`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from odb_nodes.integrations.lightning import ODBCallback, ODBDataModule
from options import at_least
from processes import FEWEST_STEPS, plan_kill, run_in_process
from run_log import RunLog, Step, compare, read_log
from tiny_lm import Corpus, build_model, load_corpus

OUTPUT = Path("runs", "train_lightning")


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
    """Writes the log of a run; kills the process at a step."""

    def __init__(self, log: RunLog, kill_at: int | None) -> None:
        self._log, self._kill_at = log, kill_at
        self._start_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, _: Any, outputs: Any, batch: Any, *__: Any
    ) -> None:
        """Log the step, then perhaps die."""
        batches = [(*batch["input_ids"].shape, int(batch["attention_mask"].sum()))]
        ids, loss = batch["id"].tolist(), outputs["loss"].item()
        seconds = time.perf_counter() - self._start_s
        self._log.add_step(Step(ids=ids, batches=batches, loss=loss, seconds=seconds))
        if trainer.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(options: argparse.Namespace, corpus: Corpus, phase: str, **run: Any) -> None:
    """Train; save every `save_every` steps, die at `kill_at`, or go on from the last checkpoint."""
    torch.set_num_threads(1)  # fixed: the order of additions decides the last bits of a loss
    saver = ModelCheckpoint(
        OUTPUT / phase, every_n_train_steps=run.get("save_every"), save_last=True
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        max_steps=options.steps or -1,
        log_every_n_steps=5,
        logger=TensorBoardLogger(OUTPUT, name="logs", version=phase),
        callbacks=[ODBCallback(), Notes(RunLog(OUTPUT, phase), run.get("kill_at")), saver],
        enable_model_summary=False,
    )
    given: dict[str, Any] = {"process_fn": corpus.encode, "window": 256, "num_workers": 1}
    data = ODBDataModule(corpus.train, token_budget=options.token_budget, **given)
    checkpoint = OUTPUT / "killed" / "last.ckpt" if run.get("resume") else None
    trainer.fit(LanguageModel(), datamodule=data, ckpt_path=checkpoint)


def main() -> None:
    """Train, be killed, resume, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--steps", type=at_least(FEWEST_STEPS), help="most optimizer steps (default: one epoch)")
    add("--token-budget", type=at_least(1024), default=2048, help="tokens of a batch (%(default)s)")
    options, corpus = parser.parse_args(), load_corpus()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)

    def run(phase: str, exit_code: int = 0, **given: Any) -> list[Step]:
        run_in_process(phase, exit_code, train, options, corpus, phase, limit_s=1800.0, **given)
        return read_log(OUTPUT, phase)[0]

    whole = run("uninterrupted")
    plan = plan_kill(len(whole))
    killed = run("killed", -signal.SIGKILL, save_every=plan.save_every, kill_at=plan.kill_at)
    resumed = run("resumed", resume=True)
    verdict = compare(whole[: plan.kill_at] + whole[plan.saved :], killed + resumed, exact=True)
    print(f"\nKilled after step {plan.kill_at}, resumed at step {plan.saved}: {verdict}.")


if __name__ == "__main__":
    main()
