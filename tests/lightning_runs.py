"""Runs of a Lightning `Trainer` with dynamic batches, and what they have trained on."""

import logging
import os
import signal
import warnings
from pathlib import Path

import gradients as g
import rank_jobs as r
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from odb_nodes.integrations.lightning import ODBCallback, ODBDataModule

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

SIZE = 40
RANKS_SIZE = 61


class Module(LightningModule):
    """Notes the batches of every step, and the gradient that the optimizer gets."""

    def __init__(self, dropout=0.0, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.model = g.LanguageModel()
        self.dropout = torch.nn.Dropout(dropout)
        self.seen = []  # per batch: epoch, ids, whether it fills, optimizer steps before
        self.gradients = []  # per optimizer step
        torch.manual_seed(1)  # of the dropout

    def forward(self, input_ids):
        return self.dropout(self.model(input_ids))

    def training_step(self, batch, batch_idx):
        self.note(batch)
        return g.mean_loss(self, batch)

    def note(self, batch):
        (callback,) = (one for one in self.trainer.callbacks if isinstance(one, ODBCallback))
        is_filler = callback.step_info.is_filler
        step = self.trainer.global_step
        self.seen.append([self.current_epoch, batch["id"].tolist(), is_filler, step])

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(g.gradient_of(self.model).clone())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    @property
    def weights(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])

    def groups(self):
        """Per optimizer step: the ids of its batches on this rank, without fillers."""
        steps = {}
        for _, ids, is_filler, step in self.seen:
            steps.setdefault(step, []).extend([] if is_filler else [ids])
        return list(steps.values())


class SaveEverywhere(Callback):
    """Saves at every hook around a batch and an epoch, before other callbacks see it or after."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.paths = []

    def save(self, trainer, place):
        number = len(self.paths)
        path = self.folder / f"{number:03d}-{place}-step{trainer.global_step}.ckpt"
        self.paths.append(str(path))
        trainer.save_checkpoint(path)

    def on_train_start(self, trainer, *_):
        self.save(trainer, "train-start")

    def on_train_epoch_start(self, trainer, *_):
        self.save(trainer, "epoch-start")

    def on_train_batch_start(self, trainer, *_):
        self.save(trainer, "batch-start")

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "batch-end")

    def on_train_epoch_end(self, trainer, *_):
        self.save(trainer, "epoch-end")

    def on_train_end(self, trainer, *_):
        self.save(trainer, "train-end")


def data(size=SIZE, **options):
    given = {"token_budget": 60, "window": 8, "round_size": 4, "timeout_s": 60.0, **options}
    return ODBDataModule(g.samples_of(0, size), **given)


def trainer_of(*callbacks, odb=None, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"accelerator": "cpu", "enable_checkpointing": False, **quiet, **options}
    odb = [ODBCallback()] if odb is None else odb
    return Trainer(callbacks=[*callbacks, *odb], **given)


def fit(
    *callbacks, module=None, checkpoint=None, size=SIZE, odb=None, data_options=None, **options
):
    """Train, and return the module and its trainer."""
    module = module or Module()
    trainer = trainer_of(*callbacks, odb=odb, **options)
    trainer.fit(module, datamodule=data(size, **(data_options or {})), ckpt_path=checkpoint)
    return module, trainer


def check_resumed(whole, trainer, resumed, resumed_trainer, tolerance=1e-12):
    """The rest of a run is what the whole run had from there on."""
    assert resumed_trainer.global_step == trainer.global_step
    rest = whole.seen[len(whole.seen) - len(resumed.seen) :]
    assert resumed.seen == rest
    assert (resumed.weights - whole.weights).abs().max() <= tolerance
    return len(rest)


# --- ranks ----------------------------------------------------------------------------------------


class KillEverywhere(Callback):
    """Kills the process with SIGKILL on all ranks, before an optimizer step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def fit_on_ranks(*callbacks, accumulate, **options):
    given = {"max_epochs": 2, "accumulate_grad_batches": accumulate, **options}
    ranks = {"strategy": "ddp", "devices": 2}
    return fit(*callbacks, size=RANKS_SIZE, **ranks, **given)


def whole_and_resumed(folder, accumulate):
    """Run to the end, saving everywhere, and from many of the places; note the whole run."""
    save = SaveEverywhere(folder)
    whole, trainer = fit_on_ranks(save, accumulate=accumulate)
    for path in save.paths[::6] + save.paths[-2:]:
        resumed, its_trainer = fit_on_ranks(accumulate=accumulate, checkpoint=path)
        check_resumed(whole, trainer, resumed, its_trainer, 1e-9)
    state = {"seen": whole.seen, "weights": whole.weights, "steps": trainer.global_step}
    torch.save(state, Path(folder, f"whole-{dist.get_rank()}.pt"))
    return {"seen": whole.seen, "steps": trainer.global_step}


def gradient_errors_of_ranks(accumulate):
    """Of every optimizer step, against one process that has the batches of all ranks."""
    module, _ = fit_on_ranks(accumulate=accumulate, module=Module(lr=0.0), max_epochs=1)
    one = g.OneProcess([RANKS_SIZE])
    errors = []
    for gradient, own in zip(module.gradients, module.groups(), strict=True):
        groups = [group for of_rank in r.gathered(own) for group in of_rank]
        errors.append(g.relative_error(gradient, one.gradient(groups, "exact")))
    return errors


def run_until_killed(folder, accumulate, step):
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)
    options = {"accumulate": accumulate, "odb": recording(folder), "enable_checkpointing": True}
    fit_on_ranks(saver, KillEverywhere(step), **options)


def recording(folder):
    """A callback with a ledger."""
    return [ODBCallback(ledger=Path(folder, "ledger"))]


def resume_after_kill(folder, accumulate):
    """Go on from the last checkpoint, and compare with what the whole run has noted."""
    path = str(Path(folder, "last.ckpt"))
    odb = recording(folder)
    resumed, trainer = fit_on_ranks(accumulate=accumulate, checkpoint=path, odb=odb)
    whole = torch.load(Path(folder, f"whole-{dist.get_rank()}.pt"), weights_only=True)
    assert trainer.global_step == whole["steps"]
    assert resumed.seen == whole["seen"][len(whole["seen"]) - len(resumed.seen) :]
    assert (resumed.weights - whole["weights"]).abs().max() <= 1e-9
    return resumed.seen[0][3]


def resumed_alone(folder, accumulate):
    """What one rank sees that goes on from the last checkpoint of two."""
    path = str(Path(folder, "last.ckpt"))
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "devices": 1}
    module, _ = fit(checkpoint=path, size=RANKS_SIZE, **options)
    return module.seen
