"""Training jobs under a `Trainer`: what their programs run, on each rank."""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import language_models
import torch
import torch.distributed as dist
import transformers
from language_models import (
    LR,
    Texts,
    append,
    gradient_of,
    rank_and_size,
    read,
    weights_of,
)
from transformers import Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments

from odb_nodes.integrations.huggingface import ODBConfig, ODBTrainer

BEFORE_5 = int(transformers.__version__.split(".")[0]) < 5


class Recorder(TrainerCallback):
    """Notes for each optimizer step the ids of this rank, weights before, rate, and gradient."""

    def __init__(self, trainer, path, kill_at=None):
        self.trainer, self.path, self.kill_at = trainer, path, kill_at
        self.model = trainer.model
        self.before = None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.gradient, self.before = gradient_of(self.model), weights_of(self.model)
        self.lr = kwargs["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args, state, control, **kwargs):
        ids, self.model.seen = self.model.seen, []
        entry = {"step": state.global_step, "epoch": state.epoch, "ids": ids}
        entry |= {"fillers": self.fillers, "lr": self.lr}
        entry |= {"gradient": self.gradient.tolist(), "before": self.before.tolist()}
        append(self.path, entry)

    def on_step_begin(self, args, state, control, **kwargs):
        self.fillers = [
            micro_step.info.is_filler for micro_step in self.trainer.odb_run.losses.waiting
        ]
        if state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments(folder, **options):
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": LR,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 2,
        "save_strategy": "no",
        "num_train_epochs": 2,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
        "ddp_find_unused_parameters": False,
    }
    kind = Seq2SeqTrainingArguments if options.pop("seq2seq", False) else TrainingArguments
    return kind(**{**given, **options})


def config(**options):
    return ODBConfig(**{"token_budget": 64, "window": 12, "round_size": 4, **options})


def make_trainer(folder, name="train", model="Normalizing", size=40, kill_at=None, **options):
    """A trainer that records into `folder/name-rank.jsonl`."""
    rank, _ = rank_and_size()
    model = getattr(language_models, model)() if isinstance(model, str) else model
    odb = config(**options.pop("odb", {}))
    kind = options.pop("kind", ODBTrainer)
    keys = ("compute_loss_func", "eval_dataset", "data_collator")
    extra = {key: options.pop(key) for key in keys if key in options}
    trainer = kind(model, arguments(folder, **options), train_dataset=Texts(size), odb=odb, **extra)
    # Ids stay in the batch: the model takes them.
    trainer.add_callback(Recorder(trainer, Path(folder, f"{name}-{rank}.jsonl"), kill_at))
    return trainer


def entries_of(folder, name):
    return read(Path(folder, f"{name}-{rank_and_size()[0]}.jsonl"))


def resume_everywhere(folder, places=None, **options):
    """Train with a checkpoint at every step, then go on from each place (default: all).

    Returns:
        Entries of the whole run.
    """
    whole = make_trainer(folder, "whole", save_strategy="steps", save_steps=1, **options)
    whole.train()
    entries, weights = entries_of(folder, "whole"), weights_of(whole.model)
    every = range(1, len(entries) + 1)
    for place in every if places is None else sorted({*places(len(entries))} & {*every}):
        resumed = make_trainer(folder, f"from-{place}", **options)
        resumed.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{place}")))
        path = Path(folder, f"from-{place}-{rank_and_size()[0]}.jsonl")
        rest = read(path) if path.exists() else []
        assert rest == entries[place:], place
        assert torch.equal(weights_of(resumed.model), weights), place
        assert resumed.state.global_step == len(entries)
        assert resumed.state.epoch == whole.state.epoch
    return entries


def main():
    """Train as `sys.argv[1]`, JSON, says; then, if it was to resume, from the beginning, too."""
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    resume = options.pop("resume", None)
    runs = [(resume, options)]
    if resume:
        runs.append((None, {**options, "name": "whole", "odb": {}}))
    for checkpoint, run in runs:
        trainer = make_trainer(**run)
        output = trainer.train(resume_from_checkpoint=checkpoint)
        result = {"weights": weights_of(trainer.model).tolist(), "steps": output.global_step}
        print(json.dumps(result | {"epoch": trainer.state.epoch}), flush=True)
    if dist.is_initialized():
        del trainer  # see `rank_jobs.finish`
        gc.collect()
        dist.destroy_process_group()
