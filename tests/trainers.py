"""The same run under every trainer, and one registry of them.

A `Job` says what is trained. A function of `TRAINERS` trains it as a user would, and returns a
`Result`; a line per optimizer step is in a file of each rank, also where the run is killed.
"""

import copy
import csv
import gc
import json
import logging
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import language_models as lm
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from language_models import LR, Texts, read
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from memory_faults import PLACES, fail
from rank_jobs import RankJob
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from odb_nodes import Checkpoints, Ledger, ODBDataLoader, TokenBudget, pop_step_info
from odb_nodes.integrations.accelerate import configure_accelerator
from odb_nodes.integrations.huggingface import ODBConfig, ODBTrainer
from odb_nodes.integrations.lightning import ODBCallback, ODBDataModule
from odb_nodes.integrations.llama_factory import DynamicBatches
from odb_nodes.tools.estimate import estimate_steps
from odb_nodes.training.memory import OomGuard
from odb_nodes.training.monitor import Monitor, StepMeter

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

WARM = (
    "accelerate",
    "lightning.pytorch",
    "transformers.trainer_seq2seq",
    "odb_nodes.integrations.accelerate",
    "odb_nodes.integrations.huggingface",
    "odb_nodes.integrations.lightning",
)
OF_LIGHTNING = r"ignore:.isinstance\(treespec, LeafSpec\). is deprecated:FutureWarning"
OF_TRANSFORMERS = "ignore:.(is_)?gradient_checkpointing. is deprecated:FutureWarning"
BEFORE_5 = int(transformers.__version__.split(".")[0]) < 5


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and how the run is interrupted.

    Attributes:
        folder: where checkpoints, the ledger, the monitor's records and `name-rank.jsonl` are.
        save_every: optimizer steps between checkpoints; 0 for none.
        resume: optimizer step of the checkpoint that the run goes on from; 0 begins.
        kill_at: the optimizer step that the process is killed in.
        fail_at: the optimizer step that raises KeyboardInterrupt.
        on_oom: what a guard does where memory runs out; None for no guard.
        fails_above: the most tokens of a batch that fits into memory under a guard.
    """

    folder: Path
    name: str = "run"
    size: int = 40
    accumulate: int = 1
    epochs: int = 2
    token_budget: int = 64
    exclude: tuple = ()
    records: bool = False
    save_every: int = 0
    resume: int = 0
    kill_at: int | None = None
    fail_at: int | None = None
    on_oom: str | None = None
    fails_above: int = 1 << 30

    @property
    def ledger(self):
        return Path(self.folder, "ledger") if self.records else None

    @property
    def monitor(self):
        folder = Path(self.folder, "monitor")
        return Monitor(folder, every=1, progress=False) if self.records else None

    @property
    def options(self):
        """The options of the loader."""
        options = {"token_budget": self.token_budget, "window": 12, "round_size": 4}
        return options | {"exclude": self.exclude or None}

    def loader(self, **more):
        return ODBDataLoader(Texts(self.size), accumulate=self.accumulate, **self.options, **more)

    def model(self):
        """Under a guard, one that is NaN without targets, and counts how often memory ran out."""
        model = lm.Mean() if self.on_oom is None else lm.Averaging()
        model.ooms, place = 0, PLACES[self.accumulate > 1]

        def fails(rows, width):
            model.ooms += rows * width > self.fails_above
            return rows * width > self.fails_above

        return fail(model, "features", fails, place)

    def estimate(self):
        """Optimizer steps of the run, as a loop of one's own learns them ahead."""
        _, world_size = lm.rank_and_size()
        options = {"window": 12, "accumulate": self.accumulate, "world_size": world_size}
        budget = TokenBudget(self.token_budget)
        return self.epochs * estimate_steps(Texts(self.size), budget=budget, **options)

    def entries(self, rank=0):
        return read(Path(self.folder, f"{self.name}-{rank}.jsonl"))


class Result(NamedTuple):
    """The result of a run: final weights, estimated steps, logged metrics, failed batches."""

    weights: torch.Tensor
    estimate: int
    logs: list
    ooms: int


class Record:
    """Writes a line for each optimizer step of this rank."""

    def __init__(self, job, model):
        job.folder.mkdir(parents=True, exist_ok=True)
        self.job, self.model, self.step = job, model, job.resume
        self.path = Path(job.folder, f"{job.name}-{lm.rank_and_size()[0]}.jsonl")
        self.path.touch()

    def before_step(self):
        """Call where the gradient of the step is complete."""
        if self.step + 1 == self.job.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.step + 1 == self.job.fail_at:
            raise KeyboardInterrupt
        before, gradient = lm.weights_of(self.model), lm.gradient_of(self.model)
        self.entry = {"before": before.tolist(), "gradient": gradient.tolist()}

    def after_step(self, infos, save=None, **more):
        """Call after the optimizer has stepped on the batches of `infos`."""
        self.step += 1
        ids, self.model.seen = self.model.seen, []
        if self.job.on_oom:  # some were tried again, or in parts
            ids = [[*info.keys] for info in infos]
        self.entry |= {"step": self.step, "epoch": infos[0].epoch, "ids": ids}
        self.entry |= {"fillers": [info.is_filler for info in infos]}
        self.entry |= {"ends": [info.ends_optimizer_step for info in infos]}
        lm.append(self.path, self.entry | more)
        if save is not None and self.job.save_every and self.step % self.job.save_every == 0:
            save(self.step)


# --- loops of one's own ---------------------------------------------------------------------------


def train_guarded(job, model, optimizer, loader, record, save, ledger):
    """Take the steps of a guard."""
    guard = OomGuard(loader, job.on_oom, guard_above=0.0)
    for _ in range(loader.epoch, job.epochs):
        for step in guard:
            step.backward(model, lambda batch: model(**batch)["loss"])
            record.before_step()
            optimizer.step()
            optimizer.zero_grad()
            for info in step.infos:
                ledger.record(info)
            ledger.sync()
            record.after_step(step.infos, save)


def count_batch(monitor, batch, info, loss):
    if monitor is not None:
        monitor.step(batch, info, loss=loss.detach(), lr=LR)


def plain(job):
    """A loop over `ODBDataLoader`, with DDP and `Checkpoints`."""
    rank, world_size = lm.rank_and_size()
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    raw, loader, monitor = job.model(), job.loader(), None if job.on_oom else job.monitor
    model = DistributedDataParallel(raw) if world_size > 1 else raw
    optimizer = torch.optim.SGD(raw.parameters(), lr=LR, momentum=0.9)
    parts = {"model": raw, "optimizer": optimizer, "loader": loader}
    parts |= {} if monitor is None else {"monitor": monitor}
    record, meter, logs, infos = Record(job, raw), StepMeter(), [], []

    def checkpoints(step):
        shared = ["model", "optimizer"]
        return Checkpoints(job.folder / f"step-{step}", parts, replicated=shared)

    def save(step):
        if ledger is not None:
            ledger.sync()
        checkpoints(step).save(step)

    if job.resume:
        checkpoints(job.resume).load()
    ledger = None if job.ledger is None else Ledger(job.ledger, rank=rank, world_size=world_size)
    ended = False
    try:
        if job.on_oom:
            train_guarded(job, model, optimizer, loader, record, save, ledger)
        for _ in range(loader.epoch, 0 if job.on_oom else job.epochs):
            for batch in loader if monitor is None else monitor.watch(loader):
                infos.append(info := pop_step_info(batch))
                meter.add(batch, info)
                loss = model(**batch)["loss"]
                (loss * info.loss_scale).backward()
                if info.ends_optimizer_step:
                    record.before_step()
                    optimizer.step()
                    optimizer.zero_grad()
                count_batch(monitor, batch, info, loss)
                if ledger is not None:
                    ledger.record(info)
                if info.ends_optimizer_step:
                    logs += [meter.take_metrics(torch.clone, "cpu")] if world_size == 1 else []
                    record.after_step(infos, save)
                    infos = []
        ended = True
        if monitor is not None:
            monitor.close()
    finally:
        loader.close()
        if ledger is not None:
            ledger.close(ended=ended)
    return Result(lm.weights_of(raw), job.estimate(), logs, raw.ooms)


def accelerate(job):
    """A loop of Accelerate."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulate)
    raw, monitor = job.model(), None if job.on_oom else job.monitor
    optimizer = torch.optim.SGD(raw.parameters(), lr=LR, momentum=0.9)
    ledger = None if job.on_oom else job.ledger
    loader = configure_accelerator(accelerator, job.loader(), ledger, monitor)
    model, optimizer, loader = accelerator.prepare(raw, optimizer, loader)
    if job.resume:
        accelerator.load_state(job.folder / f"step-{job.resume}")
    record, logs, infos = Record(job, raw), [], []

    def save(step):
        accelerator.save_state(job.folder / f"step-{step}", safe_serialization=False)

    if job.on_oom:
        with loader, Ledger(job.ledger) as ledger:
            train_guarded(job, model, optimizer, loader.loader, record, save, ledger)
    with loader:
        for _ in range(loader.loader.epoch, 0 if job.on_oom else job.epochs):
            for batch in loader:
                infos.append(info := pop_step_info(batch))
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss * info.loss_scale)
                    if accelerator.sync_gradients:
                        record.before_step()
                    optimizer.step()
                    optimizer.zero_grad()
                count_batch(monitor, batch, info, loss)
                if accelerator.sync_gradients:
                    logs.append(loader.take_metrics())
                    record.after_step(infos, save)
                    infos = []
    accelerator.free_memory()
    return Result(lm.weights_of(raw), job.estimate(), logs, raw.ooms)


# --- transformers ---------------------------------------------------------------------------------


class Recorder(TrainerCallback):
    """Records the steps of a `Trainer` with dynamic batches."""

    def __init__(self, trainer, job):
        self.trainer, self.record = trainer, Record(job, trainer.model)

    def on_train_begin(self, args, state, control, **kwargs):
        self.record.step, self.estimate = state.global_step, state.max_steps

    def on_step_begin(self, args, state, control, **kwargs):
        self.infos = [step.info for step in self.trainer.odb_run.losses.waiting if step]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.lr = kwargs["optimizer"].param_groups[0]["lr"]
        if (guard := self.trainer.odb_run.guard) is not None:
            self.infos = guard.infos
        self.record.before_step()

    def on_step_end(self, args, state, control, **kwargs):
        self.record.after_step(self.infos, lr=self.lr, progress=state.epoch)


class GradientCheck(TrainerCallback):
    """Compares the gradient of each step with the gradient of a copy of the model.

    Args:
        expect: called with the copy and the batches of the step, without fillers; computes it.
        keys: the arguments of the model that are kept of a batch.
    """

    def __init__(self, trainer, expect, *keys):
        self.trainer, self.expect, self.batches = trainer, expect, []
        self.errors, self.of_parameters = [], []  # of each step: of all, the largest of any
        self.reference = copy.deepcopy(trainer.model)

        def keep(module, args, arguments):
            if module.training:
                self.batches.append({key: arguments[key] for key in keys if key in arguments})

        trainer.model.register_forward_pre_hook(keep, with_kwargs=True)
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        self.reference.load_state_dict(self.trainer.model.state_dict())
        self.fillers = [step.factor == 0 for step in self.trainer.odb_run.losses.waiting if step]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        steps, self.batches = zip(self.batches, self.fillers, strict=True), []
        self.reference.zero_grad()
        self.expect(self.reference, [batch for batch, is_filler in steps if not is_filler])
        pairs = zip(self.trainer.model.parameters(), self.reference.parameters(), strict=True)
        grads = [
            (parameter.grad, reference.grad)
            for parameter, reference in pairs
            if parameter.grad is not reference.grad
        ]
        off = [((gradient - expected).norm(), expected.norm()) for gradient, expected in grads]
        self.of_parameters.append(max((error / norm for error, norm in off if error), default=0.0))
        whole, norm = torch.tensor(off).norm(dim=0)
        self.errors.append(float(whole / norm))


def arguments(folder, **options):
    defaults = {
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
    if options.get("save_steps"):
        defaults["save_strategy"] = "steps"
    return Seq2SeqTrainingArguments(**defaults | options)


def config(**options):
    return ODBConfig(**{"token_budget": 64, "window": 12, "round_size": 4, **options})


def make_trainer(
    folder, name="run", model="Normalizing", size=40, kind=ODBTrainer, odb=(), **options
):
    """A trainer that records its steps, unless its model notes none."""
    model = getattr(lm, model)() if isinstance(model, str) else model
    part_names = (
        "compute_loss_func",
        "eval_dataset",
        "data_collator",
        "train_dataset",
        "callbacks",
    )
    parts = {"train_dataset": Texts(size)}
    parts |= {name: options.pop(name) for name in part_names if name in options}
    trainer = kind(model, arguments(folder, **options), odb=config(**dict(odb)), **parts)
    trainer.add_callback(Recorder(trainer, Job(folder=Path(folder), name=name)))
    return trainer


def entries_of(folder, name="run"):
    return read(Path(folder, f"{name}-{lm.rank_and_size()[0]}.jsonl"))


def resume(folder, name, step, **options):
    """Resume from the checkpoint of `step`; return the entries of the later steps, the trainer."""
    trainer = make_trainer(folder, name, **options)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return entries_of(folder, name), trainer


def trained_ids(entries):
    """The ids of all samples of these entries, in the order of the steps."""
    return [index for entry in entries for index in lm.ids_of([entry])]


def encoder_decoder():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    sizes |= {"vocab_size": lm.VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes))


def decoder(**options):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"vocab_size": lm.VOCABULARY, "num_attention_heads": 2, "use_cache": False}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **options))


class Stream(IterableDataset):
    """40 texts without a length; each rank reads all, and takes its own."""

    def __iter__(self):
        return iter(map(lm.sample_of, range(40)))


def logs_of(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def dynamic_trainer(job, arguments, **recorded):
    odb = config(**job.options, **recorded)
    return ODBTrainer(job.model(), arguments, train_dataset=Texts(job.size), odb=odb)


def llama_factory_trainer(job, arguments, **recorded):
    """A stock trainer, as LLaMA-Factory makes it of its arguments."""
    yaml = {"cutoff_len": min(24, job.token_budget), "stage": "sft"}
    yaml |= {"gradient_accumulation_steps": job.accumulate}
    batches = DynamicBatches.of(yaml, token_budget=job.token_budget)
    trainer = Seq2SeqTrainer(job.model(), arguments, train_dataset=Texts(job.size))
    options = {key: value for key, value in job.options.items() if key != "token_budget"}
    return batches.configure(trainer, **options, **recorded)


def under_trainer(job, make=dynamic_trainer):
    """A `Trainer` of transformers."""
    options = {"num_train_epochs": job.epochs, "gradient_accumulation_steps": job.accumulate}
    options |= {"logging_steps": 1, "save_steps": job.save_every or 500}
    options |= {"save_strategy": "steps" if job.save_every else "no"}
    recorded = {"ledger": job.ledger, "monitor": job.monitor}
    recorded |= {"on_oom": job.on_oom, "guard_above": 0.0} if job.on_oom else {}
    trainer = make(job, arguments(job.folder, **options), **recorded)
    trainer.add_callback(recorder := Recorder(trainer, job))
    resume = str(job.folder / f"checkpoint-{job.resume}") if job.resume else None
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Result(lm.weights_of(trainer.model), recorder.estimate, logs, trainer.model.ooms)


# --- Lightning ------------------------------------------------------------------------------------


class Module(LightningModule):
    """Trains a language model, and notes its batches."""

    def __init__(self, dropout=0.0, lr=LR):
        super().__init__()
        self.lr, self.model, self.dropout = lr, lm.Mean(), torch.nn.Dropout(dropout)
        self.seen = []  # per batch: epoch, ids, whether it fills, optimizer steps before
        self.infos = []  # of the present optimizer step
        self.gradients = []  # per optimizer step
        torch.manual_seed(1)  # of the dropout

    @property
    def odb(self):
        return next(
            callback for callback in self.trainer.callbacks if isinstance(callback, ODBCallback)
        )

    def training_step(self, batch, batch_idx):
        self.note(batch)
        return self.dropout(self.model(**batch)["loss"])

    def note(self, batch):
        self.infos.append(info := self.odb.step_info)
        step = self.trainer.global_step
        self.seen.append([self.current_epoch, batch["id"].tolist(), info.is_filler, step])

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(lm.gradient_of(self.model).clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)

    def groups(self):
        """Per optimizer step: the ids of its batches on this rank, without fillers."""
        steps = {}
        for _, ids, is_filler, step in self.seen:
            steps.setdefault(step, []).extend([] if is_filler else ids)
        return list(steps.values())


class GuardedModule(Module):
    """Optimizes by hand: each of its batches is an optimizer step of an `OomGuard`."""

    options = {}  # noqa: RUF012  # further options of the loader

    def __init__(self, job):
        super().__init__()
        self.job, self.model, self.automatic_optimization = job, job.model(), False

    def training_step(self, step, batch_idx):
        step.backward(self.trainer.strategy.model, lambda batch: self.model(**batch)["loss"])
        self.infos = step.infos
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer):
        """Notes no gradient, which may be in parts, or none."""

    def train_dataloader(self):
        loader = self.job.loader(**self.options)
        return self.odb.batches(OomGuard(loader, self.job.on_oom, guard_above=0.0))


class RecordingCallback(Callback):
    """Records the steps of a `Module`, and saves; before `ODBCallback` or after it."""

    def __init__(self, job, module):
        self.record, self.module, self.estimate = Record(job, module.model), module, None

    def on_train_start(self, trainer, module):
        if trainer.datamodule is not None:
            self.estimate = trainer.datamodule.estimated_steps()

    def on_before_optimizer_step(self, *_):
        self.record.before_step()

    def on_train_batch_end(self, trainer, *_):
        def save(step):
            trainer.save_checkpoint(self.record.job.folder / f"step-{step}.ckpt")

        if trainer.global_step > self.record.step:
            self.record.after_step(self.module.infos, save)
            self.module.infos = []


class SaveEach(Callback):
    """Saves after each batch, also within an optimizer step."""

    def __init__(self, folder):
        self.folder, self.number = folder, 0

    def on_train_batch_end(self, trainer, *_):
        self.number += 1
        trainer.save_checkpoint(f"{self.folder}/{self.number}.ckpt")


def lightning_trainer(*callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    arguments = {"accelerator": "cpu", "enable_checkpointing": False, **quiet, **options}
    if "max_steps" not in options:
        arguments.setdefault("max_epochs", 1)
    return Trainer(callbacks=[*callbacks], **arguments)


def under_lightning(job):
    """A `Trainer` of Lightning."""
    rank, world_size = lm.rank_and_size()
    module = GuardedModule(job) if job.on_oom else Module()
    odb = ODBCallback(ledger=job.ledger, monitor=job.monitor)
    callback = RecordingCallback(job, module)
    ranks = {"strategy": "ddp", "devices": world_size} if world_size > 1 else {"devices": 1}
    accumulate = 1 if job.on_oom else job.accumulate  # its batches are whole steps
    options = {"max_epochs": job.epochs, "accumulate_grad_batches": accumulate, **ranks}
    options |= {"logger": CSVLogger(job.folder), "log_every_n_steps": 1}
    callbacks = [callback, odb] if job.accumulate == 1 else [odb, callback]  # who saves first
    trainer = lightning_trainer(*callbacks, **options)
    resume = str(job.folder / f"step-{job.resume}.ckpt") if job.resume else None
    data = None if job.on_oom else ODBDataModule(Texts(job.size), **job.options)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=resume)
    except SystemExit:  # what Lightning makes of an interrupt
        raise KeyboardInterrupt from None
    logs = []
    if rank == 0:
        with open(trainer.logger.experiment.metrics_file_path) as file:
            logs = [{key: float(row[key] or 0) for key in row} for row in csv.DictReader(file)]
    ooms = module.model.ooms if job.on_oom else 0
    return Result(lm.weights_of(module.model), callback.estimate, logs, ooms)


# --- the registry ---------------------------------------------------------------------------------

TRAINERS = {
    "plain loop": plain,
    "Accelerate": accelerate,
    "Transformers": under_trainer,
    "LLaMA-Factory": partial(under_trainer, make=llama_factory_trainer),
    "Lightning": under_lightning,
}
"""What trains a `Job`, by name."""

OWN_CODE = tuple(name for name in TRAINERS if name != "LLaMA-Factory")
"""Trainers with an integration of their own: LLaMA-Factory has a `Trainer` of transformers."""

COUNTS_ANEW = ("Accelerate",)
"""On another number of ranks, the `Monitor` counts an epoch from where the run goes on."""


def train(trainer, **options):
    """The run of a job, of these options, under a trainer."""
    return TRAINERS[trainer](Job(**options | {"folder": Path(options["folder"])}))


def on_ranks(folder, world_size, body, *args, **options):
    """A job of ranks whose program has imported this module."""
    here = Path(__file__).parent
    folders = [f"{here / 'integrations' / name}" for name in ("", "huggingface", "lightning")]
    begin = f"import sys; sys.path[:0] = {[f'{here}', *folders]}"
    begin += "\nimport language_models as lm, trainers"
    return RankJob(folder, f"{begin}\n{dedent(body)}", world_size, *args, warm=WARM, **options)


def results_of(folder, body, *args, **options):
    """The last line that each of two ranks has printed, from JSON."""
    with on_ranks(folder, 2, body, *args, **options) as job:
        return [json.loads(out.splitlines()[-1]) for out in job.finish(200)]


def jobs_on_ranks(trainer, world_size, *jobs):
    """A job of ranks that train these, one after the other."""
    folder = Path(jobs[0]["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    argument = json.dumps([trainer, jobs], default=str)
    return on_ranks(folder, world_size, "trainers.main()", argument, init=False)


def main():
    """Train what `sys.argv[1]`, JSON, says."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trainer, jobs = json.loads(sys.argv[1])
    environment = dict(os.environ)
    for job in jobs:
        os.environ.update(environment)  # of which Lightning deletes some
        train(trainer, **job)
    if dist.is_initialized():
        gc.collect()  # see `rank_jobs.finish`
        dist.destroy_process_group()
