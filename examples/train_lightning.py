"""Train a tiny language model with Lightning, in dynamic batches.

    python examples/train_lightning.py             # one epoch, a few minutes on 2 cores
    python examples/train_lightning.py --resume    # go on from the last checkpoint

The metrics of the batches, `odb/*`, go to TensorBoard.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from odb_nodes.integrations.lightning import ODBCallback, ODBDataModule
from tiny_lm import build_model, load_corpus


class LanguageModel(LightningModule):
    """A module as Lightning wants it: nothing in it knows of dynamic batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss over the supervised tokens of the batch."""
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss, batch_size=1)
        self.print(f"step {self.global_step + 1}: loss {loss:.6f}, {len(batch['labels'])} samples")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95))


def main() -> None:
    """Train, and save a checkpoint every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=-1, help="most steps (default: one epoch)")
    parser.add_argument("--save-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", type=Path, default=Path("runs/train_lightning"), help="folder")
    options = parser.parse_args()

    corpus = load_corpus()
    data = ODBDataModule(
        corpus.train,
        token_budget=2048,
        window=256,
        process_fn=corpus.encode,
        num_workers=1,
    )
    saver = ModelCheckpoint(
        options.output / "checkpoints", every_n_train_steps=options.save_every, save_last=True
    )
    trainer = Trainer(
        max_epochs=1,
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        log_every_n_steps=5,
        logger=TensorBoardLogger(options.output, name="logs"),
        callbacks=[ODBCallback(), saver],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), datamodule=data, ckpt_path="last" if options.resume else None)


if __name__ == "__main__":
    main()
